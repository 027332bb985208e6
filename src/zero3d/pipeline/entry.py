"""What later pipeline stages are given beside the hidden state: what the first one gave the model's decoder.

    first stage   the model's own forward: towers, embeddings, positions          its decoder is given
                  inputs_embeds, position_ids, visual_pos_masks, deepstack_visual_embeds, attention_mask ...
    later stage   the same forward on a hidden state, without images; its decoder is given what was received in the
                  place of what that makes otherwise, or not at all

    masks                      made again on every stage, by the model's own function: L x L numbers never travel
    integers, positions        sent in one message of int64, `facts`, where later stages make others
    tensors with a gradient    sent behind the hidden state, and their gradients back, up to the last stage that
                               reads them (DeepStack's features)
    embeddings, and what       likewise, where blocks read them again (Zamba2, Gemma 4)
    modules make of them

Which these are is found by running the stages (stages_trial.py). Shapes follow from that of the token ids alone, as
torch's schedules want them: of a tensor with a row for each image token as many rows are sent as there are tokens, and
`facts` begins with how many of them count. It tells, too, what a micro-batch does not have: one of text alone has no
features. A later stage reads it from the device once for every micro-batch.

Blocks are left at the output of a chunk's last one: what happens between two blocks happens on the stage after.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, decoder_of
from zero3d.models.placeholders import Placeholder
from zero3d.nested import tensors_in

ABSENT, OWN = -1, -2  # of a tensor in `facts`: there is none; the micro-batch itself has it
BATCH, LENGTH, TOKENS, ROWS = "B", "L", "BL", "R"  # sizes that follow from token ids [B, L]; ROWS: at most B x L
EMBEDDINGS = "inputs_embeds"
GIVEN, MADE = "given", "made"  # to the decoder by keyword; by a module, by its name


class Leaf(NamedTuple):
    """A tensor that later stages are given.

    place   a keyword of the decoder, or a module whose output it is
    part    which of the tensors there
    sizes   of its dimensions: numbers, or what follows from token ids
    dtype   of integers; None of a tensor that has the hidden state's, and travels behind it
    until   stages that begin with a later block do not read it
    """

    place: tuple[str, str]
    part: int
    sizes: tuple[int | str, ...]
    dtype: torch.dtype | None
    until: int

    def shape(self, ids_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape in which it is sent for token ids of this shape."""
        batch, length = ids_shape
        known = {BATCH: batch, LENGTH: length, TOKENS: batch * length, ROWS: batch * length}
        return tuple(size if isinstance(size, int) else known[size] for size in self.sizes)

    def holds(self, tensor: Tensor, ids_shape: Sequence[int]) -> bool:
        """Return whether a tensor has this leaf's shape, or where rows are of images' tokens fewer rows."""
        shape = self.shape(ids_shape)
        rows = bool(self.sizes) and self.sizes[0] == ROWS and tensor.dim() == len(shape)
        if rows and tensor.shape[0] <= shape[0]:
            shape = (tensor.shape[0], *shape[1:])
        return tuple(tensor.shape) == shape

    @property
    def name(self) -> str:
        """Return what an error calls it."""
        return self.place[1]


@dataclass(frozen=True)
class Entry:
    """What stages after the first one need beside the hidden state.

    leaves  all of it; empty where they need nothing
    lists   keywords whose value is a list of tensors
    """

    leaves: tuple[Leaf, ...]
    lists: frozenset[str] = frozenset()

    def floats(self, block: int) -> list[Leaf]:
        """Return those with a gradient that a stage is sent whose first block is this one."""
        return [leaf for leaf in self.leaves if leaf.dtype is None and block <= leaf.until]

    def facts(self, ids_shape: Sequence[int]) -> int:
        """Return how many integers a stage is sent."""
        return len(self.leaves) + sum(prod(leaf.shape(ids_shape)) for leaf in self.leaves if leaf.dtype is not None)


