"""What ranks do when the process that started them is gone: say so, stop after their step, and end in any case.

The thread that looks for that replies to the monitor, too, when it asks for NCCL's flight recorder.

    at once     one rank of the host writes the block, then all are asked to stop as by SIGTERM: they save after their
                step; one that has not come to training yet, where nothing answers SIGTERM, ends its peers and itself
    after 12 s  a rank ends those that cannot end themselves, being stopped or stuck where Python never runs, and then
                itself; but one that saves may finish, within `health.timeout`

A launcher that was killed cannot clean up: its ranks would wait for each other, and hold their devices, for ever.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

from zero3d.watchdog.block import ORPHANS, observe
from zero3d.watchdog.flight_recorder import reply
from zero3d.watchdog.heartbeat import ENDED
from zero3d.watchdog.joined import end_processes
from zero3d.watchdog.monitor import Monitor, is_alive
from zero3d.watchdog.own_files import create_own
from zero3d.watchdog.place import remove_if_left

LOOK = 0.5  # seconds between two looks at the parent
TELLING = 5.0  # seconds that the first rank has for the block before the others stop
GRACE, OTHERS = 10.0, 2.0  # seconds for this rank to stop by itself, and then for its peers
SAVING = "save"  # the phase that may finish


def follow_parent(folder: Path, rank: int, parent: int) -> None:
    """Watch this process' parent, which may be gone already, from a thread of its own to the end."""
    threading.Thread(target=_follow, args=(folder, rank, parent), name="zero3d-parent", daemon=True).start()


def _follow(folder: Path, rank: int, parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(LOOK)
        reply(folder, rank)
    begun = time.monotonic()
    with suppress(OSError):
        gone = f"its launcher (process {parent}) is gone"
        print(f"rank {rank}: {gone}: it saves, where it trains, and ends", file=sys.stderr)
    monitor = Monitor(folder)
    _tell_once(monitor, begun)  # before anybody stops: a rank that is fast is gone within milliseconds
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:  # else it would die at once, and leave stopped peers
        os.kill(os.getpid(), signal.SIGTERM)
        patience = monitor.facts().timeout
        while time.monotonic() - begun < GRACE or _saves(monitor, rank, begun, patience):
            time.sleep(LOOK)
    time.sleep(OTHERS)
    beats = monitor.beats()
    others = {other: beat.pid for other, beat in beats.items() if other != rank and beat.phase not in (ENDED, SAVING)}
    end_processes([pid for pid in others.values() if is_alive(pid)], signal.SIGKILL)
    end = time.monotonic() + OTHERS
    while any(map(is_alive, others.values())) and time.monotonic() < end:
        time.sleep(LOOK / 10)
    remove_if_left(folder)
    os._exit(128 + signal.SIGTERM)


def _tell_once(monitor: Monitor, begun: float) -> None:
    """Write the block on the first rank of this host to come here; let the others wait until it is there."""
    told = monitor.folder / "told"
    if _is_first(monitor.folder):
        observe(ORPHANS, monitor).write()
        with suppress(OSError):
            os.close(create_own(told))
    while not told.exists() and time.monotonic() - begun < TELLING:
        time.sleep(LOOK / 10)


def _is_first(folder: Path) -> bool:
    """Return whether this rank is the first of its host to notice."""
    with suppress(OSError):
        (folder / "orphaned").touch(exist_ok=False)
        return True
    return False


def _saves(monitor: Monitor, rank: int, begun: float, patience: float) -> bool:
    limit = 300.0 if math.isinf(patience) else patience
    beat = monitor.beats().get(rank)
    return beat is not None and beat.phase == SAVING and time.monotonic() - begun < limit
