"""A lock on a file that one process holds, whose end frees it. No torch.

taken     fcntl.lockf: a lock of this process alone. The kernel takes it back when the process ends, however it ends,
          and no child has it: neither workers nor the data workers that are forked
          and may live longer
refused   another process has it; the file says which, since when and where
ended     the file is removed; one that a killed process left stops nobody

On a network file system the lock holds for all its clients where that has locks for them (NFS 4, NFS 3 with lockd,
Lustre with -o flock); a client that vanished keeps it until the server gives up on it (NFS 4: 90 s). Where there are
none at all a line says so. A process must not open the file twice: closing either takes the lock away.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import time
from contextlib import suppress
from errno import EEXIST, EINVAL, ENOLCK, ENOSYS, ENOTSUP
from pathlib import Path

from zero3d.reading import Unreadable, read_object, what_it_is

MODE = 0o644
NO_LOCKS = (EINVAL, ENOLCK, ENOSYS, ENOTSUP)  # of file systems without them


class FileLock:
    """Holds a lock on at most one file.

    note  a line for people where the file system has no locks
    """

    def __init__(self) -> None:
        self.note: str | None = None
        self._file: int | None = None
        self._path = Path()

    def acquire(self, path: Path) -> None:
        """Make and lock the file; once is enough. Raises BlockingIOError where another process has it, and OSError."""
        if self._file is not None:
            return
        self._path = path
        try:
            self._file = _open_locked(path)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            self.note = f"{path.parent} has no locks ({error.strerror}): nothing stops a second run from writing to it"
            return
        owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        os.ftruncate(self._file, os.pwrite(self._file, json.dumps(owner).encode(), 0))

    def release(self) -> None:
        """Release the lock; the file goes first, while nobody else can have it."""
        if self._file is not None:
            with suppress(OSError):
                if _is_named(self._file, self._path):  # not the lock of a run in a folder that was made anew
                    self._path.unlink()
            os.close(self._file)
            self._file = None


def _open_locked(path: Path) -> int:
    """Open and lock the file of this name. Raises OSError."""
    while True:
        file = _open(path, os.O_CREAT)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(file, path):
                return file
        except OSError:
            os.close(file)
            raise
        os.close(file)  # its holder has removed it since it was opened: the next one is another file


def _open(path: Path, flags: int = 0) -> int:
    """Open a lock's file, not behind a link: who has it writes there. Raises OSError for what is not a regular file."""
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | flags, MODE)
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        raise OSError(EEXIST, f"it is {what_it_is(mode)}", str(path))
    return file


def _is_named(file: int, path: Path) -> bool:
    """Say whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def is_held(path: Path) -> bool:
    """Say whether another process has locked the file; writes nothing."""
    try:
        file = _open(path)
    except OSError:
        return False  # nobody's, or nothing that this process may write: `acquire` says it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(file)
    return False


def holder(path: Path) -> tuple[str, str]:
    """Return who has locked a file, as "process P on host H since T", and what ends that process."""
    owner: dict[str, object] = {}
    with suppress(Unreadable):
        owner = read_object(path)
    pid, host, since = (owner.get(key, "unknown") for key in ("pid", "host", "since"))
    return f"process {pid} on host {host} since {since}", f"end it (on {host}: kill {pid})"