class Crossing:
    """What goes into and out of one model chunk beside hidden state and arguments.

    model   the chunk's, of Hugging Face
    starts  the first block of every chunk
    """

    def __init__(self, model: Any, entry: Entry, starts: Sequence[int], chunk: int) -> None:
        self.entry, self.starts = entry, starts
        self._block = block = starts[chunk]
        self._after = starts[chunk + 1] if chunk + 1 < len(starts) else None
        self._values: dict[int, Tensor] = {}  # by number of a leaf
        self._own: frozenset[int] = frozenset()  # leaves that the micro-batch itself has
        self._batch: Sequence[Tensor] = ()
        decoder = decoder_of(model)
        self._entered = {} if block == 0 else set(inspect.signature(base_of(model).forward).parameters)
        if block == 0:
            decoder.register_forward_pre_hook(self._record, with_kwargs=True)
            if decoder is base_of(model):
                base_of(model).get_input_embeddings().register_forward_hook(self._embed)
            for name in {leaf.place[1] for leaf in entry.leaves if leaf.place[0] == MADE}:
                model.get_submodule(name).register_forward_hook(partial(self._made, name))
        else:
            decoder.register_forward_pre_hook(self._give, with_kwargs=True)

    def enters(self, chunk: int) -> list[Leaf]:
        """Return what a chunk is sent that has a gradient."""
        return self.entry.floats(self.starts[chunk])

    # --- the first chunk ------------------------------------------------------------------------

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Forget the micro-batch before; this one is given `batch` beside its token ids."""
        self.forget()
        self._batch = list(tensors_in(batch))

    def _record(self, decoder: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for number, leaf in enumerate(self.entry.leaves):
            if leaf.place[0] != GIVEN or leaf.name not in kwargs:
                continue
            found = list(tensors_in(kwargs[leaf.name]))
            if leaf.part < len(found):
                self._note(number, found[leaf.part])
        known = {leaf.name for leaf in self.entry.leaves}
        for name, value in kwargs.items():
            for tensor in tensors_in(value):
                if name not in known and tensor.requires_grad and name != EMBEDDINGS:
                    raise ConfigError(
                        f"the language model is given {name} {list(tensor.shape)} with a gradient, and its pipeline "
                        "was built without it: leave out what a micro-batch has beside text and images, or pass pp=1."
                    )

    def _embed(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note what a language model's own embedding returns, which is not given to it."""
        for number, leaf in enumerate(self.entry.leaves):
            if leaf.name == EMBEDDINGS:
                self._note(number, output)

    def _made(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        for number, leaf in enumerate(self.entry.leaves):
            if leaf.place == (MADE, name):
                self._note(number, output)

    def _note(self, number: int, tensor: Tensor) -> None:
        self._values[number] = tensor
        if any(tensor is given for given in self._batch):
            self._own |= {number}

    # --- leaving ------------------------------------------------------------------------------

    def leaving(self, hidden: Tensor, ids_shape: Sequence[int], received: Tensor | None) -> tuple[Tensor, ...]:
        """Return what is sent to the next chunk behind the hidden state: tensors with a gradient, facts.

        received  facts of the chunk before, which are passed on as they are
        """
        assert self._after is not None, "the last chunk sends nothing"
        floats = []
        for number, leaf in enumerate(self.entry.leaves):
            if leaf.dtype is None and self._after <= leaf.until:
                floats.append(self._sent(number, leaf, hidden, ids_shape))
        facts = self._facts(hidden.device, ids_shape) if received is None else received
        return (*floats, facts)

    def _sent(self, number: int, leaf: Leaf, hidden: Tensor, ids_shape: Sequence[int]) -> Tensor:
        shape = leaf.shape(ids_shape)
        value = None if number in self._own else self._values.get(number)
        if value is not None and (not leaf.holds(value, ids_shape) or value.dtype != hidden.dtype):
            raise _other(leaf, value, ids_shape)
        value = hidden.new_zeros(0, *shape[1:]) if value is None else value
        sent: Tensor = _Sent.apply(value, hidden, shape[0])  # type: ignore[no-untyped-call]
        return sent

    def _facts(self, device: torch.device, ids_shape: Sequence[int]) -> Tensor:
        header, parts = [], []
        for number, leaf in enumerate(self.entry.leaves):
            value = None if number in self._own else self._values.get(number)
            header.append(OWN if number in self._own else ABSENT if value is None else (*value.shape, 1)[0])
            if leaf.dtype is None:
                continue
            if value is None:
                parts.append(torch.zeros(prod(leaf.shape(ids_shape)), dtype=torch.int64, device=device))
            elif not leaf.holds(value, ids_shape) or value.dtype != leaf.dtype:
                raise _other(leaf, value, ids_shape)
            else:
                parts.append(value.reshape(-1).to(device, torch.int64))
        return torch.cat([torch.tensor(header, dtype=torch.int64, device=device), *parts])

    # --- entering -----------------------------------------------------------------------------

    def enter(
        self, hidden: Tensor, floats: Sequence[Tensor], facts: Tensor, ids_shape: Sequence[int]
    ) -> tuple[Tensor, dict[str, Any]]:
        """Take what the chunk before has sent; return the hidden state, and keywords for the base model's forward."""
        self._values, self._own = {}, frozenset()
        hidden, *floats = _together(hidden, *floats)
        coming, header = iter(floats), facts[: len(self.entry.leaves)].tolist()
        place = len(self.entry.leaves)
        for number, (leaf, count) in enumerate(zip(self.entry.leaves, header, strict=True)):
            value = None
            if leaf.dtype is not None:
                shape = leaf.shape(ids_shape)
                value = facts[place : place + prod(shape)].view(shape).to(leaf.dtype)
                place += prod(shape)
            elif self._block <= leaf.until:
                value = next(coming)
                value = value[:count] if leaf.sizes[0] == ROWS and count >= 0 else value
            if count == OWN:
                self._own |= {number}
            elif count != ABSENT and value is not None:
                self._values[number] = value
        given = dict(self._given())
        return hidden, {name: value for name, value in given.items() if name in self._entered and value is not None}

    def received(self, name: str) -> Tensor | None:
        """Return the output of a module of the first chunk, where it was received."""
        numbers = (number for number, leaf in enumerate(self.entry.leaves) if leaf.place == (MADE, name))
        return next((self._values[number] for number in numbers if number in self._values), None)

    def _given(self) -> Iterator[tuple[str, Any]]:
        """Yield the decoder's keywords that were received, with their values."""
        by_name: dict[str, list[int]] = {}
        for number, leaf in enumerate(self.entry.leaves):
            if leaf.place[0] == GIVEN and (leaf.dtype is not None or self._block <= leaf.until):
                by_name.setdefault(leaf.name, []).append(number)
        for name, numbers in by_name.items():
            if any(number in self._own for number in numbers):
                continue
            values = [self._values[number] for number in numbers if number in self._values]
            yield name, (values if name in self.entry.lists else values[0]) if values else None

    def _give(self, decoder: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, {**kwargs, **dict(self._given())}

    def forget(self) -> None:
        """Let go of a micro-batch."""
        self._values, self._own = {}, frozenset()
        self._batch = ()


class SentModule(Placeholder):
    """Stands in a later chunk for a module of the first one whose output is read again: returns what was received."""

    crossing: Crossing  # the chunk's

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__(module)
        self._name = name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.crossing.received(self._name)


class _Sent(torch.autograd.Function):
    """Copies a tensor, with zeros for missing rows: no view, and with a gradient wherever the hidden state has one."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, hidden: Tensor, rows: int) -> Tensor:
        ctx.rows = tensor.shape[0]
        return torch.cat([tensor, tensor.new_zeros(rows - ctx.rows, *tensor.shape[1:])])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][: ctx.rows], None, None


class _Together(torch.autograd.Function):
    """Hands tensors on as they are. In a backward all of them have a gradient, of zeros where nothing reads them."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(t.view_as(t) for t in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return grads


def _together(*tensors: Tensor) -> tuple[Tensor, ...]:
    return _Together.apply(*tensors)  # type: ignore[no-any-return,no-untyped-call]


def _other(leaf: Leaf, value: Tensor, ids_shape: Sequence[int]) -> ConfigError:
    return ConfigError(
        f"the language model is given {leaf.name} {list(value.shape)} of {value.dtype} for token ids "
        f"{list(ids_shape)}, and its pipeline was built for {list(leaf.sizes)}: pass pp=1."
    )
