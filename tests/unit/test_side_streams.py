"""What side streams enqueue on an accelerator's streams: nothing before compute is there, and compute never too early."""

import weakref
from pathlib import Path

import pytest
import torch

import zero3d
from zero3d.memory.arena import Arena
from zero3d.zero.streams import SideStream


class Stream:
    """A stream that notes what it waits for."""

    def __init__(self, name, log):
        self.name, self._log = name, log

    def wait_stream(self, other):
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self._log.append(f"{self.name} waits for {event.recorded}")

    def __enter__(self):
        self._log.append(f"on {self.name}")

    def __exit__(self, *_):
        self._log.append(f"off {self.name}")


class Event:
    """An event of a device, which knows how much its stream had been given when it was recorded."""

    def __init__(self, device, log):
        self._index, self._log, self.recorded = device.index or 0, log, "nothing"

    def record(self, stream):
        assert stream.name.startswith(f"side {self._index}")
        given = [line for line in self._log if line.startswith("gather ")]
        self.recorded = f"{stream.name}, after {given[-1]}" if given else stream.name


class Devices:
    """Two devices, the first of them current, whose streams are noted in a log."""

    def __init__(self, monkeypatch):
        self.log = []
        monkeypatch.setattr(torch, "Stream", self._new)
        monkeypatch.setattr(torch, "Event", lambda device: Event(device, self.log))
        monkeypatch.setattr(torch.accelerator, "current_stream", self._current)

    def _new(self, device=None, *, priority=0):
        return Stream(f"side {self._index(device)}, priority {priority}", self.log)

    def _current(self, device=None):
        return Stream(f"compute {self._index(device)}", self.log)

    def _index(self, device):
        return 0 if device is None or device.index is None else device.index


@pytest.fixture
def devices(monkeypatch):
    return Devices(monkeypatch)


def test_what_is_issued_waits_for_compute_and_compute_for_what_is_joined(devices):
    side = SideStream("gather", Arena(torch.device("meta")))
    with side.issue("block"):
        devices.log.append("gather")
    side.join("block")
    side = "side 0, priority -1"
    assert devices.log == [
        f"{side} waits for compute 0", f"on {side}", "gather", f"off {side}", f"compute 0 waits for {side}",
    ]  # fmt: skip


def test_compute_waits_for_what_was_issued_for_a_unit_and_not_for_what_is_gathered_ahead(devices):
    side = SideStream("gather", Arena(torch.device("meta")))
    for unit, others in (("a", ()), ("b", ("a",)), ("c", ())):
        with side.issue(unit, *others):
            devices.log.append(f"gather {unit}")
    devices.log.clear()
    for unit in "acbx":
        side.join(unit)
    waits = "compute 0 waits for side 0, priority -1, after gather"
    assert devices.log == [f"{waits} b", f"{waits} c", f"{waits} b"]  # nothing was issued for x


def test_memory_that_a_lane_gives_back_lives_until_compute_has_waited_for_its_last_use(devices):
    arena = Arena(torch.device("meta"))
    side, held = SideStream("gather", arena), []

    def gather(unit, elements):
        with side.issue(unit):
            buffer = arena.borrow("wire", elements, torch.float32)
            held.append(weakref.ref(buffer))
            arena.give_back("wire", buffer)

    gather("a", 4)
    gather("b", 5)
    gather("c", 4)
    assert held[0]() is held[2]() is not None  # the lane's work is done in order
    side.join("a")
    assert [buffer() is not None for buffer in held] == [True, True, True]
    side.join("b")
    assert [buffer() is not None for buffer in held] == [True, False, True]
    side.join("c")
    assert [buffer() for buffer in held] == [None] * 3


def test_memory_that_a_lane_gave_back_comes_again_in_its_own_dtype_alone(devices):
    arena = Arena(torch.device("meta"))
    side = SideStream("gather", arena)
    with side.issue("a"):
        given = arena.borrow("wire", 4, torch.float32)
        arena.give_back("wire", given)
        assert arena.borrow("wire", 4, torch.uint8) is not given
        assert arena.borrow("wire", 4, torch.float32) is given


def test_what_a_lane_borrows_is_of_computes_pool_and_what_comes_later_of_the_current_streams(devices):
    arena = Arena(torch.device("meta"))
    side = SideStream("gather", arena)
    with side.issue("block"):
        devices.log.clear()
        arena.borrow("wire", 4, torch.float32)
        assert devices.log == ["on compute 0", "off compute 0"]
    devices.log.clear()
    arena.borrow("wire", 4, torch.float32)
    assert devices.log == []
    with pytest.raises(ValueError), side.issue("block"):
        raise ValueError
    devices.log.clear()
    arena.borrow("wire", 4, torch.float32)
    assert devices.log == []


def test_memory_that_a_lane_borrows_is_not_filled_on_computes_stream(devices, monkeypatch):
    """Compute would fill it with NaN after the side, which has waited for compute already, has written there."""
    arena, empty = Arena(torch.device("meta")), torch.empty

    def allocate(*sizes, **options):
        filled.append(torch.utils.deterministic.fill_uninitialized_memory)
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", allocate)
    for asked in (True, False):
        filled = []
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", asked)
        arena.borrow("wire", 4, torch.float32)
        with SideStream("gather", arena).issue("block"):
            arena.borrow("wire", 4, torch.float32)
        arena.borrow("wire", 4, torch.float32)
        assert filled == [asked, False, asked]


def test_an_engine_on_another_device_than_the_current_one_touches_no_stream_of_that(devices):
    arena = Arena(torch.device("meta", 1))
    for name in ("gather", "reduce"):
        side = SideStream(name, arena)
        with side.issue("block"):
            arena.borrow("wire", 4, torch.float32)
        side.join("block")
    assert len(devices.log) == 2 * 6
    assert not any(f"{kind} 0" in line for line in devices.log for kind in ("compute", "side"))


def test_nobody_but_side_streams_and_what_leaves_the_device_asks_for_streams():
    """`Stream()` and `current_stream()` without a device are of the current one, which need not be an engine's."""
    root = Path(zero3d.__file__).parent
    asking = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*.py")}
    asking = {name: text for name, text in asking.items() if "current_stream" in text}
    assert sorted(asking) == ["offload/disk_tier.py", "offload/executors.py", "offload/ring.py", "zero/streams.py"]
    assert not any("current_stream()" in text for text in asking.values())


def test_on_the_cpu_there_is_no_stream(monkeypatch):
    monkeypatch.setattr(torch, "Stream", None)
    side, done = SideStream("gather", Arena(torch.device("cpu"))), []
    with side.issue("block"):
        done.append("gather")
    side.join("block")
    assert done == ["gather"]
