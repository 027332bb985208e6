"""What stands in a pipeline rank's model chunk for the modules of other chunks.

    class            stands for                          its forward returns
    SkippedBlock     any other block                     the hidden state it is given
    ReceivingBlock   the block before the chunk's first  the hidden state that was received
    SendingBlock     the block after the chunk's last    the hidden state it is given, and keeps it to be sent
    PassedBlock      a block like others, in a trial      the hidden state it is given
    SkippedModule    an embedding, norm or head          zeros of an embedding's shape, or the hidden state it is given

All are Placeholders: none has parameters, and each keeps its place in its list and the plain attributes of the module
it stands for, which some models read (`layer.attention_type`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from zero3d.nested import tensors_in

LENGTH = "sequence_length"  # entry of a micro-batch: that of the whole, of which a chunk is given a rank's rows


class Placeholder(nn.Module):
    """Stands for a module that is in another model chunk: has its plain attributes, none of its parameters.

    kind   class of the module it stands for, so that a list of blocks is still one of one class
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        plain = {key: value for key, value in vars(module).items() if isinstance(value, (str, int, float))}
        self.__dict__.update((key, value) for key, value in plain.items() if not key.startswith("_"))
        self.kind: type[nn.Module] = type(module)


def kind_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, or of the one that a placeholder stands for."""
    return module.kind if isinstance(module, Placeholder) else type(module)


@dataclass
class ChunkTensors:
    """What goes through one forward of a model chunk beside its arguments.

    received  the hidden state of the chunk before; None on the first
    routed    router logits of the chunks before, if any
    sent      the hidden state for the chunk after, once the last block here has run
    """

    received: Tensor | None = None
    routed: Tensor | None = None
    sent: Tensor | None = None


class SkippedBlock(Placeholder):
    """Stands for a block of another chunk: returns its hidden state, in the form in which blocks here return theirs."""

    def __init__(self, block: nn.Module, tuples: int, tensors: ChunkTensors) -> None:
        super().__init__(block)
        self._tuples, self._tensors = tuples, tensors

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return in_form(self._next(first_argument(args, kwargs)), self._tuples)

    def _next(self, hidden: Any) -> Any:
        return hidden


class ReceivingBlock(SkippedBlock):
    """Stands for the block before the chunk's first: returns the received hidden state instead of its own."""

    def _next(self, hidden: Any) -> Any:
        return self._tensors.received


class SendingBlock(SkippedBlock):
    """Stands for the block after the chunk's last: keeps what is sent. A plain model's forward ends here."""

    def __init__(self, block: nn.Module, tuples: int, tensors: ChunkTensors, ends: bool) -> None:
        super().__init__(block, tuples, tensors)
        self._ends = ends

    def _next(self, hidden: Any) -> Any:
        self._tensors.sent = hidden
        if self._ends:
            raise ChunkDone
        return hidden


class ChunkDone(Exception):
    """The chunk's blocks have run, and nothing of a plain model's forward is needed any more."""


class PassedBlock(Placeholder):
    """Stands for a block that is like others in a trial: returns its hidden state in their form (`in_form`)."""

    def __init__(self, block: nn.Module, form: Mapping[str, int]) -> None:
        super().__init__(block)
        self._form = form

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return in_form(first_argument(args, kwargs), self._form["tuples"])


class SkippedModule(Placeholder):
    """Stands for an embedding, norm or head: returns zeros of the width of an embedding, or what it is given.

    A module around several embeddings is given inputs_embeds where it would get token ids: the hidden state, among
    numbers of positions and types, is what has fractions.

    projects  a linear layer returns zeros of its own width, too
    """

    def __init__(self, module: nn.Module, tensors: ChunkTensors, projects: bool = False) -> None:
        super().__init__(module)
        self._width, self._tensors = (module.embedding_dim if isinstance(module, nn.Embedding) else None), tensors
        self._projects = module.out_features if projects and isinstance(module, nn.Linear) else None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        arguments, like = list(tensors_in([args, kwargs])), self._tensors.received
        hidden = next((t for t in arguments if t.is_floating_point()), None)
        if self._projects is not None and hidden is not None:
            return hidden.new_zeros(()).expand(*hidden.shape[:-1], self._projects)
        if like is None or (self._width is None and hidden is not None):
            return hidden if hidden is not None else first_argument(args, kwargs)
        width = like.shape[-1] if self._width is None else self._width
        return like.new_zeros(()).expand(*arguments[0].shape, width)


def in_form(hidden: Any, tuples: int) -> Any:
    """Return a hidden state in the form in which blocks return theirs: in a tuple of this length, or as it is for 0."""
    return (hidden, *[None] * (tuples - 1)) if tuples else hidden


def first_argument(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a block is called with first: its hidden state."""
    return args[0] if args else next(iter(kwargs.values()))
