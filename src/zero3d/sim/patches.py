"""Everything that is put in the place of something else, for the time of a block, and why.

listening     to see what no operation shows: the arena's lending, storages that change their size in place
standing_in   what a process group without ranks and tensors without values cannot do
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fractions import Fraction
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, schedules

from zero3d import precision
from zero3d.distributed.axis import Axis
from zero3d.memory.arena import Arena
from zero3d.tensor_parallel.regions import RankRandom

WHOLE = 1 << 62  # elements


def _documents(packed: bool, position_ids: Tensor) -> Tensor | None:
    """As transformers numbers the documents of packed sequences, operation by operation, with the answer given."""
    before = position_ids[:, :1] - 1
    changes = torch.diff(position_ids, prepend=before, dim=-1)
    numbers = (changes != 1).cumsum(-1)
    (numbers[:, -1] == 0).all()
    return numbers if packed else None


class Listener(Protocol):
    """Who wants to know."""

    def lent(self, category: str, buffer: Tensor, used: Fraction | int | None = None) -> None:
        """The arena has lent a buffer."""

    def resized(self, storage: torch.UntypedStorage) -> None:
        """A storage has another size."""


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner.name` is `value`."""
    own = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own is None:
            delattr(owner, name)
        else:
            setattr(owner, name, own)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, `listener` hears of the arena's buffers and of resized storages."""
    resize, allocate, borrow = torch.UntypedStorage.resize_, Arena.allocate, Arena.borrow

    def resized(storage: torch.UntypedStorage, size: int) -> Any:
        done = resize(storage, size)
        listener.resized(storage)
        return done

    def allocated(arena: Arena, category: str, elements: int, used: Fraction | int, dtype: torch.dtype) -> Tensor:
        buffer = allocate(arena, category, elements, used, dtype)
        listener.lent(category, buffer, used)
        return buffer

    def borrowed(arena: Arena, category: str, elements: int, dtype: torch.dtype) -> Tensor:
        buffer = borrow(arena, category, elements, dtype)
        listener.lent(category, buffer)
        return buffer

    with ExitStack() as stack:
        stack.enter_context(replaced(torch.UntypedStorage, "resize_", resized))
        stack.enter_context(replaced(Arena, "allocate", allocated))
        stack.enter_context(replaced(Arena, "borrow", borrowed))
        yield


@contextmanager
def around(owner: Any, name: str, context: Callable[[], Any]) -> Iterator[None]:
    """Inside, calls of the method `owner.name` run in a `context()`."""
    method = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    with replaced(owner, name, called):
        yield


class Travelling:
    """Messages under way: what is sent lives as long as somebody can wait for it."""

    def __init__(self, works: Sequence[Any], operations: Sequence[dist.P2POp]) -> None:
        self._works, self._tensors = works, [operation.tensor for operation in operations]

    def wait(self) -> None:
        """All have arrived."""
        for work in self._works:
            work.wait()


@contextmanager
def without_values(packed: bool) -> Iterator[None]:
    """Inside, a model's forward reads no values.

    RankRandom.begin  reads the bytes of a generator's state
    packed sequences transformers reads positions to learn whether a row has several documents, and makes a mask if
                     so; without values it would always make one. Ours have several where documents are packed
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(RankRandom, "begin", lambda *_, **__: None))
        if find_spec("transformers") is not None:
            masks = import_module("transformers.masking_utils")
            stack.enter_context(replaced(masks, "find_packed_sequence_indices", partial(_documents, packed)))
        yield


@contextmanager
def standing_in(backend: str, packed: bool) -> Iterator[None]:
    """Inside, an engine can be built and stepped on the fake group, under FakeTensorMode, as it would be on `backend`.

    Axis.backend     the algorithm of collectives, and so its buffers, follow from the backend's name
    the votes        neighbours in a pipeline ask each other whether they know the shapes of what they send, and
                     read the answer; ours always know (torch 2.13; 2.11 does not ask)
    _batch_p2p       messages of the fake group let go of their tensors at once, others when nobody waits any more
    _CHUNK           casts on a CPU go chunk by chunk for its cache, on an accelerator all at once
    and what `without_values` says
    """
    yes = SimpleNamespace(item=lambda: 1)

    def agreed(*_: Any, **__: Any) -> Any:
        return yes

    send = schedules._batch_p2p

    def sent(operations: list[dist.P2POp], *about: Any, **more: Any) -> list[Travelling]:
        return [Travelling(send(operations, *about, **more), operations)]

    named = property(lambda axis: "none" if axis.gathers is None else backend)
    with ExitStack() as stack:
        stack.enter_context(replaced(Axis, "backend", named))
        for vote in ("_warmup_forward_vote", "_warmup_backward_result"):
            if hasattr(PipelineStage, vote):
                stack.enter_context(replaced(PipelineStage, vote, agreed))
        stack.enter_context(replaced(schedules, "_batch_p2p", sent))
        stack.enter_context(without_values(packed))
        if backend != "gloo":
            stack.enter_context(replaced(precision, "_CHUNK", WHOLE))
        yield
