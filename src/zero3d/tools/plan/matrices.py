"""What Muon sends and computes on a rank, by the rules of the engine (optim/owners.py). No torch.

    sent       pieces of matrices to their owners, and back, in bf16
    computed   Newton-Schulz of the owner that has most, as products of matrices

Which parameters are matrices is what the engine takes by default: `optimizer.groups` and `optimizer.split` are unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from zero3d.distributed.degrees import EXPERT_SHARD
from zero3d.optim.owners import WIRE, Owners, matrices_of
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.rank_model import RankUnit, partition_key, rank_model
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan


@lru_cache(maxsize=4096)
def owners_of(model: ModelSpec, plan: ParallelPlan, stage: int) -> tuple[tuple[str, Owners], ...]:
    """Return who owns the matrices of a pipeline stage's rank, by the axis that cuts their units: dp and edp, or parts.

    plan   with degrees, stage and what divides the model alone: `owners_key`
    """
    units = [unit for units in rank_model(model, plan, stage).units.values() for unit in units if unit.trainable]
    found, everywhere = [], not policy_of(plan).row.shards_optimizer
    for name, experts in (("shard", False), (EXPERT_SHARD, True)):
        axis, own = plan.degrees.group(name), _on(units, plan, experts)
        matrices = [
            matrix
            for number, unit in own.items()
            for matrix in matrices_of(number, unit.layout, dict(unit.forms), dict(unit.degrees))
        ]
        if matrices:
            layouts = {number: unit.layout for number, unit in own.items()}
            found.append((axis, Owners(matrices, layouts, next(iter(layouts.values())).n, everywhere)))
    return tuple(found)


def _on(units: Sequence[RankUnit], plan: ParallelPlan, experts: bool) -> dict[int, RankUnit]:
    """Return the units with matrices of experts that ep shares out, or of all others."""
    apart = plan.ep > 1
    return {n: unit for n, unit in enumerate(units) if unit.forms and (apart and unit.kind.experts) == experts}


def owners_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose owners are the same."""
    return partition_key(plan).replace(stage=plan.zero.stage)


def _owners(model: ModelSpec, plan: ParallelPlan, stage: int) -> tuple[tuple[str, Owners], ...]:
    """Return the owners of a plan's matrices; none where its optimizer makes no matrix orthogonal."""
    return owners_of(model, owners_key(plan), stage) if OPTIMIZERS[plan.optimizer].orthogonal else ()


def working(model: ModelSpec, plan: ParallelPlan, stage: int) -> int:
    """Return the most bytes that are on their way to owners and back, or are computed there, on the first dp rank."""
    batches = not policy_of(plan).exact
    return max((WIRE * owners.working(0, batches, plan.tp) for _, owners in _owners(model, plan, stage)), default=0)


def traffic(model: ModelSpec, plan: ParallelPlan, stage: int) -> dict[str, float]:
    """Return the bytes that the first dp rank of a pipeline stage sends in a step, by "operation axis"."""
    sent: dict[str, float] = {}
    for axis, owners in _owners(model, plan, stage):
        for row in owners.traffic(axis, 0, 0, plan.tp):
            if row.moved.bytes:
                sent[f"{row.op} {row.axis}"] = sent.get(f"{row.op} {row.axis}", 0.0) + row.moved.bytes
    return sent


def operations_of(model: ModelSpec, plan: ParallelPlan) -> int:
    """Return the operations of Newton-Schulz of the rank that has most: of slices that tp cuts, its share."""
    of_stages = (_owners(model, plan, stage) for stage in range(plan.pp))
    return max(sum(max(owners.costs()) for _, owners in of_stage) for of_stage in of_stages)
