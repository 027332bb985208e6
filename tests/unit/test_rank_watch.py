"""What a run says of a slow rank, and when: the messages of two ranks, as the first of them hears them."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from zero3d.train.rank_watch import EVERY, LETTERS, RankWatch
from zero3d.train.stragglers import FACTS, KINDS, Window
from zero3d.zero.clocks import Clocks
from zero3d.zero.step_parts import FORWARD, OwnStep

NAMES = [b"a", b"b"]


class World:
    """Two ranks on two hosts, of which this is the first."""

    rank, size, device = 0, 2, torch.device("cpu")

    def exchange(self, row, recorded):
        assert row.shape == (LETTERS,)
        return torch.tensor([[*name, *bytes(LETTERS - len(name))] for name in NAMES], dtype=torch.float64)


@pytest.fixture
def engine():
    """What a watch needs of an engine whose ranks are of one pipeline stage."""
    mesh = SimpleNamespace(degrees=SimpleNamespace(place=lambda rank: SimpleNamespace(pp=0)), device=World.device)
    return SimpleNamespace(clocks=Clocks(World.device), world=World(), mesh=mesh)


def heard(watch, step, **slow):
    """Take messages of steps of a second, in which the second rank takes more in these parts; what it says then."""
    own = {kind: float(kind == "host") for kind in KINDS}
    late = {kind: value + slow.get(kind, 0.0) for kind, value in own.items()}
    rows = [Window([sum(each.values())] * watch._told, each, watch._told, 0.0, 1.0).numbers() for each in (own, late)]
    fields = watch.hear(step, [number for row in rows for number in row])
    said = watch.news()
    return fields, said and said.line(watch.hosts)


def test_a_slow_rank_is_said_once_and_again_when_it_is_slow_in_something_else(engine):
    watch = RankWatch(engine)
    watch.begin(1000, 50)
    assert heard(watch, 50, data=0.5)[1] == "slowest rank 1 (b): +50 % over the median in 50 of 50 steps: data"
    assert heard(watch, 100, data=0.5)[1] is None
    assert heard(watch, 150, compute=0.5)[1].endswith(": compute")
    assert watch.line == watch.slow.line(["a", "b"])
    fields, said = heard(watch, 200)
    assert (fields, said, watch.slow) == ({}, None, None)
    assert watch.line == "slowest rank 1 (b): +50 % over the median in 50 of 50 steps: compute, up to step 150"


def test_ranks_tell_every_few_steps_and_in_the_last(engine):
    watch = RankWatch(engine)
    watch.begin(23, None)
    assert [step for step in range(1, 24) if watch.due(step)] == [*range(1, 24)]
    watch.begin(1003, None)
    assert [step for step in range(980, 1004) if watch.due(step)] == [980, 990, 1000, 1003]
    assert watch.width == EVERY + len(KINDS) + FACTS
    watch.begin(1000, 400)
    assert [step for step in range(1, 1001) if watch.due(step)] == [400, 800, 1000]


def test_a_session_tells_nothing_of_steps_before_it(engine):
    for _ in range(4):
        engine.clocks.end_step()  # such as those that choose settings
    watch = RankWatch(engine)
    watch.begin(100, 5)
    with mock.patch.object(engine.clocks._own, "steps", [OwnStep(step, step, 0.0, 0.0, 0.0) for step in range(1, 11)]):
        totals = watch.tell(6)[: -len(KINDS) - FACTS]
    assert [each for each in totals if each == each] == [6.0, 7.0, 8.0, 9.0]


def test_a_record_has_the_wait_of_the_last_step_and_what_was_waited_for_saves_since_the_record_before():
    waited, now = SimpleNamespace(seconds=0.0), mock.Mock(return_value=0.0)
    clocks = Clocks(World.device, waited=lambda: waited.seconds)
    mesh = SimpleNamespace(degrees=SimpleNamespace(place=lambda rank: SimpleNamespace(pp=0)), device=World.device)
    watch = RankWatch(SimpleNamespace(clocks=clocks, world=World(), mesh=mesh))
    assert watch.waits == 0.0
    for more in (0.25, 2.0):
        with clocks.of(FORWARD):
            waited.seconds += more
        clocks.end_step()
    assert watch.waits == 2.0
    with mock.patch("time.perf_counter", now):
        for seconds in (4.0, 0.5):
            with watch.saving():
                now.return_value += seconds
    assert (watch.take_waited(), watch.take_waited()) == (4.5, 0.0)
