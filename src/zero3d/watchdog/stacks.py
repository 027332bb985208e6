"""Python stacks of other processes: a signal makes each write its own, whatever it is in.

    rank      faulthandler writes the stacks of all threads to `rank-R.stack` on SIGUSR2, in C, without the GIL
    monitor   sends it, to a stopped process with SIGCONT behind it, and reads the files when they are complete

A process that is gone, or sleeps where no signal wakes it (a dead disk), leaves none.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from zero3d.watchdog.own_files import create_own, read_own

DEADLINE, A_MOMENT = 3.0, 0.05  # seconds in which stacks come; between two looks
MOST_BYTES = 16 << 20  # of one rank's stacks
MOST = 400  # lines of one rank's stacks
_HEAD = re.compile(r"(Current thread|Thread) 0x\w+.*\(most recent call first\):")
_OUTERMOST = "in _run_module_as_main"  # where the main thread of `python -m` began
_OF_THREAD = "in _bootstrap"  # where any other thread of Python's began; of a deep stack the end is missing


def dump_on_signal(folder: Path, rank: int) -> None:
    """Let this process write its stacks on SIGUSR2; call it once, before anybody may send that."""
    file = os.fdopen(create_own(stack_file(folder, rank)), "w")  # faulthandler keeps it
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True, chain=False)


def stack_file(folder: Path, rank: int) -> Path:
    """Return where a rank writes its stacks."""
    return folder / f"rank-{rank}.stack"


def gather_stacks(folder: Path, pids: Mapping[int, int], stopped: Iterable[int]) -> dict[int, list[str]]:
    """Make ranks write their stacks and return them by rank, the main thread's first; `stopped` ranks are continued."""
    before, held = {rank: _size(folder, rank) for rank in pids}, set(stopped)
    for rank, pid in pids.items():
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR2)
            if rank in held:
                os.kill(pid, signal.SIGCONT)
    sizes, end = before, time.monotonic() + DEADLINE
    while time.monotonic() < end:
        time.sleep(A_MOMENT)
        now = {rank: _size(folder, rank) for rank in pids}
        if now == sizes and all(now[rank] > before[rank] for rank in pids):
            break
        sizes = now
    return {rank: main_first(_since(folder, rank, before[rank])) for rank in pids}


def main_first(text: str) -> list[str]:
    """Return the lines of a dump with the main thread's first."""
    threads: list[list[str]] = []
    for line in text.splitlines():
        if _HEAD.match(line):
            threads.append([])
        if threads and line.strip():
            threads[-1].append(line)
    threads.sort(key=lambda lines: (_OUTERMOST not in lines[-1], any(_OF_THREAD in line for line in lines)))
    return [line for lines in threads for line in lines][:MOST]


def main_frames(stack: Iterable[str]) -> list[str]:
    """Return the frames of the first thread alone, the innermost first."""
    frames: list[str] = []
    for line in stack:
        if _HEAD.match(line):
            if frames:
                break
        else:
            frames.append(line.strip())
    return frames


def _size(folder: Path, rank: int) -> int:
    with suppress(OSError):
        return stack_file(folder, rank).lstat().st_size
    return 0


def _since(folder: Path, rank: int, offset: int) -> str:
    with suppress(OSError):
        return read_own(stack_file(folder, rank), MOST_BYTES, offset).decode(errors="replace")
    return ""
