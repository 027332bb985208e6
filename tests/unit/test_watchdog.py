"""From records to a verdict: who is silent for too long, who waits for whom, and what is said of it."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from sysconfig import get_path
from types import SimpleNamespace

import psutil
import pytest
from shared_places import places

from zero3d.watchdog import monitor as monitors, place
from zero3d.watchdog.block import STALL, Block
from zero3d.watchdog.heartbeat import ALL, TRAINING, Heartbeat
from zero3d.watchdog.monitor import Facts, Monitor
from zero3d.watchdog.place import open_folder
from zero3d.watchdog.stacks import main_first, main_frames
from zero3d.watchdog.waits import RankState, Wait, correct_by_stack, find_culprits, find_waits


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
        ([rank(0, peer=1), rank(1, "running", peer=0)], [[1]], [1]),
        ([rank(0, peer=1), rank(1, unit="b", peer=0)], [[1], [0]], []),
        ([rank(0, peer=1), rank(1, unit="b")], [[1], [0]], [1]),
    ],
    ids=[
        "running",
        "stopped",
        "dead",
        "behind",
        "another unit",
        "all in one",
        "other hosts",
        "only its own axis",
        "a message",
        "messages of each other",
        "a message of one in a collective",
    ],
)
def test_a_rank_waits_for_those_of_its_axis_that_are_not_in_the_same_call(states, waits, culprits):
    assert [wait.peers for wait in find_waits(states)] == waits
    assert [state.rank for state in find_culprits(states)] == culprits


def frame(path, function):
    return ["Thread 0x1 (most recent call first):", f'  File "{path}", line 3 in {function}']


def test_stacks_correct_what_records_cannot_tell():
    of_torch, schedule = "/x/torch/distributed/distributed_c10d.py", "/x/torch/distributed/pipelining/schedules.py"
    message = {"op": "receive", "unit": "the gradients of a", "count": 0, "peer": 1}
    in_forward = [*frame("/x/torch/nn/functional.py", "linear"), *frame(schedule, "_step_microbatches")[1:]]
    computing = rank(0, "running", **message, stack=in_forward)
    receiving = rank(1, "running", **message, stack=frame(schedule, "_wait_batch_p2p"))
    sending = rank(2, "running", **message, stack=[*frame(of_torch, "isend"), *frame(schedule, "_batch_p2p")[1:]])
    foreign = rank(3, "running", **message, stack=frame(of_torch, "broadcast"))
    looping = rank(4, "running", stack=frame("/x/model.py", "forward"))
    states = [computing, receiving, sending, foreign, looping]
    correct_by_stack(states)
    assert [state.state for state in states] == ["running", "waiting", "waiting", "waiting", "running"]
    assert (receiving.call_words, foreign.peer) == ("receive of the gradients of a on axis dp", ALL)
    assert find_waits(states)[:2] == [Wait(each, [1], "dp", "receive", "the gradients of a") for each in (1, 2)]
    assert foreign.call_words == "torch.distributed.broadcast, a call from outside zero3d"


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


def test_of_a_main_thread_whose_stack_is_cut_off_it_is_still_the_first():
    cut = DUMP.replace('  File "<frozen runpy>", line 198 in _run_module_as_main\n', "  ...\n")
    cut = cut.replace(
        '  File "/a/b.py", line 4 in run\n',
        '  File "/a/b.py", line 4 in run\n  File "/a/threading.py", line 2 in _bootstrap\n',
    )
    assert main_frames(main_first(cut))[0] == 'File "/a/model.py", line 3 in forward'


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


def test_what_is_slow_may_take_as_long_as_it_moves_its_record_or_bytes_and_others_wait_for_it(watched, monkeypatch):
    monitor, clock, (first, second) = watched
    moved = {"bytes": 0}
    monkeypatch.setattr(monitors, "_disk_bytes", lambda pid: moved["bytes"])
    with first.phase("load"), second.inside("dp", "exchange", "-"):
        for _ in range(5):
            moved["bytes"] += 1
            assert clock.passes(monitor, 95.0) is None
        for _ in range(5):
            first.work(b"tokenizing")
            assert clock.passes(monitor, 95.0) is None
        assert clock.passes(monitor, 200.0) <= 10.0
    first.step = second.step = 5
    assert clock.passes(monitor, 9.0) is None
    moved["bytes"] += 1  # a save behind training moves them, too
    assert clock.passes(monitor, 9.0) <= 3.0


def told_by_linux():
    told = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(told["read_bytes"]) + int(told["write_bytes"])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts them")
def test_bytes_to_and_from_disks_are_read_from_the_system(monkeypatch):
    counts = SimpleNamespace(read_bytes=5, write_bytes=7)
    monkeypatch.setattr(psutil.Process, "io_counters", lambda _: counts)
    assert monitors._disk_bytes(os.getpid()) == 12
    monkeypatch.undo()
    assert told_by_linux() <= monitors._disk_bytes(os.getpid()) <= told_by_linux()
    assert monitors._disk_bytes(2**22 + 1) == 0  # more than any process' number


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


def test_the_step_is_the_last_that_all_ranks_have_begun():
    ahead, behind = rank(0), replace(rank(1, "running"), step=4)
    assert (ahead.step, block([ahead, behind]).step, block([behind, ahead]).as_json()["step"]) == (5, 4, 4)
    assert "; last step that all its ranks have begun: 4\n" in block([ahead, behind]).text()
    assert block([]).step == 0


def test_the_first_line_has_the_place_in_peoples_own_code():
    library = f"{get_path('stdlib')}/pathlib.py"
    stack = [
        *frame(library, "open"),
        *frame("/me/hook.py", "write_log")[1:],
        *frame("/x/site-packages/torch/a.py", "b")[1:],
    ]
    assert block([rank(0), rank(1, "running", work="Python", stack=stack)]).cause == (
        "rank 1 is stuck or slow in Python, in no collective, at /me/hook.py:3 write_log"
    )
    inside = frame(library, "open")
    assert block([rank(0), rank(1, "running", stack=inside)]).cause.endswith(f", at {library}:3 open")
    assert block([rank(0), rank(1, "running")]).cause.endswith("in no collective")


def test_a_call_of_torchs_own_that_some_ranks_make_is_what_to_look_at():
    foreign = rank(
        0,
        "running",
        stack=[
            *frame("/x/site-packages/torch/distributed/distributed_c10d.py", "all_reduce"),
            *frame("/me/hook.py", "share")[1:],
        ],
    )
    states = [foreign, *(rank(each, axes={"dp": [0, 1, 2]}) for each in (1, 2))]
    correct_by_stack(states)
    assert block(states, world=3).advice[0] == (
        "all ranks must make that call, at /me/hook.py:3 share; others may have made it before, and left it"
    )


def test_how_a_rank_died_is_said_where_it_is_known():
    states = [rank(0, axes={"dp": [0, 1]}), rank(1, "dead")]
    assert block(states).cause == "rank 1 died"
    assert replace(block(states), ends={1: "killed by SIGKILL"}).cause == "rank 1 died: killed by SIGKILL"


@pytest.mark.parametrize("saved", [True, False])
def test_to_go_on_from_a_checkpoint_is_advised_where_there_is_one(tmp_path, saved):
    if saved:
        (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    advice = block([rank(0)], output=tmp_path).advice[-1]
    assert ("goes on from the newest checkpoint" in advice) == saved
    assert ("starts anew" in advice) != saved


def test_the_folder_of_a_host_is_one_for_all_its_ranks_private_and_ours(tmp_path, monkeypatch):
    shared = places(monkeypatch, tmp_path)
    folder = open_folder(os.getpid(), ["node", "29500"])
    assert folder == open_folder(os.getpid(), ["node", "29500"]) != open_folder(os.getpid(), ["node", "29501"])
    assert folder.parent == shared
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path)
    assert open_folder(os.getpid(), ["node", "29500"]) is None


@pytest.mark.parametrize("without", ["one", "room"])
def test_without_room_in_shared_memory_records_are_in_the_temporary_folder(tmp_path, monkeypatch, without):
    shared = places(monkeypatch, tmp_path)
    if without == "one":
        shared.rmdir()  # macOS
    else:
        monkeypatch.setattr(place, "ROOM", 1 << 62)
    assert open_folder(os.getpid(), []).parent == tmp_path / "tmp"


def test_folders_of_launchers_and_ranks_that_are_gone_are_removed_at_the_next_start(tmp_path, monkeypatch):
    shared = places(monkeypatch, tmp_path)
    launcher, living = (subprocess.Popen(["cat"], stdin=subprocess.PIPE) for _ in range(2))
    try:
        used, left, ours = (open_folder(launcher.pid, [name]) for name in ("used", "left", "ours"))
        for folder, pid in ((used, living.pid), (left, launcher.pid), (ours, os.getpid())):
            Heartbeat.begin(folder, 0, TRAINING)
            record = bytearray((folder / "rank-0").read_bytes())
            record[16:24] = pid.to_bytes(8, "little")
            (folder / "rank-0").write_bytes(record)
        assert {used, left, ours, open_folder(os.getpid(), [])} == set(shared.iterdir())
        launcher.kill()
        launcher.wait()
        assert {used, open_folder(os.getpid(), ["a new run"]), open_folder(os.getpid(), [])} == set(shared.iterdir())
    finally:
        for process in (launcher, living):
            process.kill()
            process.wait()
