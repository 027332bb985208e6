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

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from zero3d.boundary import Boundary, Driven
from zero3d.errors import ConfigError
from zero3d.hf.split import balance, split
from zero3d.ledger import Ledger
from zero3d.plan.bubble import Action
from zero3d.plan.traffic import Moved, pipeline_traffic
from zero3d.replica import Tied
from zero3d.transport import Axis
from zero3d.zero.unit import Unit

TOKENS = 2048  # of a micro-batch, where the split must not depend on the one that comes first

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

    def rank_of(self, part: int, ranks: int) -> int:
        """Who has a part."""
        return next(rank for rank in range(ranks) if part in self.parts_of(rank, ranks))

    def parts_of(self, rank: int, ranks: int) -> list[int]:
        """The parts of one rank."""
        if self.in_a_v:
            return [rank, 2 * ranks - 1 - rank]
        return [rank + turn * ranks for turn in range(self.parts_per_rank)]


def pipeline_policies(pp: int, release: str, reduce: str) -> tuple[str, str]:
    """In a pipeline parameters are held and gradients summed for the whole schedule, unless asked otherwise."""
    if pp == 1:
        return release, reduce
    return "every_step" if release == "auto" else release, "every_step" if reduce == "auto" else reduce


def take_parts(model: nn.Module, axis: Axis, schedule: Schedule) -> dict[int, nn.Module]:
    """This rank's parts of the model by number; without pipeline the model itself."""
    if axis.size == 1:
        return {0: model}
    counts = balance(model, axis.size * schedule.parts_per_rank, TOKENS)
    return {part: split(model, counts, part) for part in schedule.parts_of(axis.rank, axis.size)}


def names_of_copies(parts: Mapping[int, nn.Module]) -> dict[str, str]:
    """Copies of tied parameters: the name of each on its part -> the name of its owner."""
    return {tie.other_name: tie.name for part in parts.values() for tie in getattr(part, "tied", ())}


def find_ties(parts: Mapping[int, nn.Module], units: Sequence[Unit], schedule: Schedule, ranks: int) -> list[Tied]:
    """The parameters of this rank that another pipeline stage holds, too. Raises ConfigError."""
    ties = {tie for part in parts.values() for tie in getattr(part, "tied", ())}
    found = []
    for tie in sorted(ties):
        ends = [(tie.name, tie.part, tie.other_part), (tie.other_name, tie.other_part, tie.part)]
        here = {name: _unit_of(name, units) for name, part, _ in ends if part in parts}
        for name, part, other in ends:
            if part in parts:
                there = next((unit for key, unit in here.items() if key != name), None)
                found.append(Tied(here[name], schedule.rank_of(other, ranks), there, copy=name == tie.other_name))
    return found


def _unit_of(name: str, units: Sequence[Unit]) -> Unit:
    unit = next(unit for unit in units if any(slot.name == name for slot in unit.layout.slots))
    if len(unit.layout.slots) > 1:
        raise ConfigError(
            f"{name} is tied across pipeline stages and shares unit {unit.name!r} with {len(unit.layout.slots) - 1} "
            "other parameters: give it a module of its own, untie it, or pass pp=1."
        )
    return unit


