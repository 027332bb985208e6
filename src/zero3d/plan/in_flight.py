"""The micro-batches that a pipeline rank has in flight when a backward begins. No torch.

    gpipe         F F F .. | B B B ..
    1f1b          p - 1 - s forwards on stage s of p, then F B in turn, then the backwards left
    interleaved   (v - 1) r + 2 (p - 1 - s) forwards of v chunks, r = M / rounds of each in a row; then as 1f1b
    zero-bubble   (v - 1) r + p - 1 - s forwards; then F I in turn, W as many behind I as the stage's number
    zbv           a V: 2 (p - s) - 1 forwards of its first chunk, then of both; W right behind I until forwards run out

As the schedules of torch.distributed.pipelining run them (torch 2.13). B is a whole backward, I that of inputs, W that
of weights: a micro-batch is in flight until B or W, and after I gradients wait for its W as well. A gradient that was
sent lives until something acknowledges it (pipeline/acknowledgements.py); in gpipe nothing does, in 1f1b the next B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from operator import le, mul
from typing import NamedTuple

from zero3d.pipeline.acknowledgements import Work, acknowledgements, work_of
from zero3d.pipeline.actions import Action
from zero3d.pipeline.schedules import Schedule
from zero3d.plan.spec import ParallelPlan

WHOLE, INPUTS, WEIGHTS = "B", "I", "W"
NEVER = Work(True, -1, -1)  # what no rank does


class Moment(NamedTuple):
    """The beginning of a backward.

    chunk      the one that runs
    kind       B, I or W
    in_flight  by chunk of the rank, in their order: micro-batches whose activations are kept, the running among them
    waiting    of these, the others that wait for their W
    under_way  gradients that may be on their way to another rank
    final      it is the chunk's last of this kind: gradients of a step are reduced in it
    """

    chunk: int
    kind: str
    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    under_way: int
    final: bool


def moments(plan: ParallelPlan, pp_stage: int) -> tuple[Moment, ...]:
    """Return the backwards of a step that may be the fullest: none has less of everything than another one alike."""
    if plan.pp == 1:
        return (Moment(0, WHOLE, (1,), (0,), 0, final=True),)
    return _moments(plan.schedule, plan.pp, _micro_batches_to_run(plan), pp_stage)


class Counted(NamedTuple):
    """The beginning of a backward as sums need it.

    turn     the place of its chunk among the rank's
    flights  of each chunk, micro-batches in flight that keep all, and those that wait for their W
    passed   hidden states and gradients of them, beside what they keep
    """

    moment: Moment
    turn: int
    flights: tuple[tuple[int, int], ...]
    passed: int


def counted(
    plan: ParallelPlan, pp_stage: int, states: tuple[int, ...], gradients: tuple[int, ...]
) -> tuple[Counted, ...]:
    """Count what is there at each of `moments`.

    states, gradients  by chunk of the rank, what a micro-batch in flight has beside what it keeps, and one that waits
    """
    if plan.pp == 1:
        return tuple(_count(moment, (0,), states, gradients) for moment in moments(plan, pp_stage))
    return _counted(plan.schedule, plan.pp, _micro_batches_to_run(plan), pp_stage, states, gradients)


@lru_cache(maxsize=4096)
def _counted(
    name: str, pp: int, count: int, stage: int, states: tuple[int, ...], gradients: tuple[int, ...]
) -> tuple[Counted, ...]:
    chunks = Schedule.of(name).chunks_of(stage, pp)
    return tuple(_count(moment, chunks, states, gradients) for moment in _moments(name, pp, count, stage))


def _count(moment: Moment, chunks: Sequence[int], states: Sequence[int], gradients: Sequence[int]) -> Counted:
    turn = chunks.index(moment.chunk)
    passed = len(chunks) - 1 + gradients[turn] + moment.under_way
    passed += sum(map(mul, moment.in_flight, states)) + sum(map(mul, moment.waiting, gradients))
    flights = tuple((i - w, w) for i, w in zip(moment.in_flight, moment.waiting, strict=True))
    return Counted(moment, turn, flights, passed)


def _micro_batches_to_run(plan: ParallelPlan) -> int:
    """Return the micro-batches after which a step repeats itself (sim/repeats.py)."""
    count, pp = plan.accumulate, plan.pp
    if plan.schedule == "1f1b":
        return min(count, pp + 2)
    if plan.schedule == "zbv" or (plan.schedule != "gpipe" and count % pp == 0):
        return min(count, 4 * pp)
    return count


@lru_cache(maxsize=4096)
def _moments(name: str, pp: int, count: int, stage: int) -> tuple[Moment, ...]:
    schedule = Schedule.of(name)
    chunks = schedule.chunks_of(stage, pp)
    under_way = _under_way(schedule, pp, count, stage)
    done: Counter[tuple[str, int]] = Counter()
    ends = WEIGHTS if schedule.splits_backward else WHOLE
    starts: dict[Moment, None] = {}
    turns = range(len(chunks))
    for action in actions_of_rank(name, pp, count, stage):
        kind, turn = action.kind, chunks.index(action.chunk)
        done[kind, turn] += 1
        if kind != "F":
            alive = tuple(done["F", i] - done[ends, i] + (kind == ends and i == turn) for i in turns)
            waits = tuple(done[INPUTS, i] - done[WEIGHTS, i] - (kind == INPUTS and i == turn) for i in turns)
            waits = waits if schedule.splits_backward else (0,) * len(chunks)
            final = done[kind, turn] == count
            starts[Moment(action.chunk, kind, alive, waits, under_way[action], final)] = None
    alike: dict[tuple[int, str, bool], list[Moment]] = {}
    for start in starts:
        alike.setdefault((start.chunk, start.kind, start.final), []).append(start)
    return tuple(moment for rivals in alike.values() for moment in _fullest(rivals))


def _fullest(rivals: Sequence[Moment]) -> list[Moment]:
    """Return the moments than which no other one has as much of everything, in their order.

    All are of one chunk and kind, and no two are equal: one that has less in all can only be below one with more.
    """
    had = {moment: (*moment.in_flight, *moment.waiting, moment.under_way) for moment in rivals}
    found: dict[Moment, tuple[int, ...]] = {}
    for moment, counts in sorted(had.items(), key=lambda item: -sum(item[1])):
        if not any(_no_more(counts, other) for other in found.values()):
            found[moment] = counts
    return [moment for moment in rivals if moment in found]


def _no_more(one: Sequence[int], other: Sequence[int]) -> bool:
    """Say whether one has no more of anything than the other."""
    return all(map(le, one, other))


def _under_way(schedule: Schedule, pp: int, count: int, stage: int) -> dict[Action, int]:
    """Return, by action of a rank, the gradients that may be on their way as it begins."""
    actions = actions_of_rank(schedule.name, pp, count, stage)
    owners = [schedule.rank_of(chunk, pp) for chunk in range(pp * schedule.chunks_per_rank)]
    near = {(stage - 1) % pp, (stage + 1) % pp} if schedule.chunks_per_rank > 1 else set()
    over = acknowledgements({rank: actions_of_rank(schedule.name, pp, count, rank) for rank in near}, stage, owners)
    under_way: Counter[Work] = Counter()
    by_action = {}
    for action in actions:
        work = work_of(action)
        if work is not None:
            del under_way[work]
        by_action[action] = under_way.total()
        if work is not None and work.backward and work.chunk > 0 and owners[work.chunk - 1] != stage:
            if schedule.name == "1f1b":  # torch forgets the one before
                under_way.clear()
            under_way[over.get(work, NEVER)] += 1
    return by_action


@lru_cache(maxsize=1024)
def actions_of_rank(name: str, pp: int, count: int, stage: int) -> tuple[Action, ...]:
    """Return the actions of a rank, in order."""
    schedule = Schedule.of(name)
    chunks = schedule.chunks_of(stage, pp)
    kinds = ("F", INPUTS, WEIGHTS) if schedule.splits_backward else ("F", WHOLE)
    left = {
        (kind, turn): iter([Action(kind, chunk, i) for i in range(count)])
        for kind in kinds
        for turn, chunk in enumerate(chunks)
    }
    order = _zbv(stage, pp, count) if schedule.in_a_v else _alternating(schedule, stage, pp, count)
    return tuple(action for which in order if (action := next(left[which], None)) is not None)


def _alternating(schedule: Schedule, stage: int, pp: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield (kind, which of the rank's chunks) of all schedules but zbv."""
    chunks = schedule.chunks_per_rank
    row, total, behind = count // max(1, count // pp), chunks * count, pp - 1 - stage
    ahead = {
        "gpipe": total,
        "1f1b": behind,
        "interleaved": (chunks - 1) * row + 2 * behind,
        "zero-bubble": (chunks - 1) * row + behind,
    }[schedule.name]
    ahead = min(ahead, total)
    forwards = [index // row % chunks for index in range(total)]
    backwards = [chunks - 1 - turn for turn in forwards]
    yield from (("F", turn) for turn in forwards[:ahead])
    for i, turn in enumerate(backwards):
        if ahead + i < total:
            yield "F", forwards[ahead + i]
        yield INPUTS if schedule.splits_backward else WHOLE, turn
        if schedule.splits_backward and i >= stage:
            yield WEIGHTS, backwards[i - stage]
    if schedule.splits_backward:
        yield from ((WEIGHTS, turn) for turn in backwards[max(0, total - stage) :])


def _zbv(stage: int, pp: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield the same of zbv, for `count` micro-batches or a few more."""
    left, number = pp - stage, max(2 * pp - 1, count)
    through = [(INPUTS, 1), (WEIGHTS, 1)]
    yield from [("F", 0)] * (2 * left - 1)
    yield from [("F", 1), ("F", 0)] * stage
    yield from [("F", 1), *through] * left
    first, second = 2 * left - 1 + stage, stage + left
    while second < first or first < number:
        if first < number:
            yield "F", 0
            first += 1
        yield from [(INPUTS, 0), (WEIGHTS, 0), ("F", 1), *through]
        second += 1
    yield from [(INPUTS, 0), (INPUTS, 1)] * stage
    yield from [(INPUTS, 0), (WEIGHTS, 0)] * left
    yield from [(WEIGHTS, 1)] * stage
    yield from [(WEIGHTS, 0)] * stage
