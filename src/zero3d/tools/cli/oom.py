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
from pathlib import Path

import psutil

from zero3d.memory.cgroups import ROOT, cgroups, text

FAR = 1 / 16  # of the limit: below it no worker was large, several included
LESS = "lower train.micro_batch or data.length, try activations=full or zero.stage=3, or take more memory"


def oom_kills(root: Path = ROOT) -> int | None:
    """Count processes that the out-of-memory killer has ended, as far back as the system counts; None if unknown."""
    for file in (*(group.folder / group.files.events for group in cgroups(root)), root / "proc/vmstat"):
        for line in text(file).splitlines():
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
    largest, limit = _memory(root)
    if largest < FAR * limit:
        return f"{how}: somebody killed it, for it was not large ({_figures(root)}; `dmesg` tells)"
    return f"{how}: the usual cause is the kernel's out-of-memory killer ({_figures(root)}; `dmesg` tells): {LESS}"


def _figures(root: Path) -> str:
    largest, limit = _memory(root)
    return f"the largest worker had {largest / 1e9:.1f} of {limit / 1e9:.1f} GB"


def _memory(root: Path) -> tuple[int, int]:
    """Return how much memory the largest worker had, and how much there is for all."""
    unit = 1 if sys.platform == "darwin" else 1024
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
    limits = [limit for group in cgroups(root) if (limit := group.limit()) is not None]
    return largest, min([psutil.virtual_memory().total, *limits])
