"""A checkpoint's files: read without following links, and known again by their checksums. No torch.

Only regular files are opened, and no links, so that nothing outside of a checkpoint's folder is ever read. One of a
store that is not on this host yet (`stores/cache.py`) is fetched first.

Checksums are by XXH3: they find damage, and no forgery.

file     XXH3 in 128 bits: says whether bytes have changed; `xxhsum -H2 FILE` prints it, too
tensors  XXH3 in 64 bits: says of which tensor, where they have

A disk, a network or a memory that errs does not aim, so that a checksum of 128 bits misses nothing. Who may write into
a checkpoint may write its checksums anew, whatever they are made by: against that there are the rights of its folder.
XXH3 takes a tenth of the time of SHA-256, less than a copy of the same bytes, so that it needs no thread of its own.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import xxhash

from zero3d.checkpoint.copies import told
from zero3d.checkpoint.fields import USE_ANOTHER
from zero3d.errors import CheckpointError
from zero3d.stores.cache import fetch, origin, shown

SHA256_DIGITS, XXH3_DIGITS = 64, 32
MOST_TEXT = 1 << 31  # bytes; a manifest of 10,000 ranks is smaller
BLOCK_BYTES = 1 << 20  # that a core's cache holds, so that a checksum is taken of bytes that are there


@contextmanager
def open_regular(path: Path) -> Iterator[BufferedReader]:
    """Open a regular file. Raises CheckpointError for anything else, and where the disk does not give it."""
    try:
        # Not blocking: opening a pipe that nobody writes to would wait for ever.
        handle = os.open(present(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise CheckpointError(f"{path} {_problem(error)}. {USE_ANOTHER}") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise CheckpointError(f"{path} is not a regular file. {USE_ANOTHER}")
    with os.fdopen(handle, "rb") as file:
        try:
            yield file
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read ({error.strerror}). {USE_ANOTHER}") from error


def present(path: Path) -> Path:
    """Return a path, after its file was fetched where it is one of a store and is not there. Raises CheckpointError."""
    if not os.path.lexists(path):
        with told(shown(path), "read"):
            fetch(path)
    return path


def fetched_again(path: Path) -> bool:
    """Fetch a file of a store anew, as a disk of this host may have changed it; return whether it is one."""
    if (known := origin(path)) is None or known.stored is None:
        return False
    path.unlink(missing_ok=True)
    present(path)
    return True


def is_elsewhere(path: Path) -> bool:
    """Return whether a file is in a store, and not on this host."""
    known = None if os.path.lexists(path) else origin(path)
    return known is not None and known.stored is not None


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


class Checksums(NamedTuple):
    """Holds the checksum of a file, and those of its tensors by their keys, in hexadecimal digits."""

    file: str
    tensors: dict[str, str]


class Hasher:
    """Takes the checksums of a file whose bytes come by in order: those of its header, then those of its tensors."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._file = xxhash.xxh3_128()
        self._tensors = {key: xxhash.xxh3_64() for key in keys}

    def update(self, key: str | None, data: bytes | memoryview) -> None:
        """Take the next bytes, of the header or of the tensor that has this key."""
        self._file.update(data)
        if key is not None:
            self._tensors[key].update(data)

    def checksums(self) -> Checksums:
        """Return what they are, of all bytes that were taken."""
        return Checksums(self._file.hexdigest(), {key: each.hexdigest() for key, each in self._tensors.items()})


def has_checksum(path: Path, checksum: str) -> bool:
    """Return whether a file has a checksum by XXH3 in 128 bits. Raises CheckpointError."""
    hasher = xxhash.xxh3_128()
    for block in blocks(path):
        hasher.update(block)
    return hasher.hexdigest() == checksum


def tensor_checksum(data: Iterable[memoryview]) -> str:
    """Return the checksum of a tensor whose bytes these are."""
    hasher = xxhash.xxh3_64()
    for block in data:
        hasher.update(block)
    return hasher.hexdigest()
