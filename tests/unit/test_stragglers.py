"""Slow ranks found in drawn and in recorded series of what each rank takes of its own; what ranks tell each other."""

import json
import math
import random
from pathlib import Path
from statistics import median

import numpy
import pytest

from zero3d.train.stragglers import (
    ENOUGH,
    KEPT,
    KINDS,
    LEAST,
    OwnTimes,
    Slow,
    Stragglers,
    Window,
    medians_without,
    of_history,
    steps_told,
)
from zero3d.zero.step_parts import OwnStep

RANKS, EVERY = 64, 10
NOISE, LASTING = 0.02, 0.003  # of a step, drawn anew in each step; of a rank, in all of them
PAUSE = 0.01, 0.5  # how often a rank pauses, and for how long
RECORDED = Path(__file__).parents[1] / "own_seconds.json"


def windows(totals, saves=None):
    """What ranks tell of steps that only compute. totals: by rank, of each step; saves: seconds of each rank's."""
    saved = saves or [0.0] * len(totals)
    return [
        Window(
            each,
            {"compute": sum(each) / len(each), "data": 0.0, "save": save / len(each), "host": 0.0},
            len(each),
            float(saves is not None),
            math.nan,
        )
        for each, save in zip(totals, saved, strict=True)
    ]


def drawn(seed, ranks=RANKS, steps=100, slow=None, by=0.0, noise=NOISE):
    """Messages of a drawn run: noise, lasting differences, pauses, a batch's length that all ranks share."""
    draw = random.Random(seed)
    lasting = [1 + draw.gauss(0, LASTING) + by * (rank == slow) for rank in range(ranks)]
    for _ in range(0, steps, EVERY):
        totals = [[] for _ in range(ranks)]
        for _ in range(EVERY):
            common = 1 + 0.1 * draw.random()
            for rank, own in enumerate(lasting):
                pause = PAUSE[1] * (draw.random() < PAUSE[0])
                totals[rank].append(common * (own * (1 + draw.gauss(0, noise)) + pause))
        yield windows(totals)


def found(messages, stages):
    """After how many messages who is told of."""
    stragglers = Stragglers(stages)
    heard = ((number, stragglers.hear(each)) for number, each in enumerate(messages, 1))
    return [(number, slow) for number, slow in heard if slow is not None]


def false_alarms(series, **options):
    return sum(bool(found(drawn(seed, **options), [0] * RANKS)) for seed in range(series))


def first_found(series, by=0.05):
    """How often the slow rank, and no other, is told of within 20 steps."""
    times = 0
    for seed in range(series):
        told = found(drawn(seed, steps=20, slow=seed % RANKS, by=by), [0] * RANKS)
        times += bool(told) and {slow.rank for _, slow in told} == {seed % RANKS}
    return times


@pytest.mark.long
def test_of_a_thousand_drawn_runs_at_most_one_is_told_of_wrongly():
    assert false_alarms(1000) <= 1


@pytest.mark.long
def test_a_rank_that_becomes_slow_is_found_within_twenty_steps_too():
    times = 0
    for seed in range(200):
        before, after = drawn(seed, steps=100), drawn(seed + 1000, steps=20, slow=seed % RANKS, by=0.1)
        told = found([*before, *after], [0] * RANKS)
        times += {slow.rank for _, slow in told} == {seed % RANKS}
    assert times >= 190


def lasting(seed, ranks, steps=100, last=0.9):
    """Messages of ranks whose noise lasts from step to step: an AR(1) series of the same scatter."""
    draw, noise = random.Random(seed), [0.0] * ranks
    for _ in range(0, steps, EVERY):
        totals = [[] for _ in range(ranks)]
        for _ in range(EVERY):
            noise = [last * each + draw.gauss(0, NOISE) * math.sqrt(1 - last * last) for each in noise]
            for rank in range(ranks):
                totals[rank].append(1 + noise[rank])
        yield windows(totals)


def test_noise_that_lasts_from_step_to_step_is_no_alarm():
    assert sum(bool(found(lasting(seed, RANKS), [0] * RANKS)) for seed in range(10)) == 0
    assert sum(bool(found(lasting(seed, 2), [0, 0])) for seed in range(40)) <= 2


@pytest.mark.long
def test_five_percent_are_found_within_twenty_steps_in_99_of_100_drawn_runs():
    assert first_found(1000) >= 990


@pytest.mark.parametrize(("which", "told"), [("alike", set()), ("slow", {(1, "compute")})])
def test_recorded_runs_of_two_ranks_on_a_busy_machine(which, told):
    series = json.loads(RECORDED.read_text())[which]
    rows = [[[math.nan if value is None else value for value in row] for row in message] for message in series]
    heard = found([[Window.of_numbers(row) for row in message] for message in rows], [0, 0])
    assert {(slow.rank, slow.part) for _, slow in heard} == told
    if told:
        assert heard[0][0] == 3  # as soon as there are twenty steps of them
        assert all(0.15 < slow.over < 0.25 for _, slow in heard)


def test_drawn_runs_a_few_of_them():
    assert false_alarms(10) == 0
    assert first_found(20) >= 19


