"""Bytes and traffic of an engine by formula, beside what its arena measures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import wraps
from math import ceil
from typing import Any, NamedTuple, TypeVar, cast

import torch

from zero3d.account.optimizers import OptimizerBytes
from zero3d.account.states import NOTHING, Held, StateBytes, gradient_bytes, unit_bytes
from zero3d.account.traffic import UnitTraffic, traffic_of
from zero3d.activations.host_slots import HostSlots
from zero3d.blueprint.state_spans import Span
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import STATES, TRANSIENT, Arena
from zero3d.offload.tiers import Tiers
from zero3d.spec.sizes import decimal
from zero3d.spec.tiers import HOST
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.unit import Unit


class MemoryEntry(NamedTuple):
    """Counts the bytes of one category at one place on this rank.

    planned   by formula (`account.states.unit_bytes`, padding from the layouts); None for transient ones
    measured  in the arena when all of it is there: gradients and their padding come and go with a step
    peak      most in the arena at any instant; those of several categories are of different ones
    at_peak   in the arena at the instant at which it holds most of all together
    now       in the arena at this one
    """

    category: str
    place: str
    planned: int | None
    measured: int
    peak: int
    at_peak: int
    now: int

    def __str__(self) -> str:
        """Return the entry in words: "parameters on the device: planned 1.25 GB, measured 1.25 GB, ..."."""
        planned = "" if self.planned is None else f"planned {decimal(self.planned)}, "
        return (
            f"{self.category} on the {self.place}: {planned}measured {decimal(self.measured)}, peak "
            f"{decimal(self.peak)}, at the fullest instant {decimal(self.at_peak)}, now {decimal(self.now)}"
        )

    def __repr__(self) -> str:
        """Return the same in brackets, as a prompt and a list show it."""
        return f"MemoryEntry({self})"


Method = TypeVar("Method", bound=Callable[..., Any])


def notes_memory(method: Method) -> Method:
    """Have an engine's method add to torch's OutOfMemoryError what the engine holds, by category and place."""

    @wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(self, *args, **kwargs)
        except torch.OutOfMemoryError as error:
            if not getattr(error, "__notes__", None):  # of a method that this one has called
                error.add_note(describe_memory(self.memory))
            raise

    return cast(Method, noting)


def frozen_entry(nbytes: int) -> list[MemoryEntry]:
    """Return the entry of frozen parameters' values as they came, where any are kept."""
    return [MemoryEntry("frozen originals", HOST, nbytes, nbytes, nbytes, nbytes, nbytes)] if nbytes else []


def describe_memory(entries: Sequence[MemoryEntry]) -> str:
    """Return the engine's memory in one line; all other allocated memory is activations, or not the engine's."""
    held = [f"{entry.category} {decimal(entry.now)} ({entry.place})" for entry in entries if entry.now]
    return f"held by the engine: {', '.join(held) or 'nothing'}; everything else is activations and other tensors"


class Accounts:
    """Computes what an engine's units should cost, and reads what its arena says they do.

    shard  the axis that cuts all units but experts that are shared out
    inputs of recomputed blocks on the host, if they are there
    """

    def __init__(
        self,
        units: Sequence[Unit],
        optimizer: ShardedOptimizer,
        arena: Arena,
        shard: Comm,
        tiers: Tiers | None,
        inputs: HostSlots | None,
    ) -> None:
        self._units = units
        self._optimizer = optimizer
        self._arena = arena
        self._shard = shard
        self._arenas = {arena.place: arena, **({} if tiers is None else tiers.arenas)}
        self._records = {} if tiers is None else tiers.planned
        self._inputs = inputs

    @property
    def planned(self) -> StateBytes:
        """Model states per rank by formula, padding apart."""
        return self._on_device.states

    @property
    def at_rest(self) -> dict[str, Fraction]:
        """Bytes of model states on this rank's device between two steps, by category and formula: without gradients."""
        held = self._on_device
        gradients = [gradient_bytes(unit.plan, unit.layout) for unit in self._units]
        padding = held.padding - sum(Fraction(each.padding) for each in gradients)
        return {**held.by_category, "gradients": Fraction(0), "padding": padding}

    @property
    def memory(self) -> list[MemoryEntry]:
        """Bytes by category and place, planned and measured."""
        planned = {(category, self._arena.place): size for category, size in self._on_device.by_category.items()}
        for key, nbytes in self._records.items():
            planned[key] = planned.get(key, Fraction(0)) + nbytes
        return [
            MemoryEntry(
                category,
                place,
                ceil(planned.get((category, place), 0)) if category in STATES else None,
                ceil(arena.held(category)),
                ceil(arena.peak(category)),
                ceil(arena.at_peak(category)),
                ceil(arena.live(category)),
            )
            for place, arena in self._arenas.items()
            for category in (*STATES, *TRANSIENT)
            if place == self._arena.place or arena.peak(category) or planned.get((category, place))
        ] + ([] if self._inputs is None else [self._of_inputs(self._inputs)])

    @staticmethod
    def _of_inputs(inputs: HostSlots) -> MemoryEntry:
        now, peak = inputs.footing.host, inputs.peak.host
        return MemoryEntry("activations", HOST, None, now, peak, peak, now)

    @property
    def traffic_units(self) -> list[UnitTraffic]:
        """The units as `traffic.step_traffic` takes them."""
        return [traffic_of(unit.name, unit.plan, unit.layout.total, self._ranks(unit)) for unit in self._units]

    def _ranks(self, unit: Unit) -> int | None:
        """Return over how many ranks a unit of experts is cut; None for all others."""
        return None if unit.comm is self._shard else unit.comm.size

    @property
    def _on_device(self) -> Held:
        """Return the bytes of all units on this rank's device by formula, without those in records."""
        return sum(map(self._of_unit, self._units), NOTHING)

    def _of_unit(self, unit: Unit) -> Held:
        return unit_bytes(unit.plan, unit.layout, OptimizerBytes(0) if unit.grads is None else self._optimizer_of(unit))

    def _optimizer_of(self, unit: Unit) -> OptimizerBytes:
        """Return bytes of a unit's masters beside weights, and of its states; records are counted apart."""
        stored, states = unit.weights.masters.stored, list[tuple[Span, Fraction]]()
        for name, key, flat in self._optimizer.flat_states():
            span = self._optimizer.span(unit, key) if name == unit.name else None
            if span is not None:
                states.append((span, Fraction(flat.numel() * flat.element_size(), span.stop - span.start)))
        master = 0 if stored is None else stored.element_size()
        return OptimizerBytes.of(master, states, unit.weights.elements)
