"""Seconds of a step by part: on the host's clock, and by events of a device, which nobody waits for."""

from unittest import mock

import pytest
import torch
from models import batch
from pipelines import build, engine_of, micro_batches

import zero3d
from zero3d.engine.checkpoints import Checkpoints
from zero3d.engine.execution import Direct
from zero3d.offload.updates import RecordUpdates
from zero3d.pipeline.chunks import Chunks
from zero3d.pipeline.messages import Sends
from zero3d.train.step_times import fields, of_history, where_it_went
from zero3d.zero.clocks import Clocks
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.own_seconds import KEPT
from zero3d.zero.reductions import Reductions
from zero3d.zero.step_parts import (
    BACKWARD,
    BUBBLE,
    DATA,
    EVALUATION,
    FORWARD,
    GATHERS,
    OFFLOAD,
    OTHER,
    PARTS,
    REDUCTIONS,
    SAVES,
    UPDATE,
    OverRanks,
    OwnStep,
    PartTime,
)
from zero3d.zero.streams import SideStream

CUDA = torch.device("cuda", 0)


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def now():
    with mock.patch("time.perf_counter", Time()) as time:
        yield time


def step(clocks, now, forward=1.0, waits=0.25, backward=2.0, update=0.5, between=0.125):
    with clocks.of(FORWARD):
        now.now += forward / 2
        with clocks.of(GATHERS):
            now.now += waits
        now.now += forward / 2
    with clocks.of(BACKWARD):
        now.now += backward
    with clocks.of(UPDATE):
        now.now += update
    clocks.end_step()
    now.now += between


def seconds(clocks):
    return {row.part: row.seconds for row in clocks.rows()}


def test_parts_interrupt_each_other_and_add_up_to_the_time_that_has_passed(now):
    clocks = Clocks(torch.device("cpu"))
    step(clocks, now)
    assert seconds(clocks) == {FORWARD: 1.0, BACKWARD: 2.0, GATHERS: 0.25, UPDATE: 0.5}
    assert sum(seconds(clocks).values()) == now.now - 0.125  # what follows is the next step's


def test_the_first_step_counts_only_where_there_is_no_other(now):
    clocks = Clocks(torch.device("cpu"))
    step(clocks, now, forward=100.0)
    assert seconds(clocks)[FORWARD] == 100.0
    for forward in (1.0, 3.0):
        step(clocks, now, forward=forward)
    assert seconds(clocks) == {FORWARD: 2.0, BACKWARD: 2.0, GATHERS: 0.25, UPDATE: 0.5, OTHER: 0.125}


def test_all_that_happens_in_an_evaluation_is_the_evaluation_s(now):
    clocks = Clocks(torch.device("cpu"))
    with clocks.of(EVALUATION), clocks.of(FORWARD), clocks.of(GATHERS):
        now.now += 4.0
    step(clocks, now)
    assert seconds(clocks)[EVALUATION] == 4.0
    assert seconds(clocks)[GATHERS] == 0.25


def test_what_raises_ends_its_part(now):
    clocks = Clocks(torch.device("cpu"))
    with pytest.raises(ValueError, match="inside"), clocks.of(FORWARD), clocks.of(GATHERS):
        raise ValueError("inside")
    now.now += 8.0
    step(clocks, now)
    assert seconds(clocks)[OTHER] == 8.0


def test_a_window_has_the_steps_since_the_last_one_but_for_the_first_of_all(now):
    clocks = Clocks(torch.device("cpu"))
    assert not any(clocks.window())
    step(clocks, now, forward=100.0)
    assert not any(clocks.window())
    for forward in (1.0, 3.0, 5.0, 7.0):
        step(clocks, now, forward=forward)
        if forward == 3.0:
            assert clocks.window()[list(PARTS).index(FORWARD)] == 2.0
    assert dict(zip(PARTS, clocks.window(), strict=True))[FORWARD] == 6.0
    assert not any(clocks.window())


def test_clocks_that_are_off_measure_nothing(now):
    clocks = Clocks(torch.device("cpu"), on=False)
    for _ in range(2):
        step(clocks, now)
    assert clocks.rows() == []
    assert not any(clocks.window())


