"""Cgroups of this process on Linux: the memory they allow and hold, and the CPU time they allow. No torch.

              v2, /sys/fs/cgroup/PATH              v1, /sys/fs/cgroup/memory/PATH
limit         memory.max, memory.high              memory.limit_in_bytes
use           memory.current                       memory.usage_in_bytes
given back    active_file, inactive_file and       total_active_file, total_inactive_file of memory.stat:
              slab_reclaimable of memory.stat      what the kernel takes back before it refuses memory
CPU time      cpu.max: quota and period            cpu.cfs_quota_us, cpu.cfs_period_us, in /sys/fs/cgroup/cpu/PATH

PATH is in /proc/self/cgroup; a limit of any folder above it holds too. A container sees its own cgroup as the root.
Outside Linux, and where a file is missing, there is nothing to say.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path("/")
NO_LIMIT = 1 << 60  # bytes; v1 writes the largest whole number of pages where there is none


@dataclass(frozen=True)
class Files:
    """Names of a version's files, and the lines of memory.stat that count memory which is given back.

    limits  the first is the one beyond which processes are killed
    swap    limit and use: in v2 of swap alone, in v1 of memory and swap together
    """

    events: str
    limits: tuple[str, ...]
    use: str
    given_back: tuple[str, ...]
    swap: tuple[str, str]


V2 = Files(
    events="memory.events",
    limits=("memory.max", "memory.high"),
    use="memory.current",
    given_back=("active_file", "inactive_file", "slab_reclaimable"),
    swap=("memory.swap.max", "memory.swap.current"),
)
V1 = Files(
    events="memory.oom_control",
    limits=("memory.limit_in_bytes",),
    use="memory.usage_in_bytes",
    given_back=("total_active_file", "total_inactive_file"),
    swap=("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
)


@dataclass(frozen=True)
class Cgroup:
    """One memory cgroup: its folder, and what its files are called."""

    folder: Path
    files: Files

    def limit(self) -> int | None:
        """Return the bytes that it allows, None without a limit."""
        return min((limit for name in self.files.limits if (limit := self._number(name)) is not None), default=None)

    def hard_limit(self) -> int | None:
        """Return the bytes beyond which the kernel kills, None without a limit."""
        return self._number(self.files.limits[0])

    def swap_left(self, left: int) -> int:
        """Return the bytes of swap that it may still use, beside `left` bytes of memory."""
        limit, used = map(self._number, self.files.swap)
        if limit is None or used is None:
            return NO_LIMIT
        return max(limit - used - (left if self.files is V1 else 0), 0)

    def _number(self, name: str) -> int | None:
        """Return the number in a file, None where there is none or it stands for no limit."""
        words = text(self.folder / name).strip()
        return int(words) if words.isdecimal() and int(words) < NO_LIMIT else None

    def held(self) -> int:
        """Return the bytes in use that the kernel cannot take back: no page cache."""
        use = text(self.folder / self.files.use).strip()
        counts = self.counts("memory.stat")
        return max(int(use or 0) - sum(counts.get(name, 0) for name in self.files.given_back), 0)

    def counts(self, name: str) -> dict[str, int]:
        """Return the numbers of a file of lines `name number`."""
        pairs = (line.partition(" ") for line in text(self.folder / name).splitlines())
        return {name: int(value) for name, _, value in pairs if value.strip().isdecimal()}


def cgroups(root: Path = ROOT) -> Iterator[Cgroup]:
    """Yield the folders that may be this process's memory cgroup, from its own up to the root of all."""
    for folder, is_v1 in _folders("memory", root):
        yield Cgroup(folder, V1 if is_v1 else V2)


def usable_cores(root: Path = ROOT) -> int:
    """Return how many threads of this process can run at once: cores of its affinity, or what a quota leaves of them.

    A container with a limit of 2.5 CPUs may run on every core of its host, for 2.5 seconds a second: that is 2.
    """
    quotas = [_quota(folder, is_v1) for folder, is_v1 in _folders("cpu", root)]
    return max(1, int(min([len(os.sched_getaffinity(0)), *quotas])))


def _folders(controller: str, root: Path) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of a controller, from this process's own up to the root of all, and whether they are of v1."""
    for line in text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controller if controllers else root / "sys/fs/cgroup"
        parts = [part for part in path.split("/") if part]
        for depth in range(0 if ".." in parts else len(parts), -1, -1):
            yield base.joinpath(*parts[:depth]), bool(controllers)


def _quota(folder: Path, is_v1: bool) -> float:
    """Return seconds of CPU time that a cgroup allows per second; infinity without a quota."""
    names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if is_v1 else ("cpu.max",)
    words = " ".join(text(folder / name) for name in names).split()
    if len(words) != 2 or not all(word.isdecimal() and int(word) for word in words):  # "max", -1: none
        return float("inf")
    return int(words[0]) / int(words[1])


def text(file: Path) -> str:
    """Return what a file of the system says, nothing where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
