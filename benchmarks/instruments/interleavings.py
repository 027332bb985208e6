"""Tries every order in which the hosts of ranks and what they ask for can come, depth first, and says where it stops.

The state is what `rendezvous` knows; the steps are its own: a host passes an item, an operation begins, what has begun
on a communicator meets. Two steps that neither enable nor prevent each other lead to the same place in either order,
and most are so: a host's step, a meeting and, where there is room for all, a beginning stay possible whatever else is
done, and prevent nothing. One such step stands for all (a persistent set of one), so only what competes for room is
tried in every order. `reduced=False` tries each step everywhere: it ends in the same places, and shows so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from instruments.groups import Logs
from instruments.rendezvous import PLAIN, Entry, Machine, Replay, State

MOST = 2_000_000  # states


class Found(NamedTuple):
    """What a search found.

    states  different ones that it came to
    ends    from which nothing leads on, by what tells them apart
    faults  what does not fit, in words; with who waits for whom where an end is not that of all programs
    cycle   the first end's that is none, a line for each that waits
    """

    states: int
    ends: frozenset[Any]
    faults: list[str]
    cycle: list[str]


def explore(logs: Logs, machine: Machine = PLAIN, reduced: bool = True, most: int = MOST) -> Found:
    """Come to every state that ranks with these logs can be in. Raises RuntimeError beyond so many states."""
    replay = Replay(logs, machine)
    first = replay.begin()
    seen, ends, left, cycle = {first.known}, set(), [first], []
    while left:
        state = left.pop()
        following = list(_following(replay, state, reduced))
        if not following:
            ends.add(state.known)
            if not cycle and replay.waiting(state):
                cycle = replay.cycle(state)
                replay.faults.append(f"waits for ever: {replay.waiting(state)[0]}")
        for later in following:
            if later.known not in seen:
                seen.add(later.known)
                left.append(later)
        if len(seen) > most:
            raise RuntimeError(f"more than {most} states")
    return Found(len(seen), frozenset(ends), replay.faults, cycle)


def _following(replay: Replay, state: State, reduced: bool) -> Iterator[State]:
    """Yield the states that follow; of steps that prevent nothing, only one if `reduced`."""
    for step in _certain(replay):
        later = state.copy()
        if step(later):
            yield later
            if reduced:
                return
    for entry in _ready(replay, state):
        later = state.copy()
        replay.step_begin(later, entry)
        yield later
        if reduced and replay.machine.resident is None:
            return


def _certain(replay: Replay) -> Iterator[Callable[[State], bool]]:
    """Yield steps that stay possible once they are, and prevent none."""
    for rank in range(len(replay.programs)):
        yield lambda state, rank=rank: replay.step_host(state, rank)
    for key in replay.keys:
        yield lambda state, key=key: replay.step_meet(state, key)


def _ready(replay: Replay, state: State) -> Iterator[Entry]:
    for key in replay.keys:
        for rank in key[1]:
            entry = replay.head(state, key, rank)
            if entry is not None and replay.may_begin(state, entry):
                yield entry
