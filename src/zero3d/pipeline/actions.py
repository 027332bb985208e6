"""How long ranks of a pipeline wait, counted from a schedule's action list. Pure arithmetic, no torch.

    kind  what                                     after
    ----  ---------------------------------------  ---------------------------------------------------
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
    """What a rank does: `kind` of `chunk` on `micro_batch`."""

    kind: str
    chunk: int
    micro_batch: int


def actions_of(plan: Iterable[object]) -> list[Action]:
    """What a rank does in a plan of torch's schedules, whose entries print as 1F0: the forward of chunk 1 on 0."""
    found = (_PRINTED.fullmatch(str(each)) for each in plan if each is not None)
    return [Action(each[2], int(each[1]), int(each[3])) for each in found if each is not None]


class Interval(NamedTuple):
    """When a rank does it."""

    action: Action
    start: int
    end: int


def intervals(order: Mapping[int, Sequence[Action]], cost: Callable[[Action], int]) -> dict[int, list[Interval]]:
    """When every rank does what; `cost`: how long an action takes. Raises ConfigError for lists that wait in a ring."""
    last = max(action.chunk for actions in order.values() for action in actions)
    done: dict[Action, int] = {}
    found: dict[int, list[Interval]] = {rank: [] for rank in order}
    left = sum(map(len, order.values()))
    while left:
        before = left
        for rank, actions in order.items():
            mine = found[rank]
            while len(mine) < len(actions):
                action = actions[len(mine)]
                ready = _ready(action, last, done)
                if ready is None:
                    break
                start = max(mine[-1].end if mine else 0, ready)
                done[action] = start + cost(action)
                mine.append(Interval(action, start, done[action]))
                left -= 1
        if left == before:
            raise ConfigError("the schedule's ranks wait for each other: its action lists fit no order.")
    return found


def makespan(order: Mapping[int, Sequence[Action]], costs: Mapping[str, int] = COSTS) -> int:
    """When the last action ends. Raises ConfigError for lists that wait for each other."""
    found = intervals(order, lambda action: costs[action.kind])
    return max(each.end for mine in found.values() for each in mine)


def bubble(order: Mapping[int, Sequence[Action]], costs: Mapping[str, int] = COSTS) -> Fraction:
    """Waiting over working time of the rank that works most."""
    work = max(sum(costs[action.kind] for action in actions) for actions in order.values())
    return Fraction(makespan(order, costs) - work, work)


def _ready(action: Action, last: int, done: Mapping[Action, int]) -> int | None:
    """When an action may start, None while that is not known."""
    kind, chunk, micro_batch = action
    if kind == "F":
        needed = [("F", chunk - 1)] if chunk else []
    elif kind == "W":
        needed = [("I", chunk)]
    else:
        needed = [("F", chunk)] + ([("BI", chunk + 1)] if chunk < last else [])
    ends = [max(done.get(Action(k, p, micro_batch), -1) for k in kinds) for kinds, p in needed]
    return None if any(end < 0 for end in ends) else max(ends, default=0)
