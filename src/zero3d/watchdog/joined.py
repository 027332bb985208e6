"""The monitor of ranks that torchrun, srun or the like has started: a small process beside them.

folder      of this host's ranks (`place.py`); all make the same name, of what their launcher tells them alike and of
            its process, which is the parent of all
monitor     started by the host's first rank, in a session of its own; it ends when all ranks are gone
stall       it writes its block and kills the host's ranks, so that their launcher fails with them
a dead rank it writes its block; the launcher, who learns of it too, ends the others, or after a while it does
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from zero3d.watchdog.block import DEATH, STALL, observe
from zero3d.watchdog.heartbeat import ENDED
from zero3d.watchdog.monitor import LOOK, Monitor, is_alive

COMING = 60.0  # seconds in which the first rank comes
LAST_WORDS = 5.0  # seconds that a launcher has, after a rank has died, to end the others


def start_monitor(folder: Path, ranks: int) -> None:
    """Start the process that watches `ranks` ranks; without one, training goes on unwatched."""
    command = [sys.executable, "-P", "-m", "zero3d.watchdog", str(folder), str(ranks)]
    with suppress(OSError):
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def watch(folder: Path, ranks: int) -> None:
    """Watch until all ranks are gone; end them after a stall. Removes the folder."""
    monitor = Monitor(folder)
    end, said = time.monotonic() + COMING, False
    try:
        while True:
            stalled, beats = monitor.look(), monitor.beats()
            living = [beat.pid for beat in beats.values() if is_alive(beat.pid)]
            if not living and (len(beats) >= ranks or time.monotonic() > end):
                return
            died = {rank: "" for rank, beat in beats.items() if beat.phase != ENDED and not is_alive(beat.pid)}
            if stalled and not said:
                observe(STALL, monitor).write()
                end_processes(living, signal.SIGKILL)
                return
            if died and not said:
                said, last = True, time.monotonic() + LAST_WORDS
                observe(DEATH, monitor, died).write()
            if said and time.monotonic() > last:
                end_processes(living, signal.SIGKILL)
                return
            time.sleep(LOOK)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def end_processes(pids: Iterable[int], number: signal.Signals) -> None:
    """Send a signal to processes and their children, but not to this one, which may be among these."""
    for pid in pids:
        with suppress(psutil.Error):
            process = psutil.Process(pid)
            for each in (*process.children(recursive=True), process):
                with suppress(psutil.Error):
                    if each.pid != os.getpid():
                        each.send_signal(number)