@pytest.mark.parametrize("stages", [[0, 0], [0] * 3 + [1] * 3])
def test_few_ranks_and_much_noise_are_no_alarm(stages):
    for seed in range(20):
        assert found(drawn(seed, ranks=len(stages), noise=0.1), stages) == []


def test_a_stage_that_computes_more_than_another_is_no_straggler_and_a_rank_of_it_is():
    stages = [0, 0, 0, 1, 1, 1]
    work = [1.0, 1.0, 1.0, 1.5, 1.5, 1.5]

    def message(slow):
        return windows([[each * (1 + 0.1 * (rank == slow))] * EVERY for rank, each in enumerate(work)])

    assert found([message(None)] * 5, stages) == []
    number, slow = found([message(4)] * 5, stages)[0]
    assert (number, slow.rank, slow.times, slow.of) == (2, 4, 20, 20)
    assert slow.over == pytest.approx(0.1)
    assert slow.seconds["compute"] == pytest.approx(0.15)
    assert found([message(4)] * 5, range(6)) == []  # nobody does alike


def test_it_is_told_of_as_long_as_it_lasts_and_no_longer():
    slow, fine = windows([[1.0] * EVERY, [1.2] * EVERY]), windows([[1.0] * EVERY] * 2)
    told = found([slow] * 4 + [fine] * 10, [0, 0])
    assert [number for number, _ in told] == [2, 3, 4, 5]  # most of the steps that are looked at
    assert (told[2][1].times, told[2][1].of) == (40, 40)
    assert (told[3][1].times, told[3][1].of) == (40, KEPT)
    assert found([fine] * 5 + [slow], [0, 0]) == []
    begun = found([fine] * 20 + [slow] * 4, [0, 0])
    assert [(number, slow.times, slow.of) for number, slow in begun][:1] == [(22, 20, 20)]  # of the last twenty


def test_what_is_too_little_is_not_told_of():
    assert found([windows([[1.0] * EVERY, [1 + 0.9 * LEAST] * EVERY])] * 5, [0, 0]) == []
    assert found([windows([[1e-3] * EVERY, [1.5e-3] * EVERY])] * 5, [0, 0]) == []  # half a millisecond
    assert found([windows([[1.0] * (ENOUGH - 1), [2.0] * (ENOUGH - 1)])], [0, 0]) == []


def test_a_message_with_a_step_that_a_rank_has_not_is_heard_without_it():
    stragglers = Stragglers([0, 0])
    for _ in range(3):
        slow = stragglers.hear(windows([[math.nan, *[1.0] * 9], [math.nan, *[1.1] * 9]]))
    assert (slow.rank, slow.of) == (1, 27)


def test_saves_are_judged_by_what_they_take_of_all_steps():
    steps = [[1.0] * EVERY] * 3
    told = found([windows(steps, [0.1, 0.1, 0.6])] * 6, [0] * 3)
    assert [number for number, _ in told] == [6]  # of five saves: nobody knows what was before the first
    slow = told[-1][1]
    assert (slow.rank, slow.part, slow.times, slow.of) == (2, "save", 5, 5)
    assert slow.over == pytest.approx(0.05)  # half a second of ten
    assert found([windows(steps, [0.1, 0.1, 0.3])] * 6, [0] * 3) == []
    often = [windows(steps, [0.1, 0.1, 0.6]), windows(steps, [0.1, 0.1, 0.1])]
    assert found(often * 4, [0] * 3) == []  # every other one


def test_saves_are_judged_by_what_they_take_of_all_steps_since_the_save_before():
    steps = [[1.0] * EVERY] * 2

    def run(seconds, every=10):
        for number in range(1, 8 * every + 1):
            yield windows(steps, [0.5, 0.5 + seconds]) if number % every == 0 else windows(steps)

    assert found(run(2.0), [0, 0]) == []  # two seconds of a hundred
    told = found(run(5.0), [0, 0])
    assert [number for number, _ in told][:2] == [60, 61]  # it stands until other saves say otherwise
    assert told[-1][1].over == pytest.approx(0.05)
    assert told[-1][1].seconds["save"] == pytest.approx(0.05)


def test_saves_that_scatter_are_no_alarm():
    """A disk that takes longer now for one rank and now for another, by much of a step."""
    alarms = 0
    for seed in range(200):
        draw = random.Random(seed)
        messages = [windows([[0.1] * EVERY] * 2, [draw.expovariate(5.0), draw.expovariate(5.0)]) for _ in range(20)]
        alarms += bool(found(messages, [0, 0]))
    assert alarms <= 2


def test_noise_that_is_usual_among_ranks_is_no_slowness_of_one_that_has_none():
    def step(number):
        return [1.1 if (rank + number) % 2 else 0.9 for rank in range(8)] + [1.04]

    totals = [*zip(*map(step, range(EVERY)), strict=True)]
    assert found([windows(totals)] * 5, [0] * 9) == []