def test_rows_have_the_means_of_what_all_ranks_windows_come_to(now):
    clocks = Clocks(torch.device("cpu"))
    step(clocks, now)
    for told in (over_ranks(forward=(1.0, 2.0, 3.0), data=(0.0, 1.0, 2.0)), over_ranks(forward=(3.0, 4.0, 6.0))):
        step(clocks, now)
        clocks.window()
        clocks.hear(told)
    rows = {row.part: row for row in clocks.rows()}
    assert rows[FORWARD] == (FORWARD, 1.0, 2.0, 3.0, 4.5)
    assert rows[DATA] == (DATA, 0.0, 0.0, 0.5, 1.0)  # this rank waited for none


# --- by events of a device ------------------------------------------------------------------------


class Event:
    """An event of a device that gets to it when it is told to."""

    made, passed = [], 0  # of how many, in the order of their records

    def __init__(self, device, enable_timing):
        assert device == CUDA
        assert enable_timing
        Event.made.append(self)

    def record(self, stream):
        assert stream == "compute"
        self.at, self.number = Event.time(), Event.recorded
        Event.recorded += 1

    def query(self):
        return self.number < Event.passed

    def elapsed_time(self, other):
        assert self.query()
        assert other.query()
        return 1000 * (other.at - self.at)

    def synchronize(self):
        raise AssertionError("nothing waits for an event")

    wait = synchronize


@pytest.fixture
def device():
    Event.made, Event.recorded, Event.passed, Event.time = [], 0, 0, Time()
    with (
        mock.patch("torch.Event", Event),
        mock.patch("torch.accelerator.current_stream", return_value="compute"),
        mock.patch("time.perf_counter", side_effect=AssertionError("the host's clock says nothing of a device")),
    ):
        yield Event.time


def clocks_of_device():
    with mock.patch("time.perf_counter", return_value=0.0):
        return Clocks(CUDA)


def test_a_device_s_step_is_read_when_the_device_has_passed_it_and_events_are_used_again(device):
    clocks = clocks_of_device()
    for _ in range(2):
        step(clocks, device)
        assert clocks.steps == 0  # the device is late
    Event.passed = Event.recorded
    step(clocks, device, forward=9.0)
    assert clocks.steps == 2
    many = len(Event.made)
    assert seconds(clocks) == {FORWARD: 1.0, BACKWARD: 2.0, GATHERS: 0.25, UPDATE: 0.5, OTHER: 0.125}
    for _ in range(5):
        Event.passed = Event.recorded
        step(clocks, device)
    assert clocks.steps == 7
    assert len(Event.made) == many


def test_a_device_s_time_begins_with_its_first_part(device):
    clocks, Event.passed = clocks_of_device(), 100
    step(clocks, device)
    assert seconds(clocks) == {FORWARD: 1.0, BACKWARD: 2.0, GATHERS: 0.25, UPDATE: 0.5}


def test_events_of_a_step_of_many_parts_are_read_and_used_again_before_its_end(device):
    clocks, Event.passed = clocks_of_device(), 1000
    with mock.patch("zero3d.zero.clocks.PENDING", 8):
        for _ in range(100):
            with clocks.of(FORWARD):
                device.now += 1.0
    assert len(Event.made) == 8
    clocks.end_step()
    assert seconds(clocks) == {FORWARD: 100.0}


def test_a_device_gives_the_seconds_that_the_host_s_clock_gives(device):
    clocks = clocks_of_device()
    for forward in (1.0, 2.0, 3.0):
        step(clocks, device, forward=forward)
        Event.passed = Event.recorded
    with clocks.of(DATA):
        device.now += 1.0
    clocks.end_step()
    with mock.patch("time.perf_counter", Time()) as now:
        same = Clocks(torch.device("cpu"))
        for forward in (1.0, 2.0, 3.0):
            step(same, now, forward=forward)
    assert seconds(clocks) == seconds(same)


# --- a rank's own seconds -------------------------------------------------------------------------


