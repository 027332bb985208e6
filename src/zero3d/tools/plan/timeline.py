"""When a pipeline's step ends: an event simulation of its schedule, and closed forms for large ones.

    gpipe        F F F F . . . B B B B         all forwards, then all backwards
    1f1b         F F F B F B F B B B           p - 1 - rank warm-up forwards, then one of each
    interleaved  as 1f1b over v chunks per rank, in rounds of p micro-batches (Narayanan et al. 2021, section 2.2)

Bubble over ideal time: (p - 1)/m, interleaved (p - 1)/(v m). Split backwards (zero-bubble, zbv) fill the bubble with
weight gradients: a third of a chunk's forward and backward is left of each wait, zbv none (Qi et al. 2023, table 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from zero3d.tools.plan.constants import constant

SIMULATED = 2048  # actions above which the closed form is taken: it differs by less than 3 % there
SPLIT = {"zero-bubble": constant("schedules", "zero-bubble"), "zbv": constant("schedules", "zbv")}  # of the bubble

Event = tuple[str, int, int]  # F or B, the chunk, the micro-batch


def order(schedule: str, rank: int, ranks: int, micro_batches: int, virtual: int = 1) -> tuple[Event, ...]:
    """Return a rank's actions in order: `virtual` chunks v x ranks + rank each; interleaved: m in whole rounds."""
    total = micro_batches * virtual
    forwards = [_event("F", i, rank, ranks, virtual) for i in range(total)]
    backwards = [_event("B", i, rank, ranks, virtual) for i in range(total)]
    if schedule == "gpipe":
        return (*forwards, *backwards)
    warm = ranks - rank - 1 if virtual == 1 else 2 * (ranks - rank - 1) + (virtual - 1) * ranks
    warm = min(total, warm)
    steady = [event for i in range(total - warm) for event in (forwards[warm + i], backwards[i])]
    return (*forwards[:warm], *steady, *backwards[total - warm :])


def _event(kind: str, i: int, rank: int, ranks: int, virtual: int) -> Event:
    if virtual == 1:
        return kind, rank, i
    within, group = i % (ranks * virtual), i // (ranks * virtual)
    chunk = within // ranks
    chunk = chunk if kind == "F" else virtual - 1 - chunk
    return kind, chunk * ranks + rank, group * ranks + within % ranks


class _Turn(NamedTuple):
    """An action as a row and a column of the table of ends, and the row that must be there before it.

    row     chunk c's forwards in row c, its backwards in row chunks + c
    before  2 x chunks, where all ends are 0, for the first chunk's forward and the last one's backward
    """

    row: int
    micro_batch: int
    before: int


def simulate(
    orders: Sequence[Sequence[Event]], forward: Sequence[float], backward: Sequence[float], hop: float = 0.0
) -> float:
    """Return the seconds until the last action ends; forward and backward per chunk, `hop` between two chunks."""
    return _play([_steps(actions, len(forward)) for actions in orders], forward, backward, hop)


def _steps(actions: Sequence[Event], chunks: int) -> tuple[_Turn, ...]:
    rows = {("F", chunk): (chunk, chunk - 1 if chunk else 2 * chunks) for chunk in range(chunks)}
    rows |= {("B", chunk): (chunks + chunk, chunks + chunk + 1) for chunk in range(chunks)}
    return tuple(_Turn((row := rows[kind, chunk])[0], i, row[1]) for kind, chunk, i in actions)


@lru_cache(maxsize=256)
def _steps_of(schedule: str, ranks: int, micro_batches: int, virtual: int) -> list[tuple[_Turn, ...]]:
    """Return the steps of all ranks of a schedule."""
    orders = (order(schedule, rank, ranks, micro_batches, virtual) for rank in range(ranks))
    return [_steps(actions, ranks * virtual) for actions in orders]


def _play(steps: Sequence[Sequence[_Turn]], forward: Sequence[float], backward: Sequence[float], hop: float) -> float:
    micro_batches = 1 + max(turn.micro_batch for turn in steps[0])
    ends = [[-1.0] * micro_batches for _ in (*forward, *backward)] + [[0.0] * micro_batches]
    seconds = [*forward, *backward]
    clock, position = [0.0] * len(steps), [0] * len(steps)
    active = list(range(len(steps)))
    while active:
        for rank in active:
            own, now, at = steps[rank], clock[rank], position[rank]
            for row, i, before in own[at:]:
                ready = ends[before][i]
                if ready < 0:
                    break
                if ready > 0 and ready + hop > now:
                    now = ready + hop
                now += seconds[row]
                ends[row][i] = now
                at += 1
            position[rank], clock[rank] = at, now
        active = [rank for rank in active if position[rank] < len(steps[rank])]
    return max(clock)


def pipeline_seconds(
    schedule: str, forward: Sequence[float], backward: Sequence[float], micro_batches: int, ranks: int, hop: float = 0.0
) -> float:
    """Time a step's forwards and backwards over `ranks` ranks; one entry of forward and backward per chunk."""
    virtual = len(forward) // ranks
    uneven = virtual > 1 and micro_batches % ranks
    if schedule not in SPLIT and not uneven and 2 * len(forward) * micro_batches <= SIMULATED:
        return _play(_steps_of(schedule, ranks, micro_batches, virtual), forward, backward, hop)
    return closed_form(schedule, forward, backward, micro_batches, ranks, hop)


def closed_form(
    schedule: str, forward: Sequence[float], backward: Sequence[float], micro_batches: int, ranks: int, hop: float = 0.0
) -> float:
    """Sum one micro-batch's way there and back, and the period of all others.

    period  the slowest rank's work; under 1f1b also any r last ranks', which have r micro-batches in flight:
            the mean of their work and of 2 (r - 1) hops
    """
    both = [f + b for f, b in zip(forward, backward, strict=True)]
    work = [sum(both[rank::ranks]) for rank in range(ranks)]
    virtual = len(both) // ranks
    waits = (sum(work) - max(work)) / virtual * SPLIT.get(schedule, 1.0) + 2 * (ranks - 1) * virtual * hop
    period = max(work)
    if schedule == "1f1b":
        tails = accumulate(reversed(work))
        period = max(period, *((tail + 2 * i * hop) / (i + 1) for i, tail in enumerate(tails)))
    return max(work) + waits + (micro_batches - 1) * period
