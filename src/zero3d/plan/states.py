"""Bytes of model states on one rank, exactly: unit by unit, padding included. No torch.

    per parameter   stages.engine_bytes of the unit's dtype, stages.frozen_bytes where it is frozen
    parameters      those times the parameters of the unit, /N where they are sharded
    padding         those times the elements of its storage that are no parameter

A rank whose shard of a unit is all padding has the master of it, but no m and v, nor an average of weights (ema), which
is as wide as one of these.

Where states leave the device, optimizer states are records at every place (`offload.placement`), m and v of padding
among them, and weights off the device are. What records take beyond parameters is padding, too: whole blocks off the
device; on a disk each counts twice, for its two slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from zero3d.distributed.choice import NATIVE, choose_algorithm
from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.memory.scratch import update_bucket
from zero3d.offload.placement import UnitStates, placed_records
from zero3d.pipeline.schedules import Schedule, pipeline_policies
from zero3d.plan.matrices import moments_of, segments_of
from zero3d.plan.rank_model import RankUnit, rank_model
from zero3d.plan.spec import ClusterSpec, ModelSpec, ParallelPlan
from zero3d.spec.declaring import in_file
from zero3d.spec.offload import DEVICE, DISK, HOST, Offload
from zero3d.spec.optimizer import EIGHT_BIT
from zero3d.spec.rules import check
from zero3d.zero.layout import ROOT
from zero3d.zero.stages import (
    NO_BYTES,
    REMAINDER,
    WIDTHS,
    StateBytes,
    engine_bytes,
    frozen_bytes,
    resolve_policies,
    source_bytes,
    splits_master,
    stage_row,
)

NAMES = {2: "bf16", 4: "fp32", 8: "fp64"}


class Held(NamedTuple):
    """Bytes of one rank at one place: of parameters' states, and of the padding of their storages."""

    states: StateBytes
    padding: Fraction

    @property
    def total(self) -> Fraction:
        """Return all that is held there for the engine's life."""
        return self.states.total + self.padding


NOTHING = Held(NO_BYTES, Fraction(0))


class States(NamedTuple):
    """Bytes of one rank by place.

    longest  bytes of the longest record off the device, by kind
    bucket   elements of the longest record of optimizer states, wherever it is
    """

    device: Held
    host: Held = NOTHING
    disk: Held = NOTHING
    longest: Mapping[str, int] = {}
    bucket: int = 0

    @property
    def states(self) -> StateBytes:
        """Return those of parameters' states on the device."""
        return self.device.states

    @property
    def padding(self) -> Fraction:
        """Return those of padding on the device."""
        return self.device.padding

    @property
    def total(self) -> Fraction:
        """Return all that the arena holds on the device for the engine's life."""
        return self.device.total


@lru_cache(maxsize=1 << 12)
def check_rules(plan: ParallelPlan) -> None:
    """Refuse settings that an engine would refuse together. Raises ConfigError."""
    check(plan.settings, in_file)


def states(model: ModelSpec, plan: ParallelPlan, pp_stage: int = 0, dp_rank: int = 0, device: str = "cuda") -> States:
    """Return what an engine holds on rank `dp_rank` of stage `pp_stage`. Raises ConfigError for what it refuses.

    device  type of the device, whose buckets records are cut by
    """
    if plan.pp > 1:
        Schedule.of(plan.schedule).check(plan.accumulate, plan.pp)
    tiers = replace(plan.tiers, executor="auto")
    check_rules(plan)
    if tiers.params != "none" and policies(plan)[0] == "every_step":
        raise ConfigError(
            f"offload.params={tiers.params} with release every_step: weights leave the device that are released after "
            "every use. Pass zero.release=every_use, or offload.params=none."
        )
    return _states(model, states_key(plan), tiers, update_bucket(device), pp_stage, dp_rank)