class Pipeline:
    """This rank's parts, and a schedule per number of micro-batches.

    parts   part number -> module, forward(hidden states or nothing, **micro-batch)
    takes   entries of a micro-batch that the model's forward takes; None: all
    sum_and_weight  (output, micro-batch) -> (sum of losses, weight), of the last part's output
    """

    def __init__(
        self, parts: Mapping[int, nn.Module], schedule: Schedule, axis: Axis, device: torch.device,
        sum_and_weight: Callable[[Any, Any], tuple[Tensor, float | Tensor]], boundary: Boundary,
        sweep: Callable[[], None], takes: frozenset[str] | None, ledger: Ledger,
    ) -> None:  # fmt: skip
        self._parts, self._schedule, self._axis, self._device = parts, schedule, axis, device
        self._sum_and_weight, self._boundary, self._sweep = sum_and_weight, boundary, sweep
        self._total = schedule.parts_per_rank * axis.size
        self.takes, self._ledger = takes, ledger
        self._made: dict[Any, Any] = {}
        self.batches: Sequence[Any] = ()
        self._seen: list[tuple[Tensor, float | Tensor]] = []
        self._scale = 1.0
        self.recorded: list[Action] = []

    def run(self, batches: Sequence[Any], scale: float) -> list[tuple[Tensor, float | Tensor]]:
        """Forward and backward of all micro-batches; (sum, weight) of each, on the rank of the last part only."""
        schedule = self._schedule_for(batches)
        self.batches, self._seen, self._scale, self.recorded = batches, [], scale, []
        numbers = torch.arange(len(batches))
        first = (numbers,) if 0 in self._parts else ()
        try:
            schedule.step(*first, index=numbers, target=numbers, losses=[], return_outputs=False)
            self._boundary.finish(len(batches), sum((weight for _, weight in self._seen), 0.0))
            return self._seen
        finally:
            self.batches = ()

    def traffic(self, micro_batches: int) -> dict[tuple[str, str], Moved]:
        """What this rank sends in a step of so many micro-batches, by formula."""
        part: Any = next(iter(self._parts.values()))
        _, shape = next(reversed(self._made))  # of the last step
        width = next(p.dtype for p in part.parameters() if p.is_floating_point()).itemsize
        return pipeline_traffic(list(self._parts), self._total, micro_batches, prod(shape) * part.width, width)

    def sent(self, op: str, part: str, tensor: Tensor) -> None:
        """A part sends a tensor to another rank."""
        self._ledger.record(op, self._axis.name, part, tensor.numel(), tensor.element_size())

    def order(self) -> dict[int, list[Action]]:
        """What every rank of the axis did in the last step, in order, as it was recorded. All ranks call it."""
        everyone: list[Any] = [None] * self._axis.size
        dist.all_gather_object(everyone, self.recorded, group=self._axis.gathers)
        return dict(enumerate(everyone))

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around every backward of a schedule (Note 1)."""
        with self._boundary.driving(Driven(0.0, last=False)):
            yield
        self._sweep()

    def _schedule_for(self, batches: Sequence[Any]) -> Any:
        shapes = {tuple(batch["input_ids"].shape) for batch in batches}
        if len(shapes) > 1:
            raise ConfigError(
                f"micro-batches of a pipeline step must have one shape, and have {sorted(shapes)}: pad them alike."
            )
        key = (len(batches), *shapes)
        if key not in self._made:
            stages = [self._stage(number, part, *shapes) for number, part in self._parts.items()]
            kind = get_schedule_class(self._schedule.torch)
            what = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
            self._made[key] = kind(what, n_microbatches=len(batches), loss_fn=lambda loss, _: loss, scale_grads=False)
        return self._made[key]

    def _stage(self, number: int, part: Any, shape: tuple[int, ...]) -> _Stage:
        last = number == self._total - 1
        dtype = next(p.dtype for p in part.parameters() if p.is_floating_point())
        between = torch.empty((*shape, part.width), dtype=dtype, device="meta", requires_grad=True)
        takes = torch.empty(1, dtype=torch.int64, device="meta") if number == 0 else between
        gives = torch.empty((), device="meta", requires_grad=True) if last else between
        return _Stage(_Part(part, self, number == 0, last), number, self._total, self._device, takes, gives,
                      group=self._axis.gathers)  # fmt: skip

    def loss_of(self, output: Any, batch: Any) -> Tensor:
        """The scaled sum of a micro-batch's losses, kept for the caller."""
        total, weight = self._sum_and_weight(output, batch)
        self._seen.append((total.detach(), weight))
        return total * self._scale if self._scale != 1.0 else total


class _Part(nn.Module):
    """A part as schedules call it: with the number of a micro-batch."""

    def __init__(self, part: nn.Module, pipeline: Pipeline, first: bool, last: bool) -> None:
        super().__init__()
        self.part, self.pipeline = part, pipeline
        self._first, self._last = first, last

    def forward(self, hidden: Tensor, *, index: Tensor) -> Tensor:
        batch = self.pipeline.batches[int(index)]
        takes = self.pipeline.takes
        others = {k: v for k, v in batch.items() if k != "input_ids" and (takes is None or k in takes)}
        output = self.part(batch["input_ids"] if self._first else hidden, **others)
        return self.pipeline.loss_of(output, batch) if self._last else output


class _Stage(PipelineStage):
    """Tells the engine about backwards (Note 1)."""

    submod: _Part

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._note("F", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        self._note("B" if full_backward else "I", bwd_chunk_id)
        with self.submod.pipeline.backward():
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
        self._note("W", bwd_chunk_id)
        with self.submod.pipeline.backward():
            super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent("send_forward", super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._sent("send_backward", super().get_bwd_send_ops(bwd_chunk_id))

    def _sent(self, op: str, sends: list[dist.P2POp]) -> list[dist.P2POp]:
        for send in sends:
            self.submod.pipeline.sent(op, f"part {self.stage_index}", send.tensor)
        return sends

    def _note(self, kind: str, micro_batch: int) -> None:
        self.submod.pipeline.recorded.append(Action(kind, self.stage_index, micro_batch))
