"""How many micro-batches a pipeline rank has run forward and not yet backward, at its fullest. No torch.

    gpipe         M
    1f1b          p - s of stage s, at most M                      one part
    interleaved   the first (v-1) r + 2 (p-1-s) + 1 forwards       v parts, r = M / rounds of each in a row
    zero-bubble   the first (v-1) r + (p-1-s) + 1, and p-1-s       whose weights' gradients wait
    zbv           2 (p-s) - 1 + s of the first part, s + 1 of the second

As the schedules of torch.distributed.pipelining run them (torch 2.13). Source of 1f1b's figure: Narayanan et al.
(2021), section 2.2.
"""

from __future__ import annotations

from collections import Counter

from zero3d.plan.spec import ParallelPlan
from zero3d.schedules import Schedule


def in_flight(plan: ParallelPlan, pp_stage: int) -> dict[int, int]:
    """Micro-batches whose activations a rank keeps, by pipeline part."""
    if plan.pp == 1:
        return {0: 1}
    schedule = Schedule.of(plan.schedule)
    parts, count, behind = schedule.parts_of(pp_stage, plan.pp), plan.accumulate, plan.pp - 1 - pp_stage
    if schedule.name == "gpipe":
        return dict.fromkeys(parts, count)
    if schedule.name == "1f1b":
        return {parts[0]: min(count, behind + 1)}
    if schedule.in_a_v:
        return {parts[0]: min(count, 2 * behind + 1 + pp_stage), parts[1]: min(count, pp_stage + 1)}
    row = count // max(1, count // plan.pp)
    first = min((len(parts) - 1) * row + 2 * behind + 1, len(parts) * count)  # zero-bubble: half of them wait for W
    seen = Counter((index // row) % len(parts) for index in range(first))
    return {part: min(count, seen[turn]) for turn, part in enumerate(parts)}
