"""The host's memory: what is left of it, when that is an alarm, and which process speaks."""

import os
import threading

import psutil
import pytest

from zero3d.memory.cgroups import ROOT
from zero3d.train.host_memory import Gauge, HostWatch, LowMemory, Room, is_own, limited, pause, room, victim

GB, MB = 10**9, 10**6


def machine(root, available, total=100 * GB, swap=0, line="0::/a\n"):
    (root / "proc/self").mkdir(parents=True, exist_ok=True)
    fields = {"MemTotal": total, "MemFree": 1, "MemAvailable": available, "SwapFree": swap}
    (root / "proc/meminfo").write_text("".join(f"{name}:  {value // 1024} kB\n" for name, value in fields.items()))
    (root / "proc/self/cgroup").write_text(line)
    return root


def group(folder, v2=True, cache=0, **files):
    folder.mkdir(parents=True, exist_ok=True)
    names = {"limit": "memory.max", "use": "memory.current", "high": "memory.high", "swap_limit": "memory.swap.max", "swap_use": "memory.swap.current"} if v2 else {
        "limit": "memory.limit_in_bytes", "use": "memory.usage_in_bytes", "swap_limit": "memory.memsw.limit_in_bytes", "swap_use": "memory.memsw.usage_in_bytes"}  # fmt: skip
    for key, value in files.items():
        (folder / names[key]).write_text(f"{value}\n")
    (folder / "memory.stat").write_text(f"{'inactive_file' if v2 else 'total_inactive_file'} {cache}\n")


def room_of(root):
    return room(limited(root), root)


def process(root, pid, score, nbytes=0):
    (root / f"proc/{pid}").mkdir(parents=True, exist_ok=True)
    (root / f"proc/{pid}/oom_score").write_text(f"{score}\n")
    (root / f"proc/{pid}/status").write_text(f"RssAnon: {nbytes // 1024} kB\nRssFile: 999999 kB\nRssShmem: 0 kB\n")


# --- what is left -----------------------------------------------------------------------------------


def test_without_figures_of_the_system_there_is_nothing_to_watch(tmp_path):
    assert room_of(tmp_path) is None


def test_the_machine_has_what_is_available_and_its_swap(tmp_path):
    assert room_of(machine(tmp_path, 40 * GB)).left == pytest.approx(40 * GB, abs=1024)
    assert room_of(machine(tmp_path, 40 * GB, swap=8 * GB)).left == pytest.approx(48 * GB, abs=2048)


