"""The records of an engine's units: what is in each, and where placement.py puts it.

unit's layout -> buckets of what this rank updates -> fields of a bucket's record -> place -> bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zero3d.account.optimizers import cut_by_states, master_width
from zero3d.blueprint.layout import Piece, UnitLayout
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.state_spans import Span, span_of
from zero3d.errors import ConfigError
from zero3d.memory.scratch import update_bucket
from zero3d.models.blocks import UnitSpec
from zero3d.offload.placement import FROZEN, GRADIENTS, OPTIMIZER, PARAMETERS, PlacedRecord, UnitStates, placed_records
from zero3d.offload.records import Record
from zero3d.precision import dtype_name, torch_dtype
from zero3d.spec.offload import Offload
from zero3d.spec.tiers import TIERS
from zero3d.zero.buckets import MASTER, WEIGHTS
from zero3d.zero.masters import REMAINDER
from zero3d.zero.param_groups import OptimizerChoice
from zero3d.zero.updates import frozen_options

WORDS = {OPTIMIZER: "optimizer states", PARAMETERS: "parameters", FROZEN: "frozen parameters", GRADIENTS: "gradients"}
Segments = list[tuple[int, int, list[str]]]  # ranges of what a rank updates of a unit, and names of their states
CATEGORY = {OPTIMIZER: "optimizer", PARAMETERS: "parameters", FROZEN: "parameters", GRADIENTS: "gradients"}


@dataclass(frozen=True)
class StateRecord:
    """A record of a unit, and its place.

    used   the share of its elements that are parameters
    names  of its fields
    """

    unit: str
    record: Record
    placed: PlacedRecord
    used: Fraction
    names: tuple[str, ...]

    @property
    def kind(self) -> str:
        """Return what the record is of: optimizer, parameters, frozen or gradients (placement.py)."""
        return self.placed.kind

    @property
    def place(self) -> str:
        """Return where the record is: the device, or a tier."""
        return self.placed.place

    @property
    def commits(self) -> bool:
        """Return whether its tier commits steps of it, in slots that take turns."""
        return self.place in TIERS and TIERS[self.place].slots > 1

    @property
    def described(self) -> str:
        """Its name, and what its fields are."""
        dtypes = (dtype_name(dtype) for dtype, _ in self.record.fields)
        fields = (f"{dtype} {name}" for dtype, name in zip(dtypes, self.names, strict=True))
        return f"{self.record.name} ({', '.join(fields)})"

    @property
    def has_master(self) -> bool:
        """Return whether the record has whole masters, from which weights can be cast."""
        return MASTER in self.names and self.record.fields[self.names.index(MASTER)][0] != REMAINDER


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
    def of(cls, groups: OptimizerChoice, master: torch.dtype, moments: str, device: torch.device) -> StateKinds:
        """Try an optimizer on small pieces; what it keeps of them is forgotten. Raises ConfigError.

        moments  dtype that is asked for of Adam's moments in records: fp32 or bf16
        """
        pieces = [[torch.zeros(16, dtype=master, device=device)] for _ in range(groups.groups)]
        optimizer = groups.build(pieces)
        options = frozen_options(optimizer)
        check_moments(moments, optimizer)
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

    def segments(self, layout: UnitLayout, pieces: Sequence[Piece], elements: int) -> Segments:
        """Cut what a rank updates of a unit, pieces among so many elements, where their states differ."""
        if not pieces:  # padding has room for all of them
            return [(0, elements, list(self.states))]

        spans = {name: self.span(name, layout, pieces, elements, 0) for name in self.states}
        return cut_by_states({name: span for name, span in spans.items() if span is not None}, elements)

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


@dataclass(frozen=True)
class Placement:
    """What says where a rank's records are.

    rank_of  this rank's number among those that a unit is cut over
    device   type of the device, whose buckets records are cut by
    """

    offload: Offload
    policy: Policy
    kinds: StateKinds
    rank_of: Callable[[UnitSpec], int]
    device: str

    def records(self, specs: Sequence[UnitSpec], layouts: Mapping[str, UnitLayout]) -> Iterator[StateRecord]:
        """Yield all records of units: of optimizer states in forward order, then of weights, then of gradients."""
        segments = [self._segments(spec, layouts[spec.name]) if spec.trainable else [] for spec in specs]
        units = [self._states(spec, layouts[spec.name], own) for spec, own in zip(specs, segments, strict=True)]
        for placed in placed_records(units, self.offload, update_bucket(self.device)):
            spec, layout = specs[placed.unit], layouts[specs[placed.unit].name]
            if placed.kind == OPTIMIZER:
                names = next(names for start, stop, names in segments[placed.unit] if start <= placed.start < stop)
                fields = self._fields(spec, placed.place, names)
                name = f"{spec.name}[{placed.start}:{placed.start + placed.elements}]"
            elif placed.kind == GRADIENTS:
                fields, name = {"gradients": self._gradient}, f"{spec.name} gradients"
            else:
                fields, name = {WEIGHTS: spec.dtype}, f"{spec.name} weights"
            record = Record(name, tuple((dtype, placed.elements) for dtype in fields.values()))
            assert record.nbytes == placed.nbytes, f"{name}: {record.nbytes} bytes, and {placed.nbytes} were planned"
            used = Fraction(layout.numel, layout.total)
            yield StateRecord(spec.name, record, placed, used, tuple(fields))

    @property
    def _gradient(self) -> torch.dtype:
        """The dtype in which reduced gradients wait."""
        return torch_dtype(self.policy.held)

    def _segments(self, spec: UnitSpec, layout: UnitLayout) -> Segments:
        sharded = self.policy.row.shards_optimizer
        pieces = layout.pieces(self.rank_of(spec)) if sharded else layout.whole_pieces()
        return self.kinds.segments(layout, pieces, layout.shard if sharded else layout.total)

    def _states(self, spec: UnitSpec, layout: UnitLayout, segments: Segments) -> UnitStates:
        """Return what this rank updates of a unit, in bytes."""
        wide = self.policy.master
        master = master_width(spec.dtype.itemsize, wide.itemsize, self.policy.splits)
        states = [(end - begin, sum(self._dtype(name).itemsize for name in names)) for begin, end, names in segments]
        return UnitStates(layout.shard, spec.dtype.itemsize, master, states, self._gradient.itemsize, spec.trainable)

    def _fields(self, spec: UnitSpec, place: str, states: Sequence[str]) -> dict[str, torch.dtype]:
        """Return the dtypes of a bucket's fields by name: 16-bit ones first, so that all are aligned."""
        fields: dict[str, torch.dtype] = {}
        if spec.dtype != torch_dtype(self.policy.master):
            split = self.policy.splits
            if split and place in TIERS and TIERS[place].whole and self.offload.params == "none":
                fields[WEIGHTS] = spec.dtype
            fields[MASTER] = REMAINDER if split else torch_dtype(self.policy.master)
        return fields | {name: self._dtype(name) for name in self.kinds.states if name in states}

    def _dtype(self, state: str) -> torch.dtype:
        return torch.bfloat16 if self.offload.moments == "bf16" else self.kinds.states[state]


