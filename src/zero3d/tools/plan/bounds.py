"""Bounds of a plan's memory, from below and from above, for less work than its fullest instant takes. No torch.

    bytes of a device   contexts + reserved x (what is there all the time + gradients, buffers, activations)

    at least            of the first pipeline stage: gradients, and activations without what comes and goes with a part
    at most             of every stage: all gradients, the most buffers, and the most activations at any instant

Activations are looked up by mesh and recomputation, for one sequence a micro-batch: they are linear in these, but for
what does not grow. States and buffers are looked up by what they depend on. A part in 10^9 is left out or added, so
that sums in another order stay inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from math import inf

from zero3d.pipeline.schedules import Schedule
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.zero import Zero
from zero3d.tools.plan.footprint import tiles_loss
from zero3d.tools.plan.in_flight import micro_batches_to_run
from zero3d.tools.plan.inputs import ring_here
from zero3d.tools.plan.memory import (
    PROCESS,
    RESERVED,
    Span,
    batch_bytes,
    fullest_stages,
    holding_of,
    ranks_of_stages,
    shown_bytes,
)
from zero3d.tools.plan.rank_model import first_alike
from zero3d.tools.plan.spec import PLAIN, ClusterSpec, ModelSpec, ParallelPlan
from zero3d.tools.plan.states import without_sequences

ROUND = 1e-9
SLICE = 4.0  # bytes of an element that a process reads

Stages = tuple[int, ...]
Setting = tuple[Zero, Offload, Mesh, str, str, float | None, int]
Running = tuple[Mesh, str, str, str, str | None, bool, bool, int]


def memory_at_least(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, above: float = inf) -> float:
    """Return bytes that the fullest rank's device shows at least: of the first pipeline stage, or of all.

    plan   settled (estimate.py), as for all bounds
    above  a bound of more bytes will do
    """
    setting, running, beside = _setting(plan), _running(model, plan), _beside(model, plan)
    contexts = shown_bytes(0.0, plan, cluster)

    def nbytes(allocated: float) -> float:
        return (1 - ROUND) * (RESERVED * allocated + contexts)

    def shown(stage: int, stages: Stages) -> float:
        always, gradients = _states(model, setting, stage)
        least = nbytes(always + beside + gradients)
        if least > above:
            return least
        span = _span(model, running, stages)
        in_backward = max(plan.micro_batch * span.least, gradients + plan.micro_batch * span.later)
        return max(least, nbytes(always + beside + in_backward))

    most = shown(0, (0,))
    for stages in _all_stages(model, running)[::-1] if plan.pp > 1 else ():
        if most > above:
            break
        most = max(most, shown(stages[0], stages))
    return most


def memory_at_most(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> float:
    """Return bytes that no rank's device shows more of; infinite where other tiers may lack any, or nobody knows."""
    on_host = min(plan.world, cluster.per_node) * (PROCESS + SLICE * _largest(model))
    away = plan.offload.states or plan.offload.activations_leave or plan.asynchronous_saves
    if away or on_host > cluster.host_memory:
        return inf
    setting, running = _setting(plan), _running(model, plan)
    most = 0.0
    for stages in _all_stages(model, running):
        always, in_step, in_backward, own = _moving(model, setting, stages[0])
        span = _span(model, running, stages)
        activations = max(plan.micro_batch * span.most, plan.micro_batch * span.weights + own)
        most = max(most, always + max(in_step, in_backward + activations))
    return (1 + ROUND) * shown_bytes(RESERVED * (most + _beside(model, plan)), plan, cluster)


def _beside(model: ModelSpec, plan: ParallelPlan) -> float:
    return batch_bytes(model, plan) + ring_here(model, plan)


@lru_cache(maxsize=64)
def _largest(model: ModelSpec) -> int:
    """Return the elements of the largest weight."""
    weights = (weight for part in model.parts for unit in part.units for weight in unit.weights)
    return max((weight.numel for weight in weights), default=0)


# --- states -------------------------------------------------------------------------------------


def _setting(plan: ParallelPlan) -> Setting:
    """Return what a rank's states and buffers depend on."""
    offload = plan.offload if plan.offload.activations == "none" else _inputs_here(plan.offload)
    many = plan.accumulate if plan.zero.exact else 1 if plan.accumulate == 1 else max(2, plan.pp)
    return plan.zero, offload, without_sequences(plan.mesh), plan.precision, plan.optimizer, plan.ema, many


@lru_cache(maxsize=256)
def _inputs_here(offload: Offload) -> Offload:
    return replace(offload, activations="none")


@lru_cache(maxsize=4096)
def _plan(setting: Setting) -> ParallelPlan:
    zero, offload, mesh, precision, optimizer, ema, many = setting
    chunks = Schedule.of(mesh.schedule).chunks_per_rank
    rest = {"precision": precision, "optimizer": optimizer, "ema": ema, "virtual": chunks}
    return PLAIN.having(zero=zero, offload=offload, mesh=mesh, **rest).sized(1, many)


@lru_cache(maxsize=4096)
def _states(model: ModelSpec, setting: Setting, stage: int) -> tuple[float, float]:
    """Return the bytes that a stage has all the time, and those of its gradients."""
    plan = _plan(setting)
    holding = holding_of(model, plan, first_alike(model, plan, stage))
    return holding.always, sum(holding.all)


@lru_cache(maxsize=4096)
def _moving(model: ModelSpec, setting: Setting, stage: int) -> tuple[float, float, float, float]:
    """Return the bytes that a stage has all the time, what a step's end adds to them at most, and its backwards.

    The last: gradients of a chunk's weights, which a backward of weights makes beside these.
    """
    plan = _plan(setting)
    holding = holding_of(model, plan, first_alike(model, plan, stage))
    splits = plan.pp > 1 and Schedule.of(plan.schedule).splits_backward
    own = float(max(holding.gradients, default=0)) if splits else 0.0
    return holding.always, holding.step.total, holding.at_most, own


# --- activations --------------------------------------------------------------------------------


def _running(model: ModelSpec, plan: ParallelPlan) -> Running:
    """Return what activations of one sequence a micro-batch depend on."""
    many = micro_batches_to_run(plan) if plan.pp > 1 else min(2, plan.accumulate)
    exact, tiled = plan.zero.exact, tiles_loss(model, plan)
    how = plan.activations, plan.offload.activations, plan.precision, plan.linear
    return _unsharded(plan.mesh), *how, tiled, exact, many


@lru_cache(maxsize=4096)
def _unsharded(mesh: Mesh) -> Mesh:
    return replace(mesh, shard=None)


@lru_cache(maxsize=4096)
def _one_sequence(running: Running) -> ParallelPlan:
    mesh, activations, place, precision, linear, tiled, exact, many = running
    sections = {"zero": _zero(exact), "offload": _inputs(place), "mesh": mesh}
    how = {"activations": activations, "precision": precision, "linear": linear, "tiled_loss": tiled}
    return PLAIN.having(**sections, **how).sized(1, many)


@lru_cache(maxsize=2)
def _zero(exact: bool) -> Zero:
    return Zero(0, exact=exact)


@lru_cache(maxsize=16)
def _inputs(place: str) -> Offload:
    return Offload(activations=place)


@lru_cache(maxsize=4096)
def _all_stages(model: ModelSpec, running: Running) -> Sequence[Stages]:
    return fullest_stages(model, _one_sequence(running))


@lru_cache(maxsize=1 << 14)
def _span(model: ModelSpec, running: Running, stages: Stages) -> Span:
    return ranks_of_stages(model, _one_sequence(running), stages).span()