def states_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose states and buffers are the same: the key under which these are computed once."""
    many = plan.accumulate if plan.exact else 1 if plan.accumulate == 1 else max(2, plan.pp)
    return replace(
        plan, micro_batch=1, accumulate=many, activations="none", sequence_parallel=False, offload="none",
        params="none", fraction=1.0, moments="fp32", executor="auto", partition_activations=False,
        offload_activations="none", asynchronous_saves=False, replay=0,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _states(model: ModelSpec, plan: ParallelPlan, tiers: Offload, bucket: int, pp_stage: int, dp_rank: int) -> States:
    """Return a rank's bytes. plan: a `states_key`; bucket: elements of a record."""
    units = [unit for units in rank_model(model, plan, pp_stage).units.values() for unit in units]
    device = NOTHING
    rates: dict[tuple[bool, int, bool, int, int], StateBytes] = {}  # per parameter: the same for most units
    for unit in units:
        moments = moments_of(unit, plan, dp_rank)
        key = unit.trainable, unit.itemsize, unit.owns(plan, dp_rank), unit.sources, moments.whole
        rate = rates.setdefault(key, per_parameter(unit, plan, tiers, dp_rank))
        padding = device.padding + rate.total * unit.layout.padding
        device = Held(device.states + rate.times(unit.layout.numel), padding)
        if unit.trainable and not tiers.states:
            wide, some = WIDTHS[plan.precision].reduced, device.states.optimizer
            own = device.states._replace(optimizer=some + wide * moments.used)
            device = Held(own, device.padding + wide * moments.padding)
    if not tiers.states:
        return States(device)
    if tiers.gradients == HOST and (policies(plan)[1] != "every_micro_batch" or plan.exact):
        raise ConfigError(
            f"offload.gradients=host with stage {plan.stage}, reduce {policies(plan)[1]} and exact {plan.exact}: those "
            "leave the device that are reduced after every micro-batch. Pass zero.stage=2 or 3 with "
            "zero.reduce=every_micro_batch and without zero.exact, or offload.gradients=device."
        )
    copies = {str(unit.copy_of).partition("/")[0] for part in model.parts for unit in part.units if unit.copy_of}
    late = {ROOT, *(copies if plan.pp == 1 else ())}  # a forward needs the root first, and tied weights
    late_last = sorted(units, key=lambda unit: unit.owner not in late)
    return _with_records(device, late_last, plan, tiers, bucket, dp_rank)


def _with_records(
    device: Held, units: Sequence[RankUnit], plan: ParallelPlan, tiers: Offload, bucket: int, dp_rank: int
) -> States:
    """Return a rank's bytes with those of records. device: what else is there."""
    places, longest, elements = {DEVICE: device, HOST: NOTHING, DISK: NOTHING}, dict[str, int](), 0
    sums: dict[tuple[int, str, str], list[int]] = {}  # bytes of records, and what these take
    states = [unit_states(unit, plan, tiers, dp_rank) for unit in units]
    for record in placed_records(states, tiers, bucket):
        both = sums.setdefault((record.unit, record.kind, record.place), [0, 0])
        both[:] = both[0] + record.slots * record.nbytes, both[1] + record.held
        if record.place != DEVICE:
            longest[record.kind] = max(longest.get(record.kind, 0), record.nbytes)
        elements = max(elements, record.elements if record.kind == "optimizer" else 0)
    for (unit, kind, place), (nbytes, held) in sums.items():
        (bytes_, padding), layout = places[place], units[unit].layout
        category = "parameters" if kind == "frozen" else kind
        used = Fraction(layout.numel * nbytes, layout.total)
        bytes_ = bytes_._replace(**{category: getattr(bytes_, category) + used})
        places[place] = Held(bytes_, padding + held - used)
    return States(places[DEVICE], places[HOST], places[DISK], longest, elements)


def unit_states(unit: RankUnit, plan: ParallelPlan, tiers: Offload, dp_rank: int) -> UnitStates:
    """Return what a rank updates of a unit, and the widths of its records."""
    wide = WIDTHS[plan.precision].reduced
    moment = 2 if tiers.moments == "bf16" else wide
    elements = unit.layout.total if plan.stage == 0 else unit.layout.shard
    segments = tuple((size, count * moment) for size, count in segments_of(unit, plan, dp_rank, elements))
    return UnitStates(elements, unit.itemsize, master_bytes(unit, plan), segments, wide, unit.trainable)


