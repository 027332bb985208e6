"""One run per output folder: rank 0 holds a lock on OUTPUT/.lock from before the first write to the last.

A folder holds what runs leave: the file goes with the lock. What the lock holds against: `memory/file_lock.py`.
"""

from __future__ import annotations

from errno import EACCES, EEXIST, ELOOP, EPERM
from pathlib import Path
from typing import Self

from zero3d.errors import ConfigError
from zero3d.memory.file_lock import FileLock, holder, is_held

LOCK = ".lock"


class FolderLock:
    """Holds a lock on at most one folder, released at the end of the block at the latest."""

    def __init__(self) -> None:
        self._lock = FileLock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @property
    def note(self) -> str | None:
        """Return a line for people where the file system has no locks."""
        return self._lock.note

    def acquire(self, root: Path) -> None:
        """Lock the folder, which is there; once is enough. Raises ConfigError where another process has it."""
        path = root / LOCK
        try:
            self._lock.acquire(path)
        except BlockingIOError:
            raise ConfigError(refusal(root)) from None
        except OSError as error:
            if error.errno in (EACCES, EPERM) and path.exists():
                raise ConfigError(
                    f"{path} is another user's lock and cannot be opened ({error.strerror}): wait for that run, "
                    "remove the file if it is over, or write elsewhere with output=FOLDER."
                ) from error
            if error.errno in (ELOOP, EEXIST):
                raise ConfigError(
                    f"{path} is not a file that a run has locked ({error.strerror}): remove it, or write elsewhere "
                    "with output=FOLDER."
                ) from error
            raise ConfigError(
                f"output {root.resolve()} cannot be written ({error.strerror}): choose another with output=FOLDER."
            ) from error

    def release(self) -> None:
        """Release the lock."""
        self._lock.release()


def check_free(root: Path) -> None:
    """Refuse a folder that another process holds; writes nothing. Raises ConfigError."""
    if is_held(root / LOCK):
        raise ConfigError(refusal(root))


def refusal(root: Path) -> str:
    """Return the message about a folder that another process holds."""
    who, end = holder(root / LOCK)
    return (
        f"output {root} is in use by {who}: wait for that run, {end}, or write elsewhere with output=FOLDER. Ranks "
        "whose launcher was killed save and end within seconds: then try again."
    )
