"""Where the ranks of a host have their records: a folder in shared memory, without room there a temporary one.

name    says whose it is: the user's, of this host and container, of which launcher, and of which of its runs
taken   a name that somebody else has taken, who can compute it, too, is left alone: those ranks have no records
left    are folders of killed processes, whose launcher and ranks are all gone: the last rank that ends after a dead
        launcher removes its own, and every start the others. Only what is private is looked into (`own_files.py`)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path

import psutil

from zero3d.watchdog.heartbeat import ENDED
from zero3d.watchdog.monitor import Monitor, is_alive
from zero3d.watchdog.own_files import is_private

SHARED = Path("/dev/shm")
ROOM = 16 << 20  # bytes that must be free there: records and stacks of many ranks, beside what NCCL needs
PRIVATE = 0o700
MOST_ENTRIES = 1 << 16  # of a place, looked at for what is left
MOST_DIGITS = 9  # of a process' number


def open_folder(launcher: int, told: Sequence[str]) -> Path | None:
    """Make, or find, the folder of the ranks of this host that share a launcher and `told`; None without a place.

    Hosts and containers may share a place, and one that starts again has the same numbers of processes.
    """
    mine, places = _prefix(), [SHARED]
    with suppress(OSError):  # no temporary folder takes a file
        places.append(Path(tempfile.gettempdir()))
    for place in places:
        _remove_left(place, mine)
    with suppress(OSError, psutil.Error):
        begun = psutil.Process(launcher).create_time()
        name = f"{mine}{launcher}-{_short([str(begun), *told])}"
        folder = (SHARED if os.path.lexists(SHARED / name) or _has_room(SHARED) else places[-1]) / name
        folder.mkdir(mode=PRIVATE, exist_ok=True)
        if is_private(folder):
            return folder
    return None


def remove_if_left(folder: Path) -> None:
    """Remove a folder of ours whose launcher is gone, unless a rank other than this one is still there."""
    launcher = folder.name.removeprefix(_prefix()).split("-")[0]
    if not launcher.isdecimal() or len(launcher) > MOST_DIGITS or is_alive(int(launcher)) or not is_private(folder):
        return
    beats = Monitor(folder).beats().values()
    if not any(beat.phase != ENDED and beat.pid != os.getpid() and is_alive(beat.pid) for beat in beats):
        shutil.rmtree(folder, ignore_errors=True)


def _remove_left(place: Path, prefix: str) -> None:
    with suppress(OSError), os.scandir(place) as entries:
        names = [entry.name for entry in islice(entries, MOST_ENTRIES) if entry.name.startswith(prefix)]
        for name in names:
            remove_if_left(place / name)


def _prefix() -> str:
    """Return how names of folders begin that this user makes on this host and in this container."""
    space = ""
    with suppress(OSError):
        space = os.readlink("/proc/self/ns/pid")  # whose numbers of processes are its own
    return f"zero3d-watch-{os.getuid()}-{_short([socket.gethostname(), space])}-"


def _has_room(place: Path) -> bool:
    with suppress(OSError):
        found = os.statvfs(place)
        return found.f_bavail * found.f_frsize >= ROOM and os.access(place, os.W_OK | os.X_OK)
    return False


def _short(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
