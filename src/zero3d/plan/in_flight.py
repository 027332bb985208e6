"""How many micro-batches a pipeline rank has run forward and not yet backward, at its fullest. No torch.

    gpipe         M
    1f1b          p - s of stage s, at most M                      one part
    interleaved   the first (v-1) r + 2 (p-1-s) + 1 forwards       v parts, r = M / rounds of each in a row
    zero-bubble   M of each part: what weights' gradients need is kept until they are taken, and in dry runs nearly
    zbv           all of a step's were waiting at the peak

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
    if schedule.name == "gpipe" or schedule.splits_backward:
        return dict.fromkeys(parts, count)
    if schedule.name == "1f1b":
        return {parts[0]: min(count, behind + 1)}
    row = count // max(1, count // plan.pp)
    first = min((len(parts) - 1) * row + 2 * behind + 1, len(parts) * count)
    seen = Counter((index // row) % len(parts) for index in range(first))
    return {part: min(count, seen[turn]) for turn, part in enumerate(parts)}
