"""Reading files of a checkpoint: regular ones, and no links, so that nothing outside of its folder is ever read."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Self

from zero3d.checkpoint.fields import USE_ANOTHER
from zero3d.errors import CheckpointError

MOST_TEXT = 1 << 31  # bytes; a manifest of 10,000 ranks is smaller
AT_ONCE = 1 << 23  # bytes that are read while as many are hashed


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file. Raises CheckpointError for anything else, and where the disk does not give it."""
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} {_problem(error)}. {USE_ANOTHER}") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is no regular file. {USE_ANOTHER}")
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}). {USE_ANOTHER}") from error


def _problem(error: OSError) -> str:
    if error.errno == errno.ENOENT:
        return "is missing: the checkpoint is incomplete"
    return "is a link" if error.errno in (errno.ELOOP, errno.EMLINK) else f"cannot be read ({error.strerror})"


def read(path: Path) -> bytes:
    """Return all of a text file of at most MOST_TEXT bytes."""
    with open_regular(path) as file:
        text = file.read(MOST_TEXT + 1)
    if len(text) > MOST_TEXT:
        raise CheckpointError(f"{path} is larger than {MOST_TEXT:,} bytes, which no manifest is. {USE_ANOTHER}")
    return text


class Hasher:
    """Hashes bytes in a thread of its own, so that a disk has work meanwhile; bytes stay as they are until `wait`.

    No pool of threads: those take nothing any more when a process ends, and a save may still be under way then.
    """

    def __init__(self) -> None:
        self._hash = hashlib.sha256()
        self._given: Queue[bytes | memoryview | None] = Queue()
        self._thread = Thread(target=self._work, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._given.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (data := self._given.get()) is not None:
            self._hash.update(data)
            self._given.task_done()

    def update(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        self._given.put(data)

    def wait(self) -> None:
        """Return when all that was taken is hashed."""
        self._given.join()

    def sha256(self) -> str:
        """Return the checksum of all bytes."""
        self.wait()
        return self._hash.hexdigest()


def digest(path: Path) -> str:
    """Return the SHA-256 of a file, which is read while it is hashed. Raises CheckpointError."""
    with open_regular(path) as file, Hasher() as hasher:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        buffers = [memoryview(bytearray(min(AT_ONCE, os.fstat(file.fileno()).st_size + 1))) for _ in range(2)]
        turn = 0
        while count := file.readinto(buffers[turn]):
            hasher.wait()  # of the other one, which is read into next
            hasher.update(buffers[turn][:count])
            turn = 1 - turn
        return hasher.sha256()
