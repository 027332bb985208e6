"""From records to a verdict: who is silent for too long, who waits for whom, and what is said of it."""

from datetime import UTC, datetime

import pytest

from zero3d.watchdog import monitor as monitors
from zero3d.watchdog.block import STALL, Block
from zero3d.watchdog.heartbeat import TRAINING, Heartbeat
from zero3d.watchdog.joined import host_folder
from zero3d.watchdog.monitor import Facts, Monitor
from zero3d.watchdog.stacks import main_first, main_frames
from zero3d.watchdog.states import RankState, find_culprits, find_waits, settle_by_stack


def rank(number, state="waiting", op="all_gather", unit="a", count=7, axes=None, axis="dp", **more):
    axes = {"dp": [0, 1, 2, 3]} if axes is None else axes
    return RankState(number, "here", 100 + number, state, TRAINING, axis, op, unit, count, 5, 9.0, axes=axes, **more)


@pytest.mark.parametrize(
    ("states", "waits", "culprits"),
    [
        ([rank(0), rank(1), rank(2), rank(3, "running")], [[3], [3], [3]], [3]),
        ([rank(0), rank(1), rank(2, "stopped"), rank(3, "running")], [[2, 3], [2, 3]], [2]),
        ([rank(0), rank(1, "dead"), rank(2, "stopped"), rank(3)], [[1, 2], [1, 2]], [1]),
        ([rank(0), rank(1), rank(2), rank(3, count=6)], [[3], [3], [3], [0, 1, 2]], [3]),
        ([rank(0), rank(1), rank(2, unit="b"), rank(3)], [[2], [2], [0, 1, 3], [2]], [2]),
        ([rank(0), rank(1), rank(2), rank(3)], [[], [], [], []], []),  # the network
        ([rank(0), rank(1)], [[2, 3], [2, 3]], []),  # the others are on another host
        ([rank(0, axes={"dp": [0, 2]}), rank(2, "running")], [[2]], [2]),
    ],
    ids=["running", "stopped", "dead", "behind", "another unit", "all in one", "other hosts", "only its own axis"],
)
def test_a_rank_waits_for_those_of_its_axis_that_are_not_in_the_same_call(states, waits, culprits):
    assert [wait.peers for wait in find_waits(states)] == waits
    assert [state.rank for state in find_culprits(states)] == culprits


def frame(path, function):
    return ["Thread 0x1 (most recent call first):", f'  File "{path}", line 3 in {function}']


def test_stacks_correct_what_records_cannot_tell():
    computing = rank(0, op="a step", stack=frame("/x/torch/nn/functional.py", "linear"))
    receiving = rank(1, op="a step", stack=frame("/x/torch/distributed/pipelining/schedules.py", "_wait_batch_p2p"))
    foreign = rank(2, "running", stack=frame("/x/torch/distributed/distributed_c10d.py", "broadcast"))
    looping = rank(3, "running", stack=frame("/x/model.py", "forward"))
    settle_by_stack([computing, receiving, foreign, looping])
    assert [state.state for state in (computing, receiving, foreign, looping)] == [
        "running", "waiting", "waiting", "running"
    ]  # fmt: skip
    assert foreign.call_words == "torch.distributed.broadcast, a call that is none of zero3d's"


DUMP = """Thread 0x00007f01 (most recent call first):
  File "/a/worker.py", line 1 in poll
  File "/a/threading.py", line 2 in _bootstrap

Current thread 0x00007f02 (most recent call first):
  File "/a/model.py", line 3 in forward
  File "<frozen runpy>", line 198 in _run_module_as_main

Thread 0x00007f03 [other] (most recent call first):
  File "/a/b.py", line 4 in run
"""


def test_the_main_threads_stack_comes_first():
    lines = main_first(DUMP)
    assert lines[0].startswith("Current thread")
    assert main_frames(lines) == [
        'File "/a/model.py", line 3 in forward', 'File "<frozen runpy>", line 198 in _run_module_as_main'
    ]  # fmt: skip
    assert sum("most recent call first" in line for line in lines) == 3