def master_bytes(unit: RankUnit, plan: ParallelPlan) -> int:
    """Return the bytes per parameter of what is stored of masters beside the weights."""
    wide, splits = WIDTHS[plan.precision].reduced, splits_master(plan.master, plan.precision)
    return 0 if unit.itemsize == wide else REMAINDER if splits else wide


def moment_width(plan: ParallelPlan) -> Fraction | int:
    """Return the bytes per parameter of a moment on the device: of 8 bits, a scale for a block besides."""
    return 1 + Fraction(4, plan.block) if plan.optimizer == EIGHT_BIT else WIDTHS[plan.precision].reduced


def policies(plan: ParallelPlan) -> tuple[str, str]:
    """Return `release` and `reduce` as the engine resolves them."""
    return resolve_policies(
        stage_row(plan.stage), *pipeline_policies(plan.pp, plan.tiers.release(plan.release), plan.reduce)
    )


def reduced_width(plan: ParallelPlan, narrow: float = 2.0) -> float:
    """Return a gradient's bytes on its way to the reduction; in exact mode that of a single micro-batch is narrow."""
    return narrow if (plan.exact and _alone(plan)) or plan.reduce_dtype != "fp32" else 4.0


def wire_width(plan: ParallelPlan, itemsize: int, summed: bool = False) -> int:
    """Return the bytes in which gradients of weights of `itemsize` travel: as asked, unless that would round them.

    Terms that are no sums yet travel as they were made, unless the backend is to sum them (`settled`: native).
    summed  they are sums at once, of several sources
    """
    requested = WIDTHS[plan.reduce_dtype].weight if plan.precision != "fp64" else 8
    wire = requested if requested >= itemsize else WIDTHS[plan.precision].reduced
    return min(wire, itemsize) if _alone(plan) and plan.reduce_scatter != NATIVE and not summed else wire


def settled(plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with `reduce_scatter` as the engine takes it on a cluster's NCCL: no longer auto."""
    if plan.dp == 1:
        return plan
    on_host = Degrees(plan.pp, plan.dp, plan.tp).dp_on_host(cluster.per_node)
    return replace(plan, reduce_scatter=choose_algorithm("nccl", plan.dp, plan.reduce_scatter, on_host))


def sends_terms(plan: ParallelPlan, width: int) -> bool:
    """Return whether gradients that travel in so many bytes are exchanged, and summed by their owner, on NCCL."""
    return plan.exact or (plan.reduce_scatter != NATIVE and width < WIDTHS["fp32"].weight)


def _alone(plan: ParallelPlan) -> bool:
    """Return whether what is reduced at a time are the gradients of one micro-batch."""
    return plan.accumulate == 1 or policies(plan)[1] == "every_micro_batch"


def summands_of_rank(plan: ParallelPlan) -> int:
    """Return how many micro-batches sums are kept for: exact pipelines sum the first before they know the last."""
    return max(2, plan.accumulate) if plan.exact and plan.pp > 1 else plan.accumulate


def per_parameter(unit: RankUnit, plan: ParallelPlan, tiers: Offload, dp_rank: int = 0) -> StateBytes:
    """Return the bytes per parameter (and per element of padding) of one unit on one rank, records apart."""
    release, reduce = policies(plan)
    stage, n, precision = unit.stage_of(plan), unit.layout.n, NAMES[unit.itemsize]
    bytes_ = frozen_bytes(stage, n, unit.itemsize, release)
    if unit.trainable:
        wide, whole = WIDTHS[plan.precision].reduced, moments_of(unit, plan, dp_rank).whole
        moments = unit.owns(plan, dp_rank) * (whole * moment_width(plan) + plan.averages * wide)
        bytes_ = engine_bytes(
            stage, n, precision, release, reduce, summands_of_rank(plan),
            optimizer=0 if tiers.states else master_bytes(unit, plan) + moments, exact=plan.exact,
        )  # fmt: skip
        more = max(0, unit.sources - 1) * source_bytes(stage, precision, reduce, summands_of_rank(plan), plan.exact)
        bytes_ = bytes_._replace(gradients=bytes_.gradients + more)
    leaves = {"parameters": tiers.params != "none", "gradients": tiers.gradients == HOST and tiers.states}
    return bytes_._replace(**{name: Fraction(0) for name, off in leaves.items() if off})
