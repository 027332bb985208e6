"""Bytes of model states on one rank, exactly: unit by unit, padding included. No torch.

Bytes of each unit are account/states.py's, of its optimizer states account/optimizers.py's.

A rank whose shard of a unit is all padding has the master of it, but no m and v, nor an average of weights (ema), which
is as wide as one of these.

Where states leave the device, optimizer states are records at every place (`blueprint.places`), m and v of padding
among them, and weights off the device are. What records take beyond parameters is padding, too: whole blocks off the
device, and each as often as its tier has slots of it: on a disk two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from zero3d.account.optimizers import CODE, OptimizerBytes, state_width, states_by_slot
from zero3d.account.states import NOTHING, Held, StateBytes, unit_bytes
from zero3d.blueprint.places import UnitStates, placed_records
from zero3d.blueprint.state_spans import Has, Span, Updated
from zero3d.blueprint.units import in_turn
from zero3d.errors import ConfigError
from zero3d.memory.scratch import update_bucket
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.declaring import in_file
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.rules import check
from zero3d.spec.sections import Spec
from zero3d.spec.tiers import DEVICE, TIERS
from zero3d.spec.zero import Zero
from zero3d.tools.plan.decided import algorithm_on, node_of, policy_of
from zero3d.tools.plan.rank_model import RankUnit, rank_model
from zero3d.tools.plan.spec import PLAIN, ClusterSpec, ModelSpec, ParallelPlan


class States(NamedTuple):
    """Bytes of one rank by place.

    away     off the device, by tier
    longest  bytes of the longest record off the device, by kind
    bucket   elements of the longest record of optimizer states, wherever it is
    """

    device: Held
    away: Mapping[str, Held] = {}
    longest: Mapping[str, int] = {}
    bucket: int = 0

    def at(self, tier: str) -> Held:
        """Return those of a tier."""
        return self.away.get(tier, NOTHING)

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
        """Return all that the arena holds on the device of model states when gradients are there."""
        return self.device.total


def check_rules(plan: ParallelPlan) -> None:
    """Refuse settings that an engine would refuse together. Raises ConfigError."""
    settings = {name: getattr(plan, name) for name in _SPEC} | {"offload": _in_a_folder(plan.offload)}
    try:
        _check_rules(Spec(**settings | {"accumulate": min(2, plan.accumulate)}))  # rules ask whether there are several
    except ConfigError:
        _check_rules(Spec(**settings))  # which names the number


_SPEC = [each.name for each in fields(Spec)]


@lru_cache(maxsize=1 << 12)
def _check_rules(settings: Spec) -> None:
    check(settings, in_file)


@lru_cache(maxsize=256)
def _in_a_folder(offload: Offload) -> Offload:
    """Return the settings with a disk's folder: whoever runs the plan says where it is."""
    return replace(offload, directory="FOLDER")


def states(model: ModelSpec, plan: ParallelPlan, pp_stage: int = 0, dp_rank: int = 0, device: str = "cuda") -> States:
    """Return what an engine holds on rank `dp_rank` of stage `pp_stage`. Raises ConfigError for what it refuses.

    device  type of the device, whose buckets records are cut by
    """
    if plan.pp > 1:
        Schedule.of(plan.schedule).check(plan.accumulate, plan.pp)
    return _states(model, states_key(plan), _tiers(plan), update_bucket(device), pp_stage, dp_rank)


@lru_cache(maxsize=1 << 14)
def _tiers(plan: ParallelPlan) -> Offload:
    """Return what leaves the device, whoever updates it. Raises ConfigError for what an engine refuses."""
    check_rules(plan)
    return _by_whomever(plan.offload)


@lru_cache(maxsize=256)
def _by_whomever(offload: Offload) -> Offload:
    return replace(offload, executor="auto")


