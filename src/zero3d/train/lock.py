"""One run per output folder: rank 0 holds a lock on OUTPUT/.lock from before the first write to the last.

taken     fcntl.lockf: a lock of this process alone. The kernel takes it back when the process ends, however it ends,
          and no child has it: neither workers nor the data workers that are forked
          and may live longer
refused   another process has it; the file says which, since when and where
ended     the file is removed, so that a folder holds what runs leave; one that a killed run left stops nobody

On a network file system the lock holds for all its clients where that has locks for them (NFS 4, NFS 3 with lockd,
Lustre with -o flock); a client that vanished keeps it until the server gives up on it (NFS 4: 90 s). Where there are
none at all a line says so. A process must not open the file twice: closing either takes the lock away.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from contextlib import suppress
from errno import EACCES, EINVAL, ENOLCK, ENOSYS, ENOTSUP, EPERM
from pathlib import Path
from typing import Self

from zero3d.errors import ConfigError
from zero3d.reading import Unreadable, parse_object

LOCK = ".lock"
MODE = 0o644
NO_LOCKS = (EINVAL, ENOLCK, ENOSYS, ENOTSUP)  # of file systems without them


class FolderLock:
    """Holds a lock on at most one folder, released at the end of the block at the latest.

    note  a line for people where the file system has no locks
    """

    def __init__(self) -> None:
        self.note: str | None = None
        self._file: int | None = None
        self._path = Path()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def acquire(self, root: Path) -> None:
        """Lock the folder, which is there; once is enough. Raises ConfigError where another process has it."""
        if self._file is not None:
            return
        self._path = root / LOCK
        try:
            self._file = _open_locked(self._path)
            owner = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(self._file, os.pwrite(self._file, json.dumps(owner).encode(), 0))
        except BlockingIOError:
            raise ConfigError(refusal(root)) from None
        except OSError as error:
            if error.errno in (EACCES, EPERM) and self._path.exists():
                raise ConfigError(
                    f"{self._path} is another user's lock and cannot be opened ({error.strerror}): wait for that run, "
                    "remove the file if it is over, or write elsewhere with output=FOLDER."
                ) from error
            if error.errno not in NO_LOCKS:
                raise ConfigError(
                    f"output {root.resolve()} cannot be written ({error.strerror}): choose another with output=FOLDER."
                ) from error
            self.note = f"{root} has no locks ({error.strerror}): nothing stops a second run from writing to it"

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
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, MODE)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_named(file, path):
                return file
        except OSError:
            os.close(file)
            raise
        os.close(file)  # its holder has removed it since it was opened: the next one is another file


def _is_named(file: int, path: Path) -> bool:
    """Say whether the open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False


def check_free(root: Path) -> None:
    """Refuse a folder that another process holds; writes nothing. Raises ConfigError."""
    try:
        file = os.open(root / LOCK, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return  # nobody's, or nothing that this process may write: `acquire` says it
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(refusal(root)) from None
    except OSError:
        return
    finally:
        os.close(file)


def refusal(root: Path) -> str:
    """Return the message about a folder that another process holds."""
    owner: dict[str, object] = {}
    with suppress(OSError, Unreadable):
        owner = parse_object((root / LOCK).read_bytes().decode(errors="replace"))
    pid, host, since = (owner.get(key, "unknown") for key in ("pid", "host", "since"))
    return (
        f"output {root} is in use by process {pid} on host {host} since {since}: wait for that run, end it "
        f"(on {host}: kill {pid}), or write elsewhere with output=FOLDER."
    )
