"""Bytes that a rank sends in a step, by operation and axis: the sum that the ledger's formulas give. No torch.

dp   traffic.step_traffic of the rank's units, padding included; at stage 3 gathers per use, exact without a pipeline,
     rough in one, where some uses that meet share a gather
pp   traffic.pipeline_traffic: whole hidden states on every tp rank
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
from zero3d.plan.held import rank_of
from zero3d.plan.spec import ModelSpec, ParallelPlan
from zero3d.plan.states import WIDE, alike, policies, reduced_width
from zero3d.plan.windows import ROOT
from zero3d.zero.stages import WIDTHS
from zero3d.zero.traffic import UnitTraffic, step_traffic


def sent(model: ModelSpec, plan: ParallelPlan) -> dict[str, float]:
    """Of the pipeline stage that sends the most."""
    ranks = [_of_rank(model, plan, stage) for stage in range(plan.pp)]
    return max(ranks, key=lambda rank: sum(rank.values()))


def _of_rank(model: ModelSpec, plan: ParallelPlan, stage: int) -> dict[str, float]:
    found = dict(_data(model, alike(plan), stage, plan.accumulate, Policy.of(plan.activations).every or 1))
    tokens = plan.micro_batch * model.length
    width = WIDTHS[plan.precision].weight
    if plan.tp > 1:
        found["all_reduce tp"] = plan.accumulate * width * tokens * model.hidden * _reductions(model, plan, stage)
    if plan.pp > 1:
        schedule = Schedule.of(plan.schedule)
        cuts = [[(tokens * model.hidden, width)]] * (plan.pp * schedule.chunks_per_rank - 1)
        moved = pipeline_traffic(schedule.chunks_of(stage, plan.pp), plan.accumulate, cuts)
        found["send pp"] = float(sum(each.bytes for each in moved.values()))
    return found


@lru_cache(maxsize=4096)
def _data(model: ModelSpec, plan: ParallelPlan, stage: int, micro_batches: int, every: int) -> dict[str, float]:
    """Of the data axis. plan: of states.alike; every: blocks that are recomputed together."""
    if plan.dp == 1:
        return {}
    rank = rank_of(model, plan, stage)
    uses = _uses(model, every)
    units = [unit for units in rank.units.values() for unit in units]
    reductions = micro_batches * (1 + _splits(plan))  # after the backward of inputs, and after that of weights
    rows, gathers = [], {}
    for i, unit in enumerate(units):
        wide = WIDE.get(plan.precision, 4)
        asked = WIDTHS[plan.reduce_dtype].weight if plan.precision != "fp64" else 8
        wire = asked if asked >= unit.itemsize else wide
        if plan.exact:
            wire = int(reduced_width(plan, unit.itemsize))
        rows.append(UnitTraffic(str(i), unit.layout.total, unit.itemsize, wide, wire, unit.trainable))
        gathers[str(i)] = _gathers(plan, uses.get(unit.owner, 1), unit is units[-1], micro_batches)
    found: Counter[str] = Counter()
    moved = step_traffic(plan.stage, rows, plan.dp, gathers, reductions, policies(plan)[1], plan.exact)
    for (operation, _), each in moved.items():
        if operation != "exchange":
            found[f"{operation} dp"] += each.bytes
    return {key: float(value) for key, value in found.items()}


def _splits(plan: ParallelPlan) -> bool:
    return plan.pp > 1 and Schedule.of(plan.schedule).splits_backward


def _uses(model: ModelSpec, every: int) -> dict[str, int]:
    """By owner of units, its uses in a micro-batch: forward, backward, and between them a recomputation where more than
    one block runs again, but for the one whose backward follows at once. The root's last to the end: one.
    """
    found = {ROOT: 1}
    for part in model.parts:
        for unit in part.units[:1]:
            found.setdefault(unit.name.partition("/")[0], 1 if part.kind == "embedding" else 2)
    names = [part.units[0].name.partition("/")[0] for part in model.blocks if part.units]
    for i, name in enumerate(names):
        found[name] += i % every != every - 1 and i + 1 < len(names)
    return found


def _gathers(plan: ParallelPlan, uses: int, last: bool, micro_batches: int) -> int:
    """Of a unit in a step: the last one in a forward is the first in the backward. W reads weights once more."""
    if not (plan.stage == 3 and policies(plan)[0] != "every_step"):
        return 1
    return micro_batches * (max(1, uses - last) if plan.pp == 1 else uses + _splits(plan))


def _reductions(model: ModelSpec, plan: ParallelPlan, stage: int) -> float:
    """All-reduces of a hidden state that a rank takes part in, each 2 (tp - 1) / tp of it."""
    policy, left_out = Policy.of(plan.activations), 0.5 if plan.sequence_parallel else 1.0
    again = 2 - left_out / (policy.every or 1) if policy.kind in ("full", "every") else 0.0
    parts = [part.kind for inside in rank_of(model, plan, stage).parts.values() for part in inside]
    whole = parts.count("block") * (4 + again) + parts.count("embedding") + parts.count("head")
    return whole * 2 * (plan.tp - 1) / plan.tp
