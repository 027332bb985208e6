"""The records of an engine's units: the contents of each, and its place by blueprint/places.py.

unit's layout -> buckets of what this rank updates -> fields of a bucket's record -> place -> bytes
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.account.optimizers import state_width
from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.places import FROZEN, GRADIENTS, OPTIMIZER, PARAMETERS, PlacedRecord, UnitStates, placed_records
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.state_spans import Has, Segments, Updated
from zero3d.blueprint.unit import UnitPlan
from zero3d.errors import ConfigError
from zero3d.memory.scratch import update_bucket
from zero3d.models.blocks import UnitSpec
from zero3d.offload.records import Record
from zero3d.precision import dtype_name, dtype_of, torch_dtype
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import ADAMS, MOMENTS, OF_ADAMS, host_can_update
from zero3d.spec.tiers import TIERS
from zero3d.zero.buckets import MASTER, WEIGHTS
from zero3d.zero.masters import REMAINDER
from zero3d.zero.param_groups import OptimizerChoice
from zero3d.zero.updates import frozen_options, name_in_torch, temporaries_of

WORDS = {OPTIMIZER: "optimizer states", PARAMETERS: "parameters", FROZEN: "frozen parameters", GRADIENTS: "gradients"}
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
        """Return what the record is of: optimizer, parameters, frozen or gradients (blueprint/places.py)."""
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
    """The states that an optimizer keeps for each element, found by a trial on a few elements.

    states       dtype of every state that is as long as its parameter, by name; of some groups or all
    groups       names of the states of each group
    temporaries  the most temporary values that its step makes of an element; 0 where unknown
    """

    kind: type[Optimizer]
    fused: bool
    states: Mapping[str, torch.dtype]
    groups: Sequence[frozenset[str]]
    temporaries: int = 0

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
        temporaries = max(temporaries_of(optimizer, group, [1], device) for group in optimizer.param_groups)
        return cls(type(optimizer), fused, states, list(map(frozenset, of_groups)), temporaries)

    def by_slot(self, layout: UnitLayout) -> dict[str, Has]:
        """Return each state by name, with the slots of a unit that have it."""

        def has(name: str) -> Has:
            return lambda slot: name in self.groups[layout.slots[slot].group]

        return {name: has(name) for name in self.states}

    def widths(self, moments: str) -> dict[str, int]:
        """Return the bytes of an element of each state. moments: the dtype in which records have them."""
        return {name: state_width(dtype.itemsize, moments) for name, dtype in self.states.items()}

    @property
    def described(self) -> str:
        """The optimizer and its states in words."""
        states = (f"{name} ({str(dtype).removeprefix('torch.')})" for name, dtype in self.states.items())
        return f"{self.kind.__name__}(fused={self.fused}), whose states are {', '.join(states) or 'none'}"

    @property
    def on_host(self) -> bool:
        """Whether the host updates with the bits of this optimizer."""
        return host_can_update(name_in_torch(self.kind), self.fused, map(dtype_of, self.states.values()))


@dataclass(frozen=True)
class Placement:
    """Says where a rank's records are.

    plans    the plan of each unit, by its name
    updated  this rank's updated part of each unit, by its layout
    device   type of the device: its size of buckets cuts records
    """

    offload: Offload
    kinds: StateKinds
    plans: Mapping[str, UnitPlan]
    updated: Callable[[UnitSpec, UnitLayout], Updated]
    device: str

    def records(self, specs: Sequence[UnitSpec], layouts: Mapping[str, UnitLayout]) -> Iterator[StateRecord]:
        """Yield all records of units: of optimizer states in forward order, then of weights, then of gradients."""
        plans, segments, units = list[UnitPlan](), list[Segments](), list[UnitStates]()
        widths = self.kinds.widths(self.offload.moments)
        for spec in specs:
            layout, plan = layouts[spec.name], self.plans[spec.name]
            updated = self.updated(spec, layout)
            cuts = updated.segments(self.kinds.by_slot(layout)) if spec.trainable else []
            units.append(UnitStates.of(plan, updated.elements, cuts, widths))
            plans.append(plan)
            segments.append(cuts)
        for placed in placed_records(units, self.offload, update_bucket(self.device)):
            spec, policy = specs[placed.unit], plans[placed.unit].policy
            layout = layouts[spec.name]
            if placed.kind == OPTIMIZER:
                names = next(names for start, stop, names in segments[placed.unit] if start <= placed.start < stop)
                fields = self._fields(spec, policy, placed.place, names)
                name = f"{spec.name}[{placed.start}:{placed.start + placed.elements}]"
            elif placed.kind == GRADIENTS:
                fields, name = {"gradients": torch_dtype(policy.held)}, f"{spec.name} gradients"
            else:
                fields, name = {WEIGHTS: spec.dtype}, f"{spec.name} weights"
            record = Record(name, tuple((dtype, placed.elements) for dtype in fields.values()))
            assert record.nbytes == placed.nbytes, f"{name}: {record.nbytes} bytes, and {placed.nbytes} were planned"
            used = Fraction(layout.numel, layout.total)
            yield StateRecord(spec.name, record, placed, used, tuple(fields))

    def _fields(self, spec: UnitSpec, policy: Policy, place: str, states: Sequence[str]) -> dict[str, torch.dtype]:
        """Return the dtypes of a bucket's fields by name: 16-bit ones first, so that all are aligned."""
        fields: dict[str, torch.dtype] = {}
        if spec.dtype != torch_dtype(policy.master):
            split = policy.splits
            if split and place in TIERS and TIERS[place].whole and not policy.params:
                fields[WEIGHTS] = spec.dtype
            fields[MASTER] = REMAINDER if split else torch_dtype(policy.master)
        return fields | {name: self._dtype(name) for name in self.kinds.states if name in states}

    def _dtype(self, state: str) -> torch.dtype:
        return torch.bfloat16 if self.offload.moments == "bf16" else self.kinds.states[state]


def restarts_from(specs: Sequence[UnitSpec], records: Sequence[StateRecord], kinds: StateKinds) -> bool:
    """Return whether a tier commits all of a model: its weights, too, or the masters that weights are cast from.

    Only optimizers of Adam's kind qualify: beside these states they know the number of their steps alone.
    """
    weights = {each.unit for each in records if each.kind == PARAMETERS and each.commits}
    return (
        name_in_torch(kinds.kind) in ADAMS
        and set(kinds.states) == {*MOMENTS}
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
    if moments == "bf16" and (name_in_torch(type(optimizer)) not in ADAMS or amsgrad):
        asked = f"{type(optimizer).__name__}{'(amsgrad=True)' if amsgrad else ''}"
        raise ConfigError(
            f"offload.moments=bf16 rounds the two moments of {OF_ADAMS}, and the optimizer is {asked}: use one of "
            "them without amsgrad, or type offload.moments=fp32."
        )
