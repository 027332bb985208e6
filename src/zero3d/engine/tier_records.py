"""Which records an engine's units have, where each is placed, and the bytes by place that follow.

unit's layout -> buckets of what this rank updates -> fields of a bucket's record -> place -> bytes
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zero3d.engine.checks import check_moments
from zero3d.engine.foundation import Foundation
from zero3d.memory.blocks import padded
from zero3d.memory.scratch import update_bucket
from zero3d.models.blocks import UnitSpec
from zero3d.offload.placement import bucket_ranges, leave_device
from zero3d.offload.records import Record
from zero3d.spec.offload import DEVICE, DISK, HOST
from zero3d.zero.buckets import MASTER, WEIGHTS
from zero3d.zero.layout import Piece, UnitLayout
from zero3d.zero.masters import REMAINDER
from zero3d.zero.state_spans import Span, span_of
from zero3d.zero.updates import frozen_options

OPTIMIZER, PARAMETERS, FROZEN, GRADIENTS = "optimizer states", "parameters", "frozen parameters", "gradients"
BUFFERS, STAGING = "ring buffers", "staging"
CATEGORY = {OPTIMIZER: "optimizer", PARAMETERS: "parameters", FROZEN: "parameters", GRADIENTS: "gradients"}


@dataclass(frozen=True)
class Placed:
    """A record, what it is part of, and its place.

    used   the share of its elements that are parameters
    names  of its fields
    start  of its bucket, in what this rank updates of the unit, and the bucket's elements
    """

    part: str
    unit: str
    record: Record
    place: str
    used: Fraction
    names: tuple[str, ...]
    elements: int
    start: int = 0

    @property
    def described(self) -> str:
        """Its name, and what its fields are."""
        dtypes = (str(dtype).removeprefix("torch.") for dtype, _ in self.record.fields)
        fields = (f"{dtype} {name}" for dtype, name in zip(dtypes, self.names, strict=True))
        return f"{self.record.name} ({', '.join(fields)})"


@dataclass(frozen=True)
class StateKinds:
    """What an optimizer keeps for each element, found by trying it on a few.

    states  dtype of every state that is as long as its parameter, by name; of some groups or all
    groups  names of those that each group has
    """

    kind: type[Optimizer]
    fused: bool
    states: Mapping[str, torch.dtype]
    groups: Sequence[frozenset[str]]

    @classmethod
    def of(cls, base: Foundation) -> StateKinds:
        """Try the engine's optimizer on small pieces; what it keeps of them is forgotten. Raises ConfigError."""
        groups, wide = base.resolved.groups, base.resolved.policy.master
        pieces = [[torch.zeros(16, dtype=wide, device=base.axes.arena.device)] for _ in range(groups.groups)]
        optimizer = groups.build(pieces)
        options = frozen_options(optimizer)
        check_moments(base.options.offload, optimizer)
        for (piece,) in pieces:
            piece.grad = torch.zeros_like(piece)
        optimizer.step()
        of_groups = [
            {name: v.dtype for name, v in optimizer.state[piece].items() if isinstance(v, Tensor) and v.dim() == 1}
            for (piece,) in pieces
        ]
        states = {name: dtype for states in of_groups for name, dtype in states.items()}
        optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(own, params=[])
        fused = all(bool(group.get("fused")) for group in optimizer.param_groups)
        return cls(type(optimizer), fused, states, list(map(frozenset, of_groups)))

    def span(
        self, name: str, layout: UnitLayout, pieces: Sequence[Piece], elements: int, used: Fraction | int
    ) -> Span | None:
        """Return where a state is in what a rank updates of a unit, pieces among so many elements; None for nowhere.

        used  parameters that all elements stand for
        """
        return span_of(pieces, lambda slot: name in self.groups[layout.slots[slot].group], elements, used)

    def segments(self, layout: UnitLayout, pieces: Sequence[Piece], elements: int) -> list[tuple[int, int, list[str]]]:
        """Cut what a rank updates of a unit, pieces among so many elements, where their states differ."""
        if not pieces:  # padding has room for all of them
            return [(0, elements, list(self.states))]

        spans = {name: self.span(name, layout, pieces, elements, 0) for name in self.states}
        cuts = sorted({0, elements, *(cut for span in spans.values() if span for cut in (span.start, span.stop))})
        return [
            (start, stop, [name for name, span in spans.items() if span and span.start <= start < span.stop])
            for start, stop in pairwise(cuts)
        ]

    @property
    def described(self) -> str:
        """The states in words."""
        return (
            ", ".join(f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in self.states.items()) or "none"
        )

    @property
    def on_host(self) -> bool:
        """Whether the host updates with the bits of this optimizer."""
        return self.fused and self.kind in (Adam, AdamW) and list(self.states.values()) == [torch.float32] * 2


