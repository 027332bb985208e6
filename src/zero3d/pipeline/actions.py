"""A schedule's action list, and how long ranks wait in it. Pure arithmetic, no torch.

    kind  what                                     after
    ----  ---------------------------------------  -----------------------------------------------------
    F     forward of a chunk on a micro-batch      F of the chunk before it
    B     its whole backward                       F of the same, B (or I) of the chunk after it
    I, W  backward of inputs, of weights           I as B; W after its I

A rank runs its actions in order, each as soon as what it needs is done. The bubble is the time a rank waits
over the time it works: (p - 1) / m for gpipe and 1f1b, p pipeline stages and m micro-batches
(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zero3d.errors import ConfigError

_PRINTED = re.compile(r"(\d+)([FBIW])(\d+)")
COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward multiplies twice as much as a forward


class Action(NamedTuple):
    """One thing that a rank does: `kind` of `chunk` on `micro_batch`."""

    kind: str
    chunk: int
    micro_batch: int


def actions_of(plan: Iterable[object]) -> list[Action]:
    """Return a rank's actions in a plan of torch's schedules, whose entries print as 1F0: forward of chunk 1 on 0."""
    matches = (_PRINTED.fullmatch(str(entry)) for entry in plan if entry is not None)
    return [Action(match[2], int(match[1]), int(match[3])) for match in matches if match is not None]


class Interval(NamedTuple):
    """From when to when an action runs."""

    action: Action
    start: int
    end: int


def intervals(order: Mapping[int, Sequence[Action]], cost: Callable[[Action], int]) -> dict[int, list[Interval]]:
    """Return when every rank does what. Raises ConfigError for lists that wait in a ring.

    order   actions by rank
    cost    how long an action takes
    """
    last = max(action.chunk for actions in order.values() for action in actions)
    ends: dict[Action, int] = {}
    timeline: dict[int, list[Interval]] = {rank: [] for rank in order}
    left = sum(map(len, order.values()))
    while left:
        before = left
        for rank, actions in order.items():
            row = timeline[rank]
            while len(row) < len(actions):
                action = actions[len(row)]
                ready = _ready(action, last, ends)
                if ready is None:
                    break
                start = max(row[-1].end if row else 0, ready)
                ends[action] = start + cost(action)
                row.append(Interval(action, start, ends[action]))
                left -= 1
        if left == before:
            raise ConfigError("the schedule's ranks wait for each other: its action lists fit no order.")
    return timeline


def makespan(order: Mapping[int, Sequence[Action]], costs: Mapping[str, int] = COSTS) -> int:
    """Return when the last action ends. Raises ConfigError for lists that wait for each other."""
    timeline = intervals(order, lambda action: costs[action.kind])
    return max(interval.end for row in timeline.values() for interval in row)


def bubble(order: Mapping[int, Sequence[Action]], costs: Mapping[str, int] = COSTS) -> Fraction:
    """Return waiting over working time of the rank that works most."""
    work = max(sum(costs[action.kind] for action in actions) for actions in order.values())
    return Fraction(makespan(order, costs) - work, work)


def _ready(action: Action, last: int, ends: Mapping[Action, int]) -> int | None:
    """Return when all that an action needs has ended, None while that is not known."""
    kind, chunk, micro_batch = action
    if kind == "F":
        needed = [("F", chunk - 1)] if chunk else []
    elif kind == "W":
        needed = [("I", chunk)]
    else:
        needed = [("F", chunk)] + ([("BI", chunk + 1)] if chunk < last else [])
    known = [max(ends.get(Action(k, c, micro_batch), -1) for k in kinds) for kinds, c in needed]
    return None if any(end < 0 for end in known) else max(known, default=0)
