"""Bytes that a rank sends in a step, by operation and axis: the sum that the ledger's formulas give. No torch.

dp   zero/traffic.py of the rank's units, padding included; at stage 3 gathers per use, exact without a pipeline,
     rough in one, where some uses that meet share a gather
pp   pipeline/traffic.py: whole hidden states on every tp rank
tp   a block's two all-reduces forward and two backward, those of embedding and head, and what recomputation repeats: of
     blocks that run again together all but the last one. Sequence parallelism sends the same in halves. What the loss
     exchanges is left out: a few numbers per token
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from zero3d.activations.policy import Policy
from zero3d.pipeline.schedules import Schedule
from zero3d.pipeline.traffic import pipeline_traffic
from zero3d.plan.rank_model import rank_model
from zero3d.plan.spec import ModelSpec, ParallelPlan
from zero3d.plan.states import policies, reduced_width, states_key, wire_width
from zero3d.zero.layout import ROOT
from zero3d.zero.stages import WIDTHS
from zero3d.zero.traffic import UnitTraffic, step_traffic


def busiest_traffic(model: ModelSpec, plan: ParallelPlan) -> dict[str, float]:
    """Return the bytes of a step, by "operation axis", of a rank of the pipeline stage that sends the most."""
    by_stage = [_rank_traffic(model, plan, stage) for stage in range(plan.pp)]
    return max(by_stage, key=lambda traffic: sum(traffic.values()))


def _rank_traffic(model: ModelSpec, plan: ParallelPlan, stage: int) -> dict[str, float]:
    """Return the bytes of a step of a rank of one pipeline stage."""
    traffic = dict(
        _data_traffic(model, states_key(plan), stage, plan.accumulate, Policy.of(plan.activations).every or 1)
    )
    tokens = plan.micro_batch * model.length
    width = WIDTHS[plan.precision].weight
    if plan.tp > 1:
        traffic["all_reduce tp"] = plan.accumulate * width * tokens * model.hidden * _reductions(model, plan, stage)
    if plan.pp > 1:
        schedule = Schedule.of(plan.schedule)
        cuts = [[(tokens * model.hidden, width)]] * (plan.pp * schedule.chunks_per_rank - 1)
        moved = pipeline_traffic(schedule.chunks_of(stage, plan.pp), plan.accumulate, cuts)
        traffic["send pp"] = float(sum(volume.bytes for volume in moved.values()))
    return traffic


@lru_cache(maxsize=4096)
def _data_traffic(model: ModelSpec, plan: ParallelPlan, stage: int, micro_batches: int, every: int) -> dict[str, float]:
    """Return the bytes of the data axis. plan: of `states_key`; every: blocks that are recomputed together."""
    if plan.dp == 1:
        return {}
    rank = rank_model(model, plan, stage)
    uses = _uses(model, every)
    units = [unit for units in rank.units.values() for unit in units]
    reductions = micro_batches * (1 + _splits(plan))  # after the backward of inputs, and after that of weights
    rows, gathers = [], {}
    for i, unit in enumerate(units):
        wide = WIDTHS[plan.precision].reduced
        wire = int(reduced_width(plan, unit.itemsize)) if plan.exact else wire_width(plan, unit.itemsize)
        rows.append(UnitTraffic(str(i), unit.layout.total, unit.itemsize, wide, wire, unit.trainable))
        gathers[str(i)] = _gathers(plan, uses.get(unit.owner, 1), unit is units[-1], micro_batches)
    totals: Counter[str] = Counter()
    moved = step_traffic(plan.stage, rows, plan.dp, gathers, reductions, policies(plan)[1], plan.exact)
    for (operation, _), volume in moved.items():
        if operation != "exchange":
            totals[f"{operation} dp"] += volume.bytes
    return {key: float(value) for key, value in totals.items()}


def _splits(plan: ParallelPlan) -> bool:
    """Say whether the schedule has a backward of inputs and one of weights."""
    return plan.pp > 1 and Schedule.of(plan.schedule).splits_backward


def _uses(model: ModelSpec, every: int) -> dict[str, int]:
    """Count the uses of each owner's units in a micro-batch.

    Forward and backward; between them a recomputation where more than one block runs again, but for the block whose
    backward follows at once. The root's last to the end: one.
    """
    uses = {ROOT: 1}
    for part in model.parts:
        for unit in part.units[:1]:
            uses.setdefault(unit.name.partition("/")[0], 1 if part.kind == "embedding" else 2)
    names = [part.units[0].name.partition("/")[0] for part in model.blocks if part.units]
    for i, name in enumerate(names):
        uses[name] += i % every != every - 1 and i + 1 < len(names)
    return uses


def _gathers(plan: ParallelPlan, uses: int, last: bool, micro_batches: int) -> int:
    """Count a unit's gathers in a step. The last in a forward is the first in the backward; W reads weights again."""
    if not (plan.stage == 3 and policies(plan)[0] != "every_step"):
        return 1
    return micro_batches * (max(1, uses - last) if plan.pp == 1 else uses + _splits(plan))


def _reductions(model: ModelSpec, plan: ParallelPlan, stage: int) -> float:
    """Return how many hidden states a rank sends in all-reduces over tp: 2 (tp - 1) / tp for each."""
    policy, left_out = Policy.of(plan.activations), 0.5 if plan.sequence_parallel else 1.0
    again = 2 - left_out / (policy.every or 1) if policy.kind in ("full", "every") else 0.0
    kinds = [part.kind for parts in rank_model(model, plan, stage).chunks.values() for part in parts]
    whole = kinds.count("block") * (4 + again) + kinds.count("embedding") + kinds.count("head")
    return whole * 2 * (plan.tp - 1) / plan.tp