def test_on_a_cpu_own_seconds_are_without_waits_in_whatever_part_they_fall(now):
    waited = Time()
    clocks = Clocks(torch.device("cpu"), waited=waited)
    for part, passed, waits in [
        (DATA, 1.0, 0.25), (FORWARD, 2.0, 0.5), (GATHERS, 4.0, 3.5), (UPDATE, 8.0, 6.0), (OFFLOAD, 16.0, 0.0),
        (EVALUATION, 32.0, 5.0), (SAVES, 64.0, 7.0),
    ]:  # fmt: skip
        with clocks.of(part):
            now.now, waited.now = now.now + passed, waited.now + waits
    clocks.end_step()
    now.now += 0.5
    step(clocks, now)
    first, second = clocks.own
    assert first == OwnStep(1, compute=1.5 + 0.5 + 2.0, data=0.75, host=16.0, waits=10.25)  # no evaluation, no save
    assert (second.step, second.compute, second.data, second.host, second.waits) == (2, 3.75, 0.0, 0.5, 0.0)
    assert first.total == 20.75
    for _ in range(KEPT):
        step(clocks, now)
    assert [clocks.own[0].step, clocks.own[-1].step] == [3, 2 + KEPT]


def test_what_was_waited_while_nothing_was_measured_counts_nowhere(now):
    waited = Time()
    clocks = Clocks(torch.device("cpu"), waited=waited)
    clocks.on = False
    now.now, waited.now = 5.0, 4.0
    clocks.on = True
    step(clocks, now)
    assert clocks.own[0][1:] == (3.75, 0.0, 0.0, 0.0)


def test_on_a_device_own_seconds_are_without_the_parts_in_which_its_stream_meets_peers(device):
    clocks, Event.passed = clocks_of_device(), 100
    step(clocks, device)
    with clocks.of(DATA):
        device.now += 1.0
    with clocks.of(BUBBLE):
        device.now += 0.75
    with clocks.of(SAVES):
        device.now += 64.0
    clocks.end_step()
    first, second = clocks.own
    assert first == OwnStep(1, compute=1.0 + 2.0, data=0.0, host=0.0, waits=0.25)
    assert second == OwnStep(2, compute=0.0, data=1.0, host=0.125, waits=0.75)


# --- in records, and at a run's end ---------------------------------------------------------------


def over_ranks(**parts):
    """Least, mean and largest of parts, by name; zeros of all others."""
    return OverRanks(*([parts.get(part, (0.0, 0.0, 0.0))[place] for part in PARTS] for place in range(3)))


def test_a_record_has_the_mean_of_each_part_and_the_least_and_largest_where_there_are_several_ranks():
    told = over_ranks(forward=(1.0, 2.0, 3.0), gathers=(0.0, 0.5, 1.0))
    assert fields(told, ranks=1) == {"forward_s": 2.0, "gathers_s": 0.5}
    of_two = fields(told, ranks=2)
    assert list(of_two) == [f"{part}_s{end}" for part in ("forward", "gathers") for end in ("", "_least", "_largest")]
    assert of_two["gathers_s_largest"] == 1.0


def test_a_run_s_end_says_where_a_step_went_from_all_records_that_know():
    told = {3: {"forward": (1.0, 1.5, 2.0)}, 4: {"forward": (1.0, 2.5, 4.0), "data": (0.0, 0.01, 0.01)}}
    windows = [{"step": 1}, {"step": 2}]
    windows += [{"step": at, **fields(over_ranks(backward=(2.0, 2.0, 2.0), **told[at]), 2)} for at in told]
    data, forward, backward = of_history(windows)
    assert (forward.least, forward.seconds, forward.largest) == (1.0, 2.0, 3.0)
    assert (data.seconds, backward.seconds) == (0.005, 2.0)
    (line,) = where_it_went([data, forward, backward])
    assert line == "a step of 4 s: forwards 50 % (25 to 75 by rank), backwards 50 %"
    assert list(where_it_went(of_history([{"step": 1}]))) == []
    alone = {"step": 2} | fields(over_ranks(forward=(2.0, 2.0, 2.0)), 1)
    assert of_history([alone]) == [PartTime(FORWARD, 2.0, 2.0, 2.0, 2.0)]


