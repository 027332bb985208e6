"""How long ranks of a pipeline wait, counted from a schedule's action list. Pure arithmetic, no torch.

    kind  what                                     after
    ----  ---------------------------------------  ---------------------------------------------------
    F     forward of a part on a micro-batch       F of the part before it
    B     its whole backward                       F of the same, B (or I) of the part after it
    I, W  backward of inputs, of weights           I as B; W after its I

A rank runs its actions in order, each as soon as what it needs is done. The bubble is the time a rank waits
over the time it works: (p - 1) / m for gpipe and 1f1b, p pipeline stages and m micro-batches
(Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU Clusters", section 2.2).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zero3d.errors import ConfigError

COSTS = {"F": 1, "B": 2, "I": 1, "W": 1}  # a backward multiplies twice as much as a forward


class Action(NamedTuple):
    """What a rank does: `kind` of `part` on `micro_batch`."""

    kind: str
    part: int
    micro_batch: int


def makespan(order: Mapping[int, Sequence[Action]], costs: Mapping[str, int] = COSTS) -> int:
    """When the last action ends. Raises ConfigError for lists that wait for each other."""
    last = max(action.part for actions in order.values() for action in actions)
    done: dict[Action, int] = {}
    clock, position = dict.fromkeys(order, 0), dict.fromkeys(order, 0)
    left = sum(map(len, order.values()))
    while left:
        before = left
        for rank, actions in order.items():
            while position[rank] < len(actions):
                action = actions[position[rank]]
                ready = _ready(action, last, done)
                if ready is None:
                    break
                clock[rank] = done[action] = max(clock[rank], ready) + costs[action.kind]
                position[rank] += 1
                left -= 1
        if left == before:
            raise ConfigError("the schedule's ranks wait for each other: its action lists fit no order.")
    return max(clock.values())


def bubble(order: Mapping[int, Sequence[Action]], costs: Mapping[str, int] = COSTS) -> Fraction:
    """Waiting over working time of the rank that works most."""
    work = max(sum(costs[action.kind] for action in actions) for actions in order.values())
    return Fraction(makespan(order, costs) - work, work)


def _ready(action: Action, last: int, done: Mapping[Action, int]) -> int | None:
    """When an action may start, None while that is not known."""
    kind, part, micro_batch = action
    if kind == "F":
        needed = [("F", part - 1)] if part else []
    elif kind == "W":
        needed = [("I", part)]
    else:
        needed = [("F", part)] + ([("BI", part + 1)] if part < last else [])
    ends = [max(done.get(Action(k, p, micro_batch), -1) for k in kinds) for kinds, p in needed]
    return None if any(end < 0 for end in ends) else max(ends, default=0)