class Clock:
    """Time that passes when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(monitors.time, "monotonic", lambda: self.now)

    def passes(self, monitor, seconds, each=0.5):
        """Look again and again; the seconds after which the monitor found a stall, None if it did not."""
        end = self.now + seconds
        while self.now < end:
            self.now += each
            if monitor.look():
                return self.now - end + seconds
        return None


@pytest.fixture
def watched(tmp_path, monkeypatch):
    """A monitor, its clock and the heartbeats of two ranks that train, with limits of 10 and 100 seconds."""
    clock = Clock(monkeypatch)
    beats = [Heartbeat.begin(tmp_path, number, TRAINING) for number in range(2)]
    for heartbeat in beats:
        heartbeat.tell(timeout=10.0, slow_timeout=100.0)
    return Monitor(tmp_path), clock, beats


def test_a_rank_that_is_silent_for_the_timeout_is_a_stall_though_another_moves(watched):
    monitor, clock, (first, _) = watched
    assert clock.passes(monitor, 9.0) is None
    first.step = 1
    assert clock.passes(monitor, 3.0) == pytest.approx(1.5, abs=1.0)


def test_beats_are_signs_of_life(watched):
    monitor, clock, beats = watched
    for step in range(20):
        for heartbeat in beats:
            heartbeat.step = step
        assert clock.passes(monitor, 8.0) is None


def test_while_one_rank_saves_the_others_may_wait_and_start_counting_anew_afterwards(watched):
    monitor, clock, (first, second) = watched
    with second.inside("dp", "exchange", "-"):
        with first.phase("save"):
            assert clock.passes(monitor, 95.0) is None
        assert clock.passes(monitor, 4.0) is None
        second.step = 2
        assert clock.passes(monitor, 5.0) is None
        with first.phase("save"):
            second.step = 3
            assert 99 <= clock.passes(monitor, 200.0) <= 102


def test_a_monitor_that_was_held_up_itself_blames_nobody(watched):
    monitor, clock, _ = watched
    assert clock.passes(monitor, 2.0) is None
    clock.now += 1000.0  # Ctrl-Z, or a host that slept
    assert not monitor.look()
    assert clock.passes(monitor, 5.0) is None


@pytest.mark.parametrize("limits", [{}, {"timeout": 0, "slow_timeout": 0}], ids=["not told", "0"])
def test_without_limits_it_waits_for_ever(tmp_path, monkeypatch, limits):
    clock = Clock(monkeypatch)
    Heartbeat.begin(tmp_path, 0, TRAINING).tell(**limits)
    assert clock.passes(Monitor(tmp_path), 1000.0) is None


def test_a_rank_that_has_ended_is_not_silent(watched):
    monitor, clock, (first, second) = watched
    first.end()
    for step in range(3):
        second.step = step
        assert clock.passes(monitor, 90.0) is None


def block(states, world=2, output=None):
    facts = Facts(10.0, 100.0, output, world)
    return Block(
        STALL, datetime(2030, 1, 2, tzinfo=UTC), "here", states, facts, find_waits(states), find_culprits(states)
    )


def test_each_host_writes_a_block_of_its_own_name(tmp_path, capsys):
    block([rank(0, axes={"dp": [0, 1]}), rank(1, axes={"dp": [0, 1]})], world=4, output=tmp_path).write()
    block([rank(0)], world=1, output=tmp_path / "gone").write()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["watchdog-here.json", "watchdog-here.txt"]
    assert "All ranks are in all_gather 7 of unit 'a' on axis dp: the network" in capsys.readouterr().err


def test_the_folder_of_a_host_is_one_for_all_its_ranks_private_and_ours(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = host_folder(["node", "29500"])
    assert folder == host_folder(["node", "29500"]) != host_folder(["node", "29501"])
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert host_folder(["node", "29500"]) is None
