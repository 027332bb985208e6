"""What the system says about a worker that was killed: mostly it was the kernel's out-of-memory killer.

oom_kill    of this process's cgroup (v2 memory.events, v1 memory.oom_control), else of the machine (/proc/vmstat);
            counted before and after a run
memory      the largest worker's, and the least of the machine's and the cgroup's limits

Where a file is missing, as in containers and outside Linux, the line says less.
"""

from __future__ import annotations

import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

ROOT = Path("/")
LESS = "lower train.micro_batch or data.length, try activations=full or zero.stage=3, or take more memory"
V2, V1 = ("memory.events", "memory.max"), ("memory.oom_control", "memory.limit_in_bytes")


def oom_kills(root: Path = ROOT) -> int | None:
    """Count processes that the out-of-memory killer has ended, as far back as the system counts; None if unknown."""
    for file in (*(folder / name for folder, (name, _) in _cgroups(root)), root / "proc/vmstat"):
        for line in _text(file).splitlines():
            name, _, value = line.partition(" ")
            if name == "oom_kill" and value.strip().isdecimal():
                return int(value)
    return None


def describe_kill(number: int, before: int | None, root: Path = ROOT) -> str:
    """Say how a worker died by a signal, as the end of a line. before: `oom_kills` at the start of the run."""
    how = f"killed by {signal.Signals(number).name}"
    if number != signal.SIGKILL:
        return how
    after = oom_kills(root)
    count = after - before if before is not None and after is not None else 0
    if count > 0:
        many = f"{count} process{'es' if count > 1 else ''}"
        return f"{how}: the kernel's out-of-memory killer ended {many} during the run ({_figures(root)}): {LESS}"
    return f"{how}: the usual cause is the kernel's out-of-memory killer ({_figures(root)}; `dmesg` tells): {LESS}"


def _figures(root: Path) -> str:
    """Say how much memory the largest worker had, and how much there is for all."""
    unit = 1 if sys.platform == "darwin" else 1024
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    limits = [int(text) for folder, (_, name) in _cgroups(root) if (text := _text(folder / name).strip()).isdecimal()]
    return f"the largest worker had {largest / 1e9:.1f} of {min([psutil.virtual_memory().total, *limits]) / 1e9:.1f} GB"


def _cgroups(root: Path) -> Iterator[tuple[Path, tuple[str, str]]]:
    """Yield folders that may be this process's memory cgroup, with the names of their files."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers in ("", "memory"):
            base, names = (root / "sys/fs/cgroup", V2) if not controllers else (root / "sys/fs/cgroup/memory", V1)
            yield base / path.lstrip("/"), names
            yield base, names  # a container sees its own cgroup as the root


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
