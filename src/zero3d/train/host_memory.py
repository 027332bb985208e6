"""Memory of the host, watched while a run goes on: the kernel kills without a word, this reports the memory's use.

    left     the least of   machine   MemAvailable + SwapFree of /proc/meminfo (page cache counts as free)
                            cgroups   limit - what it holds without page cache, + the swap that it may still use
    reserve  the larger of 1 % of the limit and 256 MB, but at most 5 % of it
    alarm    left < reserve, and at the speed of the last looks nothing is left within `HORIZON` seconds, and the kernel
             would kill this rank or a child of it (/proc/PID/oom_score)

So there is no alarm on a machine full of page cache, on one that swaps, and on one that is full and stays so; nor on a
rank if the kernel would kill another process. A run that grows into the reserve at its peak, and would have shrunk
again in time, is ended: it ran within 1 % of its death.

A look takes some 0.03 ms, and 0.07 for each cgroup that has a limit when the watch begins. It is taken every half
second, and more often the nearer the reserve is, as `FILLING` fills it. Linux alone:
elsewhere nothing is watched.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from zero3d.memory.cgroups import ROOT, Cgroup, cgroups, text
from zero3d.train.memory_report import RankProcess

SHARE, LEAST, MOST = 0.01, 256_000_000, 0.05  # reserve: part of the limit, bytes, part of it at most
HORIZON = 3.0  # seconds
FILLING = 8e9  # bytes per second by which a host may fill up
LONGEST, SHORTEST = 0.5, 0.02  # seconds between two looks
FIELDS = re.compile(r"^(MemTotal|MemAvailable|SwapFree): *([0-9]+) kB$", re.MULTILINE)
PATIENCE = 1.0  # seconds till the next look where the kernel would take another process


class Room(NamedTuple):
    """Bytes left before the kernel kills, the limit, and the limit's source. group: None for the machine."""

    left: int
    limit: int
    source: str
    group: Path | None = None

    @property
    def reserve(self) -> float:
        """Bytes that are the last ones."""
        return min(max(SHARE * self.limit, LEAST), MOST * self.limit)


class LowMemory(NamedTuple):
    """An alarm: the room, and the bytes per second by which it shrinks."""

    room: Room
    falling: float


def limited(root: Path = ROOT) -> list[Cgroup]:
    """Return the cgroups of this process that have a limit."""
    return [group for group in cgroups(root) if group.hard_limit() is not None]


def room(groups: Sequence[Cgroup], root: Path = ROOT) -> Room | None:
    """Return the memory left for this process; None where the system does not say."""
    return min(_rooms(groups, root), default=None)


def _rooms(groups: Sequence[Cgroup], root: Path) -> Iterator[Room]:
    machine = dict(FIELDS.findall(text(root / "proc/meminfo")))
    swap = 1024 * int(machine.get("SwapFree", 0))
    if "MemAvailable" in machine:
        left = 1024 * int(machine["MemAvailable"]) + swap
        yield Room(left, 1024 * int(machine.get("MemTotal", 0)), "memory of the host")
    for group in groups:
        limit = group.hard_limit()
        if limit is not None:
            left = limit - group.held()
            yield Room(max(left + _swap_of(group, swap, left), 0), limit, f"cgroup {group.folder}", group.folder)


def _swap_of(group: Cgroup, free: int, left: int) -> int:
    """Return the bytes of swap that a cgroup may still use."""
    return min(free, group.swap_left(left)) if free else 0


class Gauge:
    """Judges a series of looks: whether what is left is about to be gone."""

    def __init__(self) -> None:
        self._looks: deque[tuple[float, int]] = deque()

    def look(self, now: float, found: Room) -> LowMemory | None:
        """Take one look into account; return the alarm, if it is one."""
        self._looks.append((now, found.left))
        while self._looks[0][0] < now - HORIZON:
            self._looks.popleft()
        since, most = max(self._looks, key=lambda look: look[1])
        falling = (most - found.left) / max(now - since, SHORTEST)
        if found.left >= found.reserve or found.left >= HORIZON * falling:
            return None
        return LowMemory(found, falling)


def pause(found: Room) -> float:
    """Return the seconds till the next look."""
    return min(max((found.left - found.reserve) / FILLING, SHORTEST), LONGEST)


class HostWatch(threading.Thread):
    """Looks at the host's memory until it is stopped, and calls `alarm` once, on the rank that is to speak."""

    has_alarmed = False

    def __init__(self, alarm: Callable[[LowMemory], None], root: Path = ROOT) -> None:
        super().__init__(name="zero3d host memory", daemon=True)
        self._alarm = alarm
        self._root = root
        self._stop_asked = threading.Event()
        self._gauge = Gauge()

    def stop(self) -> None:
        """End the watch; an alarm under way goes on."""
        self._stop_asked.set()

    def run(self) -> None:
        """Look, wait, look again."""
        groups, wait = limited(self._root), 0.0
        while not self._stop_asked.wait(wait):
            found = room(groups, self._root)
            if found is None:
                return
            wait, low = pause(found), self._gauge.look(time.monotonic(), found)
            if low is not None and is_own(victim(found.group, self._root)):
                self.has_alarmed = True
                self._alarm(low)
                return
            wait = wait if low is None else PATIENCE


def victim(group: Path | None, root: Path = ROOT) -> int | None:
    """Return the process that the kernel would take: of a cgroup, or of the machine; None where it does not say."""
    if group is None:
        pids = [int(folder.name) for folder in (root / "proc").glob("[0-9]*")]
    else:
        pids = [int(word) for file in group.rglob("cgroup.procs") for word in text(file).split() if word.isdecimal()]
    scores = ((text(root / f"proc/{pid}/oom_score").strip(), pid) for pid in pids)
    ranked = [(int(score), _anonymous(pid, root), -pid) for score, pid in scores if score.isdecimal()]
    return -max(ranked)[2] if ranked else None


def is_own(pid: int | None) -> bool:
    """Return whether a process is this one or a child of it, such as a worker that reads data."""
    if pid is None or pid == os.getpid():
        return pid is not None
    with suppress(psutil.Error):
        return any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    return False


def rank_processes() -> list[RankProcess]:
    """Return the ranks of this host that have the same launcher as this one."""
    ranks = []
    parent = psutil.Process().parent()
    for process in [] if parent is None else parent.children():
        with suppress(psutil.Error):
            rank = process.environ().get("RANK", "")
            if rank.isdecimal():
                family = [process, *process.children(recursive=True)]
                ranks.append(RankProcess(int(rank), process.pid, sum(_anonymous(each.pid) for each in family)))
    return sorted(ranks)


def _anonymous(pid: int, root: Path = ROOT) -> int:
    """Return the bytes of a process that are no file's: RssAnon and RssShmem."""
    lines = (line.partition(":") for line in text(root / f"proc/{pid}/status").splitlines())
    return sum(1024 * int(value.split()[0]) for name, _, value in lines if name in ("RssAnon", "RssShmem"))