def test_one_late_save_of_another_rank_hides_none_that_is_late_in_all():
    steps = [[1.0] * EVERY] * 4
    told = found([windows(steps, [0.1, 0.1, 0.1, 0.6])] * 6 + [windows(steps, [0.1, 0.1, 2.0, 0.6])], [0] * 4)
    assert [(number, slow.rank) for number, slow in told] == [(6, 3), (7, 3)]


def test_of_two_slow_ranks_the_one_that_takes_more_is_told_of():
    steps = [[1.0] * EVERY, [1.2] * EVERY, [1.0] * EVERY, [1.0] * EVERY]
    told = found([windows(steps, [0.1, 0.1, 0.6, 0.1])] * 7, [0] * 4)
    assert {slow.rank for _, slow in told} == {1}


def test_the_part_is_that_of_the_last_steps():
    def message(**late):
        own = {"compute": 1.0, "data": 0.0, "save": 0.0, "host": 0.0}
        each = own, {kind: value + late.get(kind, 0.0) for kind, value in own.items()}
        return [Window([sum(rank.values())] * EVERY, rank, EVERY, 0.0, math.nan) for rank in each]

    told = found([message(data=0.2)] * 6 + [message(compute=0.2)] * (KEPT // EVERY), [0, 0])
    assert (told[0][1].part, told[-1][1].part) == ("data", "compute")
    assert told[-1][1].seconds["data"] == 0.0


def test_the_part_is_the_one_that_takes_most_over_the_peers():
    own = [
        {"compute": 1.0, "data": 0.2, "save": 0.0, "host": 0.1},
        {"compute": 1.02, "data": 0.2, "save": 0, "host": 0.3},
    ]
    message = [
        Window([sum(each.values())] * EVERY, each, EVERY, 0.0, core) for each, core in zip(own, (1.0, 0.5), strict=True)
    ]
    slow = found([message] * 2, [0, 0])[0][1]
    assert slow.part == "host"
    assert slow.seconds["compute"] == pytest.approx(0.02)
    assert slow.line(["a", "b"]) == "slowest rank 1 (b): +17 % over the median in 20 of 20 steps: host"
    computing = slow._replace(seconds={**slow.seconds, "compute": 1.0})
    said = ": compute (its thread was on a core in 50 % of that time, its peers' in 100 %)"
    assert computing.line().endswith(said)
    assert computing._replace(on_core=0.95).line().endswith(": compute")
    assert computing._replace(peers_on_core=0.55).line().endswith(": compute")  # the machine is busy, not the rank


@pytest.mark.parametrize("core", [math.nan, 0.25])
def test_records_carry_it_and_it_is_read_from_them_again(core):
    slow = Slow(3, 0.08, 40, 50, dict(zip(KINDS, (0.1, 0.2, 0.0, 0.01), strict=True)), core, core)
    record = {"step": 7, "loss": 1.0, **json.loads(json.dumps(slow.fields()))}
    ((step, again),) = of_history([{"step": 6, "loss": None}, record, {**record, "slowest_over": None}])
    assert step == 7
    assert again[:5] == slow[:5]
    assert again.line() == slow.line() == "slowest rank 3: +8 % over the median in 40 of 50 steps: data"


def test_a_rank_tells_what_it_has_not_told_and_its_first_step_never():
    own = [OwnStep(step, compute=step, data=0.5, host=0.25, waits=9.0) for step in range(1, 13)]
    times = OwnTimes()
    first = times.window(own[:6], 5, 4)
    assert first.totals == [step + 0.75 for step in (2, 3, 4, 5)]
    assert first.means == {"compute": 3.5, "data": 0.5, "host": 0.25, "save": 0.0}
    assert math.isnan(first.on_core)
    times.saved(3.0)
    times.on_core(7.5)
    second = times.window(own, 7, 4)
    assert [math.isnan(each) for each in second.totals] == [True, True, False, False]
    assert (second.means["save"], second.steps, second.saves, second.on_core) == (1.5, 2, 1, 7.5 / 13)
    assert Window.of_numbers(second.numbers())[1:] == second[1:]
    last = times.window(own, 12, 2)  # of five steps, two by one
    assert (last.totals, last.means["compute"], last.saves) == ([11.75, 12.75], 10.0, 0)
    times.saved(50.0)
    times.on_core(600.0)
    kept = [OwnStep(step, 12.0, 0.5, 0.25, 9.0) for step in range(93, 113)]  # clocks keep fewer than were made
    late = times.window(kept, 112, 2)
    assert (late.steps, late.means["save"], late.means["compute"], late.on_core) == (100, 0.5, 12.0, 0.5)


def test_the_message_of_all_ranks_stays_small():
    assert steps_told(10, 64) == 10
    assert steps_told(500, 2) == KEPT
    assert steps_told(500, 4096) == 8
    assert steps_told(1, 1 << 20) == 1


@pytest.mark.parametrize("count", range(2, 7))
def test_the_median_of_the_others(count):
    draw = random.Random(count)
    values = [draw.choice([1.0, 2.0, 3.0, 4.0]) for _ in range(count)]
    rest = [values[:i] + values[i + 1 :] for i in range(count)]
    assert medians_without(numpy.array(values)).tolist() == [median(others) for others in rest]