def placed_records(
    base: Foundation, specs: Sequence[UnitSpec], layouts: Mapping[str, UnitLayout], kinds: StateKinds
) -> Iterator[Placed]:
    """Yield all records in forward order: of optimizer states, then of weights."""
    offload, sharded = base.options.offload, base.resolved.policy.stage.shards_optimizer
    fields = partial(_fields, base, kinds)
    device = base.axes.arena.device.type
    buckets = [
        (spec, (begin + start, begin + stop), states)
        for spec in specs
        if trains(spec)
        for layout in [layouts[spec.name]]
        for rank in [base.axes.edp.rank if spec.experts else base.axes.dp.rank]
        for pieces in [layout.pieces(rank) if sharded else layout.whole_pieces()]
        for begin, end, states in kinds.segments(layout, pieces, layout.shard if sharded else layout.total)
        for start, stop in bucket_ranges(end - begin, update_bucket(device))
    ]
    sizes = [
        (stop - start) * sum(d.itemsize for d in fields(spec, HOST, states).values())
        for spec, (start, stop), states in buckets
    ]
    away = offload.optimizer
    places = [DEVICE] * len(sizes) if away == "none" else leave_device(sizes, offload.fraction, away)
    for (spec, (start, stop), states), place in zip(buckets, places, strict=True):
        names = fields(spec, place, states)
        record = Record(f"{spec.name}[{start}:{stop}]", tuple((dtype, stop - start) for dtype in names.values()))
        place = place if names else DEVICE  # an optimizer without states, of weights that are the masters
        used = _used(layouts[spec.name])
        yield Placed(OPTIMIZER, spec.name, record, place, used, tuple(names), stop - start, start)
    for spec in specs if offload.params != "none" else ():
        shard, used = layouts[spec.name].shard, _used(layouts[spec.name])
        record = Record(f"{spec.name} weights", ((spec.dtype, shard),))
        part = PARAMETERS if trains(spec) else FROZEN
        yield Placed(part, spec.name, record, offload.params, used, (WEIGHTS,), shard)
    for spec in specs if offload.gradients == HOST else ():
        if trains(spec):
            shard, used = layouts[spec.name].shard, _used(layouts[spec.name])
            record = Record(f"{spec.name} gradients", ((base.resolved.policy.master, shard),))
            yield Placed(GRADIENTS, spec.name, record, HOST, used, ("gradients",), shard)


def restarts_from(specs: Sequence[UnitSpec], placed: Sequence[Placed], kinds: StateKinds) -> bool:
    """Return whether records on a disk are all of a model: its weights, too, or masters that these are cast of.

    What an optimizer knows beside them is then how many steps it has made: those of Adam's kind.
    """
    weights = {each.unit for each in placed if each.part == PARAMETERS and each.place == DISK}
    return (
        kinds.kind in (Adam, AdamW)
        and set(kinds.states) == {"exp_avg", "exp_avg_sq"}
        and all(
            each.place == DISK and (each.unit in weights or WEIGHTS in each.names or _has_master(each))
            for each in placed
            if each.part == OPTIMIZER
        )
        and all(map(trains, specs))
    )


def _has_master(each: Placed) -> bool:
    return MASTER in each.names and each.record.fields[each.names.index(MASTER)][0] != REMAINDER


def trains(spec: UnitSpec) -> bool:
    """Return whether a unit is trainable."""
    return next(iter(spec.params.values())).requires_grad


def _used(layout: UnitLayout) -> Fraction:
    return Fraction(layout.numel, layout.total)


def _fields(
    base: Foundation, kinds: StateKinds, spec: UnitSpec, place: str, states: Sequence[str]
) -> dict[str, torch.dtype]:
    """Return the dtypes of a record's fields by name: 16-bit ones first, so that all are aligned."""
    policy, offload = base.resolved.policy, base.options.offload
    fields: dict[str, torch.dtype] = {}
    if spec.dtype != policy.master:
        split = policy.split_master
        if split and place == DISK and offload.params == "none":
            fields[WEIGHTS] = spec.dtype
        fields[MASTER] = REMAINDER if split else policy.master
    return fields | {
        name: torch.bfloat16 if offload.moments == "bf16" else dtype
        for name, dtype in kinds.states.items()
        if name in states
    }


def copies(each: Placed) -> int:
    """Return how often a record is at its place: twice on a disk, in slots that take turns, but for frozen weights."""
    return 2 if each.place == DISK and each.part != FROZEN else 1


def place_bytes(each: Placed) -> int:
    """Return what a record takes at its place."""
    return each.record.nbytes if each.place == DEVICE else copies(each) * padded(each.record.nbytes)


def planned_bytes(placed: Sequence[Placed]) -> dict[tuple[str, str], Fraction]:
    """Return bytes by (category, place): of parameters, and as padding those of other elements and of whole blocks."""
    planned: dict[tuple[str, str], Fraction] = {}
    for each in placed:
        used = each.record.nbytes * copies(each) * each.used
        for category, nbytes in ((CATEGORY[each.part], used), ("padding", place_bytes(each) - used)):
            planned[category, each.place] = planned.get((category, each.place), Fraction(0)) + nbytes
    return planned
