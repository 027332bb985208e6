"""Micro-batches through the pipeline stages of one replica, by the schedules of torch.distributed.pipelining.

    part 0 (embedding, blocks)  -> hidden states ->  part 1 (blocks)  ->  part 2 (blocks, norm, head, loss)
    rank pp=0                                        rank pp=1            rank pp=2        one part per rank
    rank 0: parts 0, P    rank 1: parts 1, P+1                            looped: interleaved, zero-bubble
    rank 0: parts 0, 2P-1    rank 1: parts 1, 2P-2                        a V: zbv

The schedules cut tensors along the batch. Ours are given the numbers of the micro-batches instead, and
each part looks its micro-batch up: whatever a batch holds reaches every part, and nothing is copied.

Note 1, split backward. A zero-bubble schedule takes gradients of inputs and of weights apart, by
`autograd.grad`; the latter writes `.grad` without any hook. `_Stage` hands what it finds there on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    get_schedule_class,
)

from zero3d.errors import ConfigError
from zero3d.transport import Axis

SCHEDULES = {
    "gpipe": ("GPipe", 1, False),
    "1f1b": ("1F1B", 1, False),
    "interleaved": ("Interleaved1F1B", 2, False),
    "zero-bubble": ("InterleavedZeroBubble", 2, False),
    "zbv": ("ZBVZeroBubble", 2, True),
}


class Schedule(NamedTuple):
    """A schedule of torch: how many parts a rank has, and whether they are laid out in a V."""

    name: str
    torch: str
    parts_per_rank: int
    in_a_v: bool

    @classmethod
    def of(cls, name: str) -> Schedule:
        """By our name. Raises ConfigError."""
        if name not in SCHEDULES:
            raise ConfigError(f"schedule {name!r} is unknown: pass one of {', '.join(SCHEDULES)}.")
        return cls(name, *SCHEDULES[name])

    def parts_of(self, rank: int, ranks: int) -> list[int]:
        """The parts of one rank."""
        if self.in_a_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.parts_per_rank)]


class Driver(Protocol):
    """What the schedule's events mean to the engine."""

    def sum_of_losses(self, output: Any, batch: Any) -> tuple[Tensor, float | Tensor]:
        """(sum, weight) of one micro-batch's last output."""

    def backward(self) -> AbstractContextManager[None]:
        """Around every backward."""

    def sweep(self) -> None:
        """Take gradients that no hook announced."""


class Pipeline:
    """This rank's parts, and a schedule per number of micro-batches.

    parts   part number -> module, forward(hidden states or nothing, **micro-batch)
    hidden  (rows, length) of a micro-batch -> shape of what goes from part to part, and its dtype
    """

    def __init__(
        self, parts: Mapping[int, nn.Module], schedule: Schedule, axis: Axis, device: torch.device, driver: Driver,
        hidden: Callable[[Any], tuple[tuple[int, ...], torch.dtype]],
    ) -> None:  # fmt: skip
        self._parts, self._schedule, self._axis, self._device = parts, schedule, axis, device
        self._driver, self._hidden = driver, hidden
        self._total = schedule.parts_per_rank * axis.size
        self._made: dict[Any, Any] = {}
        self.batches: Sequence[Any] = ()
        self.seen: list[tuple[Tensor, float | Tensor]] = []

    def run(self, batches: Sequence[Any], scale: float) -> list[tuple[Tensor, float | Tensor]]:
        """Forward and backward of all micro-batches; (sum, weight) of each, on the rank of the last part only."""
        shape, dtype = self._hidden(batches[0])
        schedule = self._schedule_for(len(batches), shape, dtype)
        self.batches, self.seen, self.scale = batches, [], scale
        numbers = torch.arange(len(batches))
        try:
            if 0 in self._parts:
                schedule.step(numbers, index=numbers, target=numbers, losses=[], return_outputs=False)
            else:
                schedule.step(index=numbers, target=numbers, losses=[], return_outputs=False)
            return self.seen
        finally:
            self.batches, self.seen = (), []

    def _schedule_for(self, count: int, shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        key = (count, shape, dtype)
        if key not in self._made:
            stages = [self._stage(number, part, shape, dtype) for number, part in self._parts.items()]
            kind = get_schedule_class(self._schedule.torch)
            what = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            self._made[key] = kind(what, n_microbatches=count, loss_fn=lambda loss, _: loss, scale_grads=False)
        return self._made[key]

    def _stage(self, number: int, part: nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> _Stage:
        last = number == self._total - 1
        between = torch.empty(shape, dtype=dtype, device="meta", requires_grad=True)
        takes = torch.empty(1, dtype=torch.int64, device="meta") if number == 0 else between
        gives = torch.empty((), device="meta", requires_grad=True) if last else between
        return _Stage(_Part(part, self, number == 0, last), number, self._total, self._device, takes, gives,
                      group=self._axis.gathers, driver=self._driver)  # fmt: skip

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The scaled sum of a micro-batch's losses, kept for the caller."""
        total, weight = self._driver.sum_of_losses(output, batch)
        self.seen.append((total.detach(), weight))
        return total * self.scale if self.scale != 1.0 else total


class _Part(nn.Module):
    """A part as schedules call it: with the number of a micro-batch."""

    def __init__(self, part: nn.Module, pipeline: Pipeline, first: bool, last: bool) -> None:
        super().__init__()
        self.part = part
        self._of, self._first, self._last = pipeline, first, last

    def forward(self, hidden: Tensor, *, index: Tensor) -> Tensor:
        batch = self._of.batches[int(index)]
        inputs = () if self._first else (hidden,)
        output = self.part(*inputs, **batch)
        return self._of.loss_of(output, batch) if self._last else output


class _Stage(PipelineStage):
    """Tells the engine about backwards (Note 1)."""

    def __init__(self, *args: Any, driver: Driver, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._driver = driver

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._driver.backward():
            super().backward_one_chunk(*args, **kwargs)
        self._driver.sweep()

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> None:
        with self._driver.backward():
            super().backward_weight_one_chunk(*args, **kwargs)
        self._driver.sweep()