def restarts_from(specs: Sequence[UnitSpec], records: Sequence[StateRecord], kinds: StateKinds) -> bool:
    """Return whether what a tier commits is all of a model: its weights, too, or masters that these are cast of.

    What an optimizer knows beside them is then how many steps it has made: those of Adam's kind.
    """
    weights = {each.unit for each in records if each.kind == PARAMETERS and each.commits}
    return (
        kinds.kind in (Adam, AdamW)
        and set(kinds.states) == {"exp_avg", "exp_avg_sq"}
        and all(
            each.commits and (each.unit in weights or WEIGHTS in each.names or each.has_master)
            for each in records
            if each.kind == OPTIMIZER
        )
        and all(spec.trainable for spec in specs)
    )


def planned_bytes(records: Sequence[StateRecord]) -> dict[tuple[str, str], Fraction]:
    """Return bytes by (category, place): of parameters, and as padding those of other elements and of whole blocks."""
    planned: dict[tuple[str, str], Fraction] = {}
    for each in records:
        used = each.record.nbytes * each.placed.slots * each.used
        for category, nbytes in ((CATEGORY[each.kind], used), ("padding", each.placed.held - used)):
            planned[category, each.place] = planned.get((category, each.place), Fraction(0)) + nbytes
    return planned


def check_moments(moments: str, optimizer: Optimizer) -> None:
    """Refuse bf16 moments of an optimizer whose states are not Adam's two."""
    amsgrad = any(group.get("amsgrad") for group in optimizer.param_groups)
    if moments == "bf16" and (type(optimizer) not in (Adam, AdamW) or amsgrad):
        asked = f"{type(optimizer).__name__}{'(amsgrad=True)' if amsgrad else ''}"
        raise ConfigError(
            f"offload.moments=bf16 rounds the two moments of Adam and AdamW, and the optimizer is {asked}: use one of "
            "them without amsgrad, or type offload.moments=fp32."
        )
