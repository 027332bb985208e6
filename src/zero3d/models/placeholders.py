"""What stands in a pipeline stage's part of a model where modules of other parts were.

    Pass     a block: returns what it is given
    Entry    the block before the part's first: returns the hidden state that was received
    Exit     the block after the part's last: keeps the hidden state to be sent
    Blank    an embedding, norm or head: zeros of an embedding's shape, or the hidden state it is given

None has parameters. Each keeps its place in its list and the plain attributes of what was there, which
some models read (`layer.attention_type`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero3d.nested import tensors_in


class Elsewhere(nn.Module):
    """Stands where a module of another pipeline stage was: its plain attributes, none of its parameters.

    kind   class of the module that was here, so that a list of blocks is still one of one class
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (str, int, float))}
        self.__dict__.update((key, value) for key, value in plain.items() if not key.startswith("_"))
        self.kind: type[nn.Module] = type(module)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Class of a module, or of the one that was in its place."""
    return module.kind if isinstance(module, Elsewhere) else type(module)


@dataclass
class Relay:
    """Tensors on their way through one forward of a part."""

    received: Tensor | None = None
    routed: Tensor | None = None
    sent: Tensor | None = None


class Pass(Elsewhere):
    """A block of another part: returns its hidden state, in the form in which blocks here return theirs."""

    def __init__(self, block: nn.Module, tuples: bool, relay: Relay) -> None:
        super().__init__(block)
        self._tuples, self._relay = tuples, relay

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self._taken(first_argument(args, kwargs))
        return (hidden,) if self._tuples else hidden

    def _taken(self, hidden: Any) -> Any:
        return hidden


class Entry(Pass):
    """The block before the part's first: here the received hidden state enters."""

    def _taken(self, hidden: Any) -> Any:
        return self._relay.received


class Exit(Pass):
    """The block after the part's last: keeps what is sent. A plain model's forward ends here."""

    def __init__(self, block: nn.Module, tuples: bool, relay: Relay, ends: bool) -> None:
        super().__init__(block, tuples, relay)
        self._ends = ends

    def _taken(self, hidden: Any) -> Any:
        self._relay.sent = hidden
        if self._ends:
            raise Left
        return hidden


class Left(Exception):
    """The part's blocks have run, and nothing of a plain model's forward is needed any more."""


class Blank(Elsewhere):
    """An embedding, norm or head of another part: zeros of the width of an embedding, or what it is given.

    A module around several embeddings is given inputs_embeds where it would get token ids: the hidden state, among
    numbers of positions and types, is what has fractions.
    """

    def __init__(self, module: nn.Module, relay: Relay) -> None:
        super().__init__(module)
        self._width, self._relay = (module.embedding_dim if isinstance(module, nn.Embedding) else None), relay

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors, like = list(tensors_in([args, kwargs])), self._relay.received
        hidden = next((t for t in tensors if t.is_floating_point()), None)
        if like is None or (self._width is None and hidden is not None):
            return hidden if hidden is not None else first_argument(args, kwargs)
        width = like.shape[-1] if self._width is None else self._width
        return like.new_zeros(()).expand(*tensors[0].shape, width)


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a block is called with first: its hidden state."""
    return args[0] if args else next(iter(kwargs.values()))
