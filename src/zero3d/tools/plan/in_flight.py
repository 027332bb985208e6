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
from itertools import groupby, takewhile
from operator import le, mul
from typing import NamedTuple

from zero3d.pipeline.acknowledgements import BACKWARDS, Work, acknowledgements
from zero3d.pipeline.actions import Action
from zero3d.pipeline.schedules import Schedule
from zero3d.tools.plan.spec import ParallelPlan

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
    come       by chunk: gradients of the step have come in an earlier backward; of whole ones, in any chunk
    """

    chunk: int
    kind: str
    in_flight: tuple[int, ...]
    waiting: tuple[int, ...]
    under_way: int
    final: bool
    come: tuple[bool, ...]


def moments(plan: ParallelPlan, pp_stage: int) -> tuple[Moment, ...]:
    """Return the backwards of a step that may be the fullest: none has less of everything than another one alike."""
    if plan.pp == 1:
        return (_alone(plan),)
    return _moments(plan.schedule, plan.pp, micro_batches_to_run(plan), pp_stage)


def _alone(plan: ParallelPlan) -> Moment:
    """Return the fullest moment without a pipeline: a step's last backward."""
    return Moment(0, WHOLE, (1,), (0,), 0, final=True, come=(plan.accumulate > 1,))


class Start(NamedTuple):
    """A moment of one of several ranks.

    number   its place among all of theirs
    flights  of each chunk, micro-batches in flight that keep all, and those that wait for their W
    """

    moment: Moment
    stage: int
    number: int
    flights: tuple[tuple[int, int], ...]


class Group(NamedTuple):
    """Moments that differ in the chunks which their micro-batches in flight are of.

    whole    micro-batches in flight that keep all, of all chunks together; waiting: those that wait for their W
    passed   hidden states and gradients of them, beside what they keep
    """

    whole: int
    waiting: int
    passed: int
    starts: list[Start]


class Rivals(NamedTuple):
    """All moments of one kind, of chunks that have one place among their ranks'.

    turn  that place
    most  what no group has more of, each by itself: whole and waiting together, waiting, passed
    """

    turn: int
    kind: str
    final: bool
    come: tuple[bool, ...]
    groups: list[Group]
    most: tuple[int, int, int]


def rivals(
    plan: ParallelPlan, stages: tuple[int, ...], states: tuple[int, ...], gradients: tuple[int, ...]
) -> list[Rivals]:
    """Return the `moments` of ranks, those of one kind together.

    states, gradients  by chunk of a rank, what a micro-batch in flight has beside what it keeps, and one that waits
    """
    if plan.pp == 1:
        start = Start(_alone(plan), 0, 0, ((1, 0),))
        passed = gradients[0] + states[0]
        return [Rivals(0, WHOLE, True, start.moment.come, [Group(1, 0, passed, [start])], (1, 0, passed))]
    return _rivals(plan.schedule, plan.pp, micro_batches_to_run(plan), stages, states, gradients)


@lru_cache(maxsize=4096)
def _rivals(
    name: str, pp: int, count: int, stages: tuple[int, ...], states: tuple[int, ...], gradients: tuple[int, ...]
) -> list[Rivals]:
    found: dict[tuple[int, str, bool, tuple[bool, ...]], dict[tuple[int, int, int], list[Start]]] = {}
    number = 0
    for stage in stages:
        turns = {chunk: turn for turn, chunk in enumerate(Schedule.of(name).chunks_of(stage, pp))}
        for moment in _moments(name, pp, count, stage):
            turn, waiting = turns[moment.chunk], sum(moment.waiting)
            passed = len(turns) - 1 + gradients[turn] + moment.under_way
            passed += sum(map(mul, moment.in_flight, states)) + sum(map(mul, moment.waiting, gradients))
            flights = tuple([(i - w, w) for i, w in zip(moment.in_flight, moment.waiting, strict=True)])
            groups = found.setdefault((turn, moment.kind, moment.final, moment.come), {})
            alike = groups.setdefault((sum(moment.in_flight) - waiting, waiting, passed), [])
            alike.append(Start(moment, stage, number, flights))
            number += 1
    return [
        Rivals(
            *kind,
            [Group(*counts, starts) for counts, starts in groups.items()],
            (max(w + h for w, h, _ in groups), max(h for _, h, _ in groups), max(passed for _, _, passed in groups)),
        )
        for kind, groups in found.items()
    ]


def micro_batches_to_run(plan: ParallelPlan) -> int:
    """Return the micro-batches after which a step repeats itself (tools/sim/repeats.py)."""
    count, pp = plan.accumulate, plan.pp
    if plan.schedule == "1f1b":
        return min(count, pp + 2)
    if plan.schedule == "zbv" or (plan.schedule != "gpipe" and count % pp == 0):
        return min(count, 4 * pp)
    return count


def first_in_flight(plan: ParallelPlan, pp_stage: int) -> tuple[int, ...]:
    """Count, by chunk of the rank, the micro-batches in flight as its first backward begins."""
    return (1,) if plan.pp == 1 else _first_in_flight(plan.schedule, plan.pp, micro_batches_to_run(plan), pp_stage)


