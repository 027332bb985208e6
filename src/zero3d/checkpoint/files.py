"""Reading files of a checkpoint: regular ones, and no links, so that nothing outside of its folder is ever read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path

from zero3d.checkpoint.fields import USE_ANOTHER
from zero3d.errors import CheckpointError

MOST_TEXT = 1 << 31  # bytes; a manifest of 10,000 ranks is smaller
BLOCK_BYTES = 1 << 20  # that a core's cache holds, so that a checksum is taken of bytes that are there


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file. Raises CheckpointError for anything else, and where the disk does not give it."""
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} {_problem(error)}. {USE_ANOTHER}") from error
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


def blocks(path: Path, start: int = 0, stop: int | None = None) -> Iterator[memoryview]:
    """Yield the bytes of a file from `start` to `stop`, in one block of memory that the next one overwrites.

    Raises CheckpointError.
    """
    with open_regular(path) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        size = os.fstat(file.fileno()).st_size
        left = max(0, (size if stop is None else min(stop, size)) - start)
        memory = memoryview(bytearray(min(BLOCK_BYTES, left)))
        file.seek(start)
        while left and (count := file.readinto(memory[: min(BLOCK_BYTES, left)])):
            left -= count
            yield memory[:count]
