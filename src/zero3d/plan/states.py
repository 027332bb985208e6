"""Bytes of model states on one rank, exactly: unit by unit, padding included. No torch.

    per parameter   stages.engine_bytes of the unit's dtype, stages.frozen_bytes where it is frozen
    parameters      those times the parameters of the unit, /N where they are sharded
    padding         those times the elements of its storage that are no parameter

A rank whose shard of a unit is all padding has the master of it, but no m and v.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from zero3d.distributed.choice import NATIVE, choose_algorithm
from zero3d.distributed.degrees import Degrees
from zero3d.pipeline.schedules import Schedule, pipeline_policies
from zero3d.plan.rank_model import RankUnit, rank_model
from zero3d.plan.spec import ClusterSpec, ModelSpec, ParallelPlan
from zero3d.zero.stages import (
    NO_BYTES,
    REMAINDER,
    WIDTHS,
    StateBytes,
    engine_bytes,
    frozen_bytes,
    resolve_policies,
    splits_master,
    stage_row,
)

NAMES = {2: "bf16", 4: "fp32", 8: "fp64"}


class States(NamedTuple):
    """Bytes of one rank: of parameters' states, and of the padding of their storages."""

    states: StateBytes
    padding: Fraction

    @property
    def total(self) -> Fraction:
        """Return all that the arena holds for the engine's life."""
        return self.states.total + self.padding


def states(model: ModelSpec, plan: ParallelPlan, pp_stage: int = 0, dp_rank: int = 0) -> States:
    """Return what an engine holds on rank `dp_rank` of stage `pp_stage`. Raises ConfigError for what it refuses."""
    if plan.pp > 1:
        Schedule.of(plan.schedule).check(plan.accumulate, plan.pp)
    return _states(model, states_key(plan), pp_stage, dp_rank)


def states_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose states and buffers are the same: the key under which these are computed once."""
    many = plan.accumulate if plan.exact else 1 if plan.accumulate == 1 else max(2, plan.pp)
    return replace(plan, micro_batch=1, accumulate=many, activations="none", sequence_parallel=False, offload="none")


@lru_cache(maxsize=4096)
def _states(model: ModelSpec, plan: ParallelPlan, pp_stage: int, dp_rank: int) -> States:
    total = States(NO_BYTES, Fraction(0))
    rates: dict[tuple[bool, int, bool], StateBytes] = {}  # per parameter: the same for most units
    for unit in (unit for units in rank_model(model, plan, pp_stage).units.values() for unit in units):
        owns = plan.stage == 0 or dp_rank * unit.layout.shard < unit.used
        rate = rates.setdefault((unit.trainable, unit.itemsize, owns), per_parameter(unit, plan, dp_rank))
        total = States(total.states + rate.times(unit.layout.numel), total.padding + rate.total * unit.layout.padding)
    return total


def policies(plan: ParallelPlan) -> tuple[str, str]:
    """Return `release` and `reduce` as the engine resolves them."""
    return resolve_policies(stage_row(plan.stage), *pipeline_policies(plan.pp, plan.release, plan.reduce))


def reduced_width(plan: ParallelPlan, narrow: float = 2.0) -> float:
    """Return a gradient's bytes on its way to the reduction; in exact mode that of a single micro-batch is narrow."""
    return narrow if (plan.exact and _alone(plan)) or plan.reduce_dtype != "fp32" else 4.0


def wire_width(plan: ParallelPlan, itemsize: int) -> int:
    """Return the bytes in which gradients of weights of `itemsize` travel: as asked, unless that would round them.

    Terms that are no sums yet travel as they were made, unless the backend is to sum them (`settled`: native).
    """
    requested = WIDTHS[plan.reduce_dtype].weight if plan.precision != "fp64" else 8
    wire = requested if requested >= itemsize else WIDTHS[plan.precision].reduced
    return min(wire, itemsize) if _alone(plan) and plan.reduce_scatter != NATIVE else wire


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


def per_parameter(unit: RankUnit, plan: ParallelPlan, dp_rank: int = 0) -> StateBytes:
    """Return the bytes per parameter (and per element of padding) of one unit on one rank."""
    release, reduce = policies(plan)
    if not unit.trainable:
        return frozen_bytes(plan.stage, plan.dp, unit.itemsize, release)
    wide = WIDTHS[plan.precision].reduced
    splits = splits_master(plan.master, plan.precision)
    master = 0 if unit.itemsize == wide else REMAINDER if splits else wide
    owns = plan.stage == 0 or dp_rank * unit.layout.shard < unit.used
    return engine_bytes(
        plan.stage, plan.dp, NAMES[unit.itemsize], release, reduce, summands_of_rank(plan),
        optimizer=master + 2 * wide * owns, exact=plan.exact,
    )  # fmt: skip