def test_a_record_counts_as_the_steps_that_it_is_the_mean_of(now):
    clocks, records = Clocks(torch.device("cpu")), []
    for number in range(1, 13):
        records.append({"step": number})
        if number in (11, 12):  # of nine steps, and of one that took longer
            window = clocks.window()
            clocks.hear(OverRanks(window, window, window))
            records[-1] |= fields(OverRanks(window, window, window), ranks=1)
        step(clocks, now, forward=41.0 if number == 11 else 1.0)
    assert {row.part: row.seconds for row in of_history(records)}[FORWARD] == 5.0
    assert {row.part: row.mean for row in clocks.rows()}[FORWARD] == 5.0


def test_what_happens_while_clocks_are_off_is_nobody_s(now):
    clocks = Clocks(torch.device("cpu"))
    step(clocks, now)
    clocks.on = False
    now.now += 100.0
    step(clocks, now)
    clocks.on = True
    now.now += 1.0
    step(clocks, now)
    assert seconds(clocks) == {FORWARD: 1.0, BACKWARD: 2.0, GATHERS: 0.25, UPDATE: 0.5, OTHER: 1.0}


# --- in an engine ---------------------------------------------------------------------------------


def trained(engine):
    engine.train_batch(micro_batches(0, 0, 2))


def own_loop(engine):
    engine.backward(engine(batch(0)).float().logsumexp(-1).mean(), last=True)
    engine.step()
    engine.optimizer.flush()


def called_without_grad(engine):
    with torch.no_grad():
        engine(batch(0))


def evaluated(engine):
    engine.evaluate(micro_batches(0, 0, 1))


def found(action, owner, name, pp=1, **options):
    """The parts in which a second passes with every call of a method, and at no other time."""
    real = getattr(owner, name)

    def late(*args, **kwargs):
        time.now += 1.0
        return real(*args, **kwargs)

    with mock.patch("time.perf_counter", Time()) as time, mock.patch.object(owner, name, late):
        engine = engine_of(build("net", 2), zero3d.Mesh(pp=pp), **options)
        engine.clocks.end_step()  # the first step, which no row has
        begun = time.now
        action(engine)
        engine.clocks.end_step()
    assert time.now > begun
    return {row.part for row in engine.clocks.rows()}


@pytest.mark.parametrize(("action", "owner", "name", "part"), [
    (trained, Direct, "forward", FORWARD), (trained, Direct, "loss", FORWARD),
    (trained, Direct, "backward_sum", BACKWARD), (trained, ShardedOptimizer, "update", UPDATE),
    (own_loop, Direct, "call", FORWARD), (own_loop, Direct, "backward", BACKWARD),
    (own_loop, ShardedOptimizer, "measure", UPDATE),
    (called_without_grad, Direct, "call", EVALUATION), (evaluated, Direct, "forward", EVALUATION),
])  # fmt: skip
def test_time_is_that_of_the_part_in_which_it_passes(action, owner, name, part):
    assert found(action, owner, name) == {part}


def test_a_save_s_time_is_its_own_with_all_that_it_calls(tmp_path):
    assert found(lambda engine: engine.save(tmp_path), Checkpoints, "save") == {SAVES}


def test_updates_off_the_device_are_waits_for_states():
    assert found(own_loop, RecordUpdates, "_make_due", offload={"optimizer": "host"}) == {OFFLOAD}


def waits_of_two():
    """On a rank of two: the parts in which compute waits for what side streams do, by stage."""
    return [found(trained, SideStream, "join", stage=stage) for stage in (2, 3)]


def test_waits_for_weights_and_sums_are_no_forwards_and_backwards(ranks):
    assert ranks(2, waits_of_two) == [[{REDUCTIONS}, {GATHERS, REDUCTIONS}]] * 2


def parts_of_pipelines():
    """On a pipeline stage: the parts of its forward and backward, and of what is left to send."""
    places = (Chunks, "run"), (Reductions, "sweep"), (Sends, "finish")
    return [found(trained, *place, pp=2) for place in places]


def test_what_a_pipeline_stage_waits_for_is_no_compute(ranks):
    assert ranks(2, parts_of_pipelines) == [[{FORWARD}, {BACKWARD}, {BUBBLE}]] * 2