@pytest.mark.parametrize("v2", [True, False])
def test_a_cgroup_full_of_page_cache_is_empty(tmp_path, v2):
    machine(tmp_path, 40 * GB, line="0::/a\n" if v2 else "4:memory:/a\n")
    folder = tmp_path / ("sys/fs/cgroup/a" if v2 else "sys/fs/cgroup/memory/a")
    group(folder, v2, limit=2 * GB, use=2 * GB, cache=15 * GB // 10)
    assert room_of(tmp_path) == Room(15 * GB // 10, 2 * GB, f"cgroup {folder}", folder)


def test_a_cgroup_that_is_throttled_is_not_killed(tmp_path):
    machine(tmp_path, 40 * GB)
    group(tmp_path / "sys/fs/cgroup/a", limit=2 * GB, use=GB, high=GB)
    assert room_of(tmp_path).left == GB


@pytest.mark.parametrize(("v2", "files", "left"), [
    (True, {"limit": 2 * GB, "use": 2 * GB}, 3 * GB),
    (True, {"limit": 2 * GB, "use": 2 * GB, "swap_limit": GB, "swap_use": GB // 4}, 3 * GB // 4),
    (True, {"limit": 2 * GB, "use": 2 * GB, "swap_limit": 0, "swap_use": 0}, 0),
    (False, {"limit": 2 * GB, "use": GB, "swap_limit": 3 * GB, "swap_use": GB}, 2 * GB),
    (False, {"limit": 2 * GB, "use": 2 * GB}, 3 * GB),
])  # fmt: skip
def test_swap_that_a_cgroup_may_use_is_left_too(tmp_path, v2, files, left):
    machine(tmp_path, 40 * GB, swap=3 * GB, line="0::/a\n" if v2 else "4:memory:/a\n")
    group(tmp_path / ("sys/fs/cgroup/a" if v2 else "sys/fs/cgroup/memory/a"), v2, **files)
    assert room_of(tmp_path).left == pytest.approx(left, abs=1024)


# --- the alarm --------------------------------------------------------------------------------------


def alarms(limit, *left, every=0.5):
    gauge = Gauge()
    return [gauge.look(i * every, Room(each, limit, "")) is not None for i, each in enumerate(left)]


@pytest.mark.parametrize(("limit", "reserve"), [
    (1000 * GB, 10 * GB), (100 * GB, GB), (10 * GB, 256 * MB), (2 * GB, 100 * MB)
])  # fmt: skip
def test_the_reserve_is_a_hundredth_at_least_256_mb_and_at_most_a_twentieth(limit, reserve):
    assert Room(0, limit, "").reserve == reserve


def test_what_falls_into_the_reserve_and_would_soon_be_gone_is_an_alarm():
    assert alarms(100 * GB, 4 * GB, 2 * GB, GB // 2) == [False, False, True]
    gauge = Gauge()
    gauge.look(0.0, Room(4 * GB, 100 * GB, ""))
    low = gauge.look(1.0, Room(GB // 2, 100 * GB, ""))
    assert low == LowMemory(Room(GB // 2, 100 * GB, ""), 3.5 * GB)


def test_what_is_full_and_stays_so_or_falls_slowly_is_none():
    assert not any(alarms(100 * GB, *[GB // 10] * 20))
    assert not any(alarms(100 * GB, *[GB // 2 - i * MB for i in range(60)]))
    assert not any(alarms(100 * GB, *[50 * GB - i * 5 * GB for i in range(10)]))  # fast, and all above the reserve
    assert not any(alarms(100 * GB, GB // 10, GB // 2, 4 * GB))  # on its way up


def test_looks_are_rarer_the_more_is_left():
    assert [pause(Room(left, 100 * GB, "")) for left in (90 * GB, 3 * GB, GB // 2)] == [0.5, 0.25, 0.02]


# --- who speaks -------------------------------------------------------------------------------------


def test_the_kernels_choice_is_the_highest_score_then_the_most_memory(tmp_path):
    machine(tmp_path, GB)
    for pid, score, nbytes in ((5, 100, GB), (6, 700, GB), (7, 700, 2 * GB)):
        process(tmp_path, pid, score, nbytes)
    assert victim(None, tmp_path) == 7
    folder = tmp_path / "sys/fs/cgroup/a"
    (folder / "below").mkdir(parents=True)
    (folder / "cgroup.procs").write_text("5\n")
    assert victim(folder, tmp_path) == 5
    (folder / "below/cgroup.procs").write_text("6\n")
    assert victim(folder, tmp_path) == 6
    assert victim(tmp_path / "nothing", tmp_path) is None


def test_a_rank_speaks_for_itself_and_its_children():
    assert is_own(os.getpid())
    assert not is_own(os.getppid())
    assert not is_own(None)


@pytest.mark.parametrize("taken", [True, False])
def test_the_watch_calls_once_and_only_where_this_process_would_be_taken(tmp_path, taken):
    machine(tmp_path, GB)
    process(tmp_path, os.getpid(), 500 if taken else 10)
    process(tmp_path, 1, 100)
    heard, looked = [], threading.Event()

    class Watch(HostWatch):
        def run(self):
            super().run()
            looked.set()

    watch = Watch(heard.append, tmp_path)
    seen = watch._gauge.look
    watch._gauge.look = lambda now, found: LowMemory(found, 1e9) if seen(now, found) is None else None
    if not taken:
        watch._stop_asked.wait = lambda seconds: seconds > 0  # after the first look
    watch.start()
    assert looked.wait(60)
    assert [low.room.left for low in heard] == ([pytest.approx(GB, abs=1024)] if taken else [])


def test_a_watch_that_is_stopped_ends(tmp_path):
    watch = HostWatch(lambda low: None, machine(tmp_path, 40 * GB))
    watch.start()
    watch.stop()
    watch.join(60)
    assert not watch.is_alive()


def test_this_system_is_read_without_an_error():
    found = room_of(ROOT)
    if os.path.exists("/proc/meminfo"):
        assert 0 < found.left <= psutil.virtual_memory().total + psutil.swap_memory().total
        assert victim(None) is not None