@lru_cache(maxsize=4096)
def _first_in_flight(name: str, pp: int, count: int, stage: int) -> tuple[int, ...]:
    schedule = Schedule.of(name)
    forwards = Counter(turn for _, turn in takewhile(lambda each: each[0] == "F", _order(schedule, stage, pp, count)))
    return tuple(min(count, forwards[turn]) for turn in range(schedule.chunks_per_rank))


_Counts = tuple[tuple[int, ...], tuple[int, ...], int, tuple[bool, ...]]  # in flight, waiting, under way, come


@lru_cache(maxsize=4096)
def _moments(name: str, pp: int, count: int, stage: int) -> tuple[Moment, ...]:
    schedule = Schedule.of(name)
    turns = {chunk: turn for turn, chunk in enumerate(schedule.chunks_of(stage, pp))}
    ends = WEIGHTS if schedule.splits_backward else WHOLE
    alive, waiting = [0] * len(turns), [0] * len(turns)
    left = dict.fromkeys(((kind, chunk) for kind in (WHOLE, INPUTS, WEIGHTS) for chunk in turns), count)
    come = (False,) * len(turns)
    alike: dict[tuple[str, int, bool], dict[_Counts, None]] = {}
    under_way = _under_way(schedule, pp, count, stage)
    for (kind, chunk, _), sent in zip(actions_of_rank(name, pp, count, stage), under_way, strict=True):
        turn = turns[chunk]
        if kind == "F":
            alive[turn] += 1
            continue
        left[kind, chunk] -= 1
        waiting[turn] -= kind == WEIGHTS
        final = left[kind, chunk] == 0
        alike.setdefault((kind, chunk, final), {})[tuple(alive), tuple(waiting), sent, come] = None
        waiting[turn] += kind == INPUTS
        alive[turn] -= kind == ends
        if kind == ends and not come[turn]:
            come = tuple([there or kind == WHOLE or each == turn for each, there in enumerate(come)])
    return tuple(
        Moment(chunk, kind, in_flight, waits, sent, final, come)
        for (kind, chunk, final), found in alike.items()
        for in_flight, waits, sent, come in _fullest(list(found))
    )


def _fullest(rivals: Sequence[_Counts]) -> list[_Counts]:
    """Return the counts of moments than which no other one has as much of everything, in their order.

    All are of one chunk and kind, and no two are equal: only one with more in all can have as much of everything.
    """
    flat = [(*alive, *waiting, sent, *come) for alive, waiting, sent, come in rivals]
    found: list[int] = []
    by_sum = sorted(range(len(flat)), key=lambda number: -sum(flat[number]))
    for _, alike in groupby(by_sum, key=lambda number: sum(flat[number])):
        found += [number for number in alike if not any(all(map(le, flat[number], flat[more])) for more in found)]
    return [rivals[number] for number in sorted(found)]


def _under_way(schedule: Schedule, pp: int, count: int, stage: int) -> list[int]:
    """Return, of each action of a rank, the gradients that may be on their way as it begins."""
    owners = _owners(schedule.name, pp)
    near = {(stage - 1) % pp, (stage + 1) % pp} if schedule.chunks_per_rank > 1 else set()
    over = acknowledgements({rank: actions_of_rank(schedule.name, pp, count, rank) for rank in near}, stage, owners)
    forgets = schedule.name == "1f1b"  # torch the one before
    sent: dict[tuple[bool, int, int], int] = {}  # by the work that acknowledges them
    under_way, all_sent = [], 0
    for kind, chunk, micro_batch in actions_of_rank(schedule.name, pp, count, stage):
        if kind != WEIGHTS:
            all_sent -= sent.pop((kind != "F", chunk, micro_batch), 0)
        under_way.append(all_sent)
        if kind in BACKWARDS and chunk > 0 and owners[chunk - 1] != stage:
            if forgets:
                sent, all_sent = {}, 0
            work = over.get(Work(True, chunk, micro_batch), NEVER)
            sent[work] = sent.get(work, 0) + 1
            all_sent += 1
    return under_way


@lru_cache(maxsize=256)
def _owners(name: str, pp: int) -> list[int]:
    """Return the rank of every chunk."""
    by_chunk = {chunk: rank for rank in range(pp) for chunk in Schedule.of(name).chunks_of(rank, pp)}
    return [by_chunk[chunk] for chunk in sorted(by_chunk)]


@lru_cache(maxsize=1024)
def actions_of_rank(name: str, pp: int, count: int, stage: int) -> tuple[Action, ...]:
    """Return the actions of a rank, in order."""
    schedule = Schedule.of(name)
    chunks, done = schedule.chunks_of(stage, pp), Counter[tuple[str, int]]()
    actions = []
    for which in _order(schedule, stage, pp, count):
        if done[which] < count:
            actions.append(Action(which[0], chunks[which[1]], done[which]))
            done[which] += 1
    return tuple(actions)


def _order(schedule: Schedule, stage: int, pp: int, count: int) -> Iterator[tuple[str, int]]:
    """Yield (kind, which of the rank's chunks), perhaps for a few micro-batches more."""
    return _zbv(stage, pp, count) if schedule.in_a_v else _alternating(schedule, stage, pp, count)


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
