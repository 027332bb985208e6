"""Recommend a plan: of those that predictions do not tell apart, the simplest. No torch.

    plain dp  <  a second shard  <  shard, stage by stage  <  tp  <  sp  <  ep  <  pp      each is simpler than the next

Plans within `EQUAL` of the fastest one's seconds are equal: published pairs that near were not ordered reliably. A plan
is as complex as its last axis in this order, then as that axis' degree, then as the axes before. States off the device
are less simple than any axis, and of pipelines 1f1b is the simplest. Among equals in all of this the fastest is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.search import PIPELINES, Row
from zero3d.tools.plan.spec import ParallelPlan

EQUAL = constant("step", "apart")  # share of a step's seconds
AIMS: dict[str, Callable[[ParallelPlan], int]] = {  # what plans must have alike to be as good for a goal
    "fastest": lambda plan: 0,
    "fewest-gpus": lambda plan: plan.world,
    "largest-batch": lambda plan: plan.micro_batch * plan.rows,
}


class Choice(NamedTuple):
    """A recommended plan.

    fastest  the first row of the ranking
    equal    rows that are as good and as fast, this one among them
    """

    row: Row
    fastest: Row
    equal: int


def choose(rows: Sequence[Row], goal: str = "fastest") -> Choice:
    """Return the simplest of the rows that are as good as the first. rows: ranked by the goal, at least one.

    A row that lacks margin is as good as none that has it.
    """
    first, aim = rows[0], AIMS[goal]
    most, wanted, whole = (1 + EQUAL) * first.estimate.seconds.mid, aim(first.plan), not first.lacks
    equal = [
        row
        for row in rows
        if row.estimate.seconds.mid <= most and aim(row.plan) == wanted and row.lacks <= (0 if whole else first.lacks)
    ]
    return Choice(min(equal, key=lambda row: complexity(row.plan)), first, len(equal))


def complexity(plan: ParallelPlan) -> tuple[int, ...]:
    """Return what makes a plan less simple, the last axis of the order first."""
    away = int(bool(plan.offload.states)) + int(plan.offload.activations_leave)
    second = int(plan.zero.second_shard is not None or plan.shard < plan.dp)
    stage = plan.zero.stage if plan.shard > 1 else 0
    schedule = PIPELINES.index(plan.schedule) if plan.pp > 1 and plan.schedule in PIPELINES else 0
    return away, plan.pp, plan.ep, plan.sp, plan.tp, stage, second, schedule