@lru_cache(maxsize=1 << 14)
def states_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose states and buffers are the same: the key under which these are computed once."""
    many = plan.accumulate if plan.zero.exact else 1 if plan.accumulate == 1 else max(2, plan.pp)
    return plan.having(
        offload=_away(plan.offload),
        mesh=without_sequences(plan.mesh),
        micro_batch=1,
        accumulate=many,
        activations="none",
        tiled_loss=False,
        asynchronous_saves=False,
        replay=0,
        linear=None,
        compile=False,
        quantize=None,
    )


@lru_cache(maxsize=256)
def _away(offload: Offload) -> Offload:
    """Return what buffers depend on of what leaves the device."""
    return Offload(params=offload.params, gradients=offload.gradients, gradient_dtype=offload.gradient_dtype)


@lru_cache(maxsize=4096)
def without_sequences(mesh: Mesh) -> Mesh:
    """Return what states and buffers depend on of a mesh."""
    return replace(mesh, sequence_parallel=False, partition_activations=False, sp=1, sp_kind="auto", sp_mixers="auto")


@lru_cache(maxsize=4096)
def _states(model: ModelSpec, plan: ParallelPlan, tiers: Offload, bucket: int, pp_stage: int, dp_rank: int) -> States:
    """Return a rank's bytes. plan: a `states_key`; bucket: elements of a record."""
    rank = rank_model(model, plan, pp_stage)
    device = sum((on_device(unit, plan, tiers, dp_rank).times(many) for unit, many in rank.unlike), NOTHING)
    if not tiers.states:
        return States(device)
    units = in_turn(unit for units in rank.units.values() for unit in units)
    return _with_records(device, units, plan, tiers, bucket, dp_rank)


def _with_records(
    device: Held, units: Sequence[RankUnit], plan: ParallelPlan, tiers: Offload, bucket: int, dp_rank: int
) -> States:
    """Return a rank's bytes with those of records. device: what else is there."""
    places, longest, elements = {DEVICE: device, **dict.fromkeys(TIERS, NOTHING)}, dict[str, int](), 0
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
    return States(places.pop(DEVICE), places, longest, elements)


def on_device(unit: RankUnit, plan: ParallelPlan, tiers: Offload, dp_rank: int) -> Held:
    """Return what a rank's device holds of a unit, records apart."""
    optimizer = OptimizerBytes(0)
    if unit.trainable and not tiers.states:
        wide = policy_of(plan).master.itemsize
        width = CODE if OPTIMIZERS[plan.optimizer].coded else wide
        updated, has = _updated(unit, plan, dp_rank)
        states = [(span, width) for span in updated.spans(has).values()]
        if states:
            states += [(Span(0, updated.elements, unit.layout.numel), wide)] * plan.averages
        optimizer = OptimizerBytes.of(policy_of(plan).stored(unit.itemsize), states, updated.elements)
    return unit_bytes(unit.plan(plan), unit.layout, optimizer)


def _updated(unit: RankUnit, plan: ParallelPlan, dp_rank: int) -> tuple[Updated, dict[str, Has]]:
    """Return what a rank updates of a unit, and which slots have each optimizer state."""
    rank = unit.layout.rank_of(dp_rank) if policy_of(plan).row.shards_optimizer else None
    return Updated.of(unit.layout, rank), states_by_slot(plan.optimizer, {number for number, _ in unit.forms})


def unit_states(unit: RankUnit, plan: ParallelPlan, tiers: Offload, dp_rank: int) -> UnitStates:
    """Return what a rank updates of a unit, and the widths of its records."""
    updated, has = _updated(unit, plan, dp_rank)
    widths = dict.fromkeys(has, state_width(policy_of(plan).master.itemsize, tiers.moments))
    return UnitStates.of(unit.plan(plan), updated.elements, updated.segments(has), widths)


def with_algorithm(plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with `reduce_scatter` as the engine takes it on a cluster's NCCL, and ranks of a second shard.

    The one is no longer auto, the other no longer node.
    """
    if plan.shard == 1:
        return plan
    return plan.having(zero=_zero_on(plan.zero, without_sequences(plan.mesh), cluster.on_host))


@lru_cache(maxsize=4096)
def _zero_on(zero: Zero, mesh: Mesh, on_host: int) -> Zero:
    plan = PLAIN.having(zero=zero, mesh=mesh)
    ranks = node_of(plan, on_host)
    return _zero_with(zero, algorithm_on(plan, on_host), None if ranks == 1 else ranks)


@lru_cache(maxsize=1024)
def _zero_with(zero: Zero, algorithm: str, ranks: int | None) -> Zero:
    """Return one section for all that are equal, which caches then compare at a glance."""
    return replace(zero, reduce_scatter=algorithm, second_shard=ranks)
