"""Functions of torch and transformers that are replaced for the time of a block, and why.

What is ours is not patched: a dry run is given a mesh, an arena, stores and peers of its own (`group`, `memory`,
`tiers`, `peers`).
Code of ours that would read values looks whether a tensor has any (`FakeTensor`). Left are functions of others that
nothing can be passed to, and one constant of ours:

    torch.UntypedStorage.resize_          no operator, so that no dispatch mode sees it       `hear_resizes`
    PipelineStage's votes, _batch_p2p     they read values; they let go of tensors            `standing_in`
    transformers' packed sequences        reads values of positions                           `without_values`
    its checks of images and their tokens read values of ids                                  `without_values`
    functional.dropout                    on a card one kernel, which keeps a byte an    `dropout_of_cards`
                                          element; on a CPU four, which keep the noise
    scratch.IN_CACHE                      what is done at once is said of a tensor's own      `standing_in`
                                          device, which here is a CPU for an accelerator: a mesh that says otherwise
                                          would have to go along with every tensor that is cast
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.memory import scratch


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let `owner.name` be `value` inside the block."""
    original = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


@contextmanager
def hear_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with every storage that changes its size in place inside the block."""
    resize = torch.UntypedStorage.resize_

    def heard(storage: torch.UntypedStorage, size: int) -> Any:
        result = resize(storage, size)
        resized(storage)
        return result

    with replaced(torch.UntypedStorage, "resize_", heard):
        yield


@contextmanager
def dropout_of_cards() -> Iterator[None]:
    """Run dropout inside the block as a card does."""

    def dropped(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.native_dropout(input, p, True)[0] if training and p > 0 else input

    with replaced(torch.nn.functional, "dropout", dropped):
        yield


@contextmanager
def around(owner: Any, name: str, context: Callable[[], Any]) -> Iterator[None]:
    """Run every call of the method `owner.name` inside a `context()` of its own."""
    method = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:
        with context():
            return method(*args, **kwargs)

    with replaced(owner, name, called):
        yield


@contextmanager
def without_values(packed: bool) -> Iterator[None]:
    """Let a model's forward run inside the block without reading values.

    transformers reads positions to learn whether a row has several documents, and makes a mask if so; without values
    it would always make one. `packed` is the answer: ours have several where documents are packed.
    Whether a sequence has as many image tokens as its images need it reads, too.
    """
    with ExitStack() as stack:
        stack.enter_context(replaced(torch, "_check_tensor_all_with", lambda *_: None))
        if find_spec("transformers") is not None:
            masks = import_module("transformers.masking_utils")
            stack.enter_context(replaced(masks, "find_packed_sequence_indices", partial(_document_numbers, packed)))
        yield


def _document_numbers(packed: bool, position_ids: Tensor) -> Tensor | None:
    """Number documents as transformers does, operation by operation, and decide by `packed` instead of values."""
    before = position_ids[:, :1] - 1
    changes = torch.diff(position_ids, prepend=before, dim=-1)
    numbers = (changes != 1).cumsum(-1)
    (numbers[:, -1] == 0).all()
    return numbers if packed else None


class MessagesUnderWay:
    """Handles of messages, and their tensors, which live as long as somebody can wait for them."""

    def __init__(self, works: Sequence[Any], operations: Sequence[dist.P2POp]) -> None:
        self._works, self._tensors = works, [operation.tensor for operation in operations]

    def wait(self) -> None:
        """Wait until all have arrived."""
        for work in self._works:
            work.wait()


@contextmanager
def standing_in(backend: str, packed: bool) -> Iterator[None]:
    """Let an engine be built and stepped inside the block on the fake group, under FakeTensorMode, as on `backend`.

    _batch_p2p   messages of the fake group let go of their tensors at once, others when nobody waits any more
    and what the module and `without_values` say
    """
    from torch.distributed.pipelining import schedules  # a second, for dry runs alone

    send = schedules._batch_p2p

    def send_held(operations: list[dist.P2POp], *about: Any, **more: Any) -> list[MessagesUnderWay]:
        return [MessagesUnderWay(send(operations, *about, **more), operations)]

    with ExitStack() as stack:
        stack.enter_context(replaced(schedules, "_batch_p2p", send_held))
        stack.enter_context(without_values(packed))
        if backend != "gloo":
            stack.enter_context(replaced(scratch, "IN_CACHE", ()))
        yield
