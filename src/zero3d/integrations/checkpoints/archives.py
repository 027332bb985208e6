"""Files of torch.save, read without torch.load: mapped, and tensors are no more than what the files have.

    NAME/data.pkl    a pickle, in which a storage is (storage, its type, KEY, place, elements)
    NAME/data/KEY    that storage's bytes
    NAME/byteorder   little

All of it is a zip whose records are stored as they are. A storage has the length of its record, a tensor lies within
its storage, and all tensors of a file together are at most COPIES times as large as the file: some of an ordinary file
show the same storage, or are expanded.
"""

from __future__ import annotations

import io
import os
import stat
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor

from zero3d.errors import CheckpointError, short
from zero3d.integrations.checkpoints.restricted import RestrictedUnpickler, StorageType, told

COPIES, SMALL = 16, 64 << 20  # bytes that tensors may show for each of a file, and of a small one
HEADER = 30  # bytes of a record's header before its name


class Mapped(NamedTuple):
    """A file's bytes, of which only those that are used are read."""

    path: Path
    storage: torch.UntypedStorage

    @property
    def view(self) -> memoryview:
        """The bytes as Python's."""
        values: Any = torch.empty(0, dtype=torch.uint8).set_(self.storage).numpy()
        return memoryview(values)


def map_file(folder: Path, name: str) -> Mapped:
    """Map a file that lies in a folder. Raises CheckpointError for one elsewhere, and for a pipe or a device."""
    parts = Path(name).parts if name.isprintable() else ()
    if not parts or Path(name).is_absolute() or ".." in parts:
        raise CheckpointError(f"{folder} names the file {short(ascii(name))}, which is not in it: copy it again.")
    path = folder / name
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(folder.resolve()):
            raise CheckpointError(f"{path} is a link to {short(real)}, out of the folder: copy the file to its place.")
        opened = os.open(real, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            status = os.fstat(opened)
        finally:
            os.close(opened)
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle
        why = getattr(error, "strerror", None) or "its links lead in a circle"
        raise CheckpointError(f"{folder / short(name)} cannot be read: {why}.") from error
    if not stat.S_ISREG(status.st_mode):
        raise CheckpointError(f"{path} is not a regular file: copy it again.")
    if not status.st_size:
        raise CheckpointError(f"{path} is empty: copy it again.")
    storage: Any = told(path, lambda: torch.UntypedStorage.from_file(str(real), False, status.st_size))
    return Mapped(path, storage)


def read_torch(mapped: Mapped, start: int = 0, length: int | None = None) -> Any:
    """Read what torch.save has written to a file, or to a part of it. Raises CheckpointError."""
    size = mapped.storage.nbytes()
    length = size - start if length is None else length
    if not (0 <= start <= start + length <= size):
        raise CheckpointError(
            f"{mapped.path} has {size:,} bytes, and bytes {start:,} to {start + length:,} of it are wanted: copy it "
            "again."
        )
    return told(mapped.path, lambda: _Archive(mapped, start, length).load())


class _Stored(NamedTuple):
    archive: _Archive
    bytes: torch.UntypedStorage
    dtype: torch.dtype

    def tensor(self, offset: int, size: Any, stride: Any, dtype: torch.dtype | None = None) -> Tensor:
        dtype = self.dtype if dtype is None else dtype
        numbers = (offset, *size, *stride)
        if len(size) != len(stride) or any(type(number) is not int or not 0 <= number < 1 << 63 for number in numbers):
            raise ValueError(f"a tensor has the shape {short(tuple(size))}")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        if prod(size) and (last + 1) * dtype.itemsize > self.bytes.nbytes():
            raise ValueError(
                f"a tensor of {short(tuple(size))} needs {(last + 1) * dtype.itemsize:,} bytes, and its storage has "
                f"{self.bytes.nbytes():,}"
            )
        self.archive.count(prod(size) * dtype.itemsize)
        return torch.empty(0, dtype=dtype).set_(self.bytes, offset, tuple(size), tuple(stride))


class _Archive:
    """The records of a zip, and the storages in them."""

    def __init__(self, mapped: Mapped, start: int, length: int) -> None:
        self._mapped = mapped
        self._start = start
        self._length = length
        self._view = mapped.view[start : start + length]
        self._room = COPIES * length + SMALL
        self._storages: dict[str, torch.UntypedStorage] = {}
        with ZipFile(_Bytes(self._view)) as archive:
            self._infos = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in self._infos if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("it has the format of torch 1.5 and older" if not pickles else "it has several pickles")
        self._folder = pickles[0].partition("/")[0]

    def load(self) -> Any:
        """Return what was saved."""
        if f"{self._folder}/byteorder" in self._infos and self._record("byteorder") != b"little":
            raise ValueError("it was written on a machine with another order of bytes")
        return RestrictedUnpickler(self._record("data.pkl"), tensors=self).load()

    def count(self, size: int) -> None:
        """Count a tensor's bytes."""
        self._room -= size
        if self._room < 0:
            raise ValueError(
                f"its tensors together are more than {COPIES} times as large as its {self._length:,} bytes"
            )

    def storage(self, name: Any) -> _Stored:
        """Return the storage of a persistent id."""
        word, kind, key, _, elements = name
        if word not in ("storage", b"storage") or not isinstance(kind, StorageType) or type(elements) is not int:
            raise ValueError("it names a storage otherwise than torch does")
        at, size = self._place(f"data/{key}")
        if elements * kind.dtype.itemsize != size:
            raise ValueError(f"a storage of {elements:,} x {kind.dtype.itemsize} bytes has {size:,} in the file")
        if key not in self._storages:
            start = self._start + at
            stored = self._mapped.storage[start : start + size]
            self._storages[key] = stored if not start % 16 else stored.clone()  # aligned for every dtype
        return _Stored(self, self._storages[key], kind.dtype)

    def _record(self, name: str) -> bytes:
        at, size = self._place(name)
        return bytes(self._view[at : at + size])

    def _place(self, name: str) -> tuple[int, int]:
        """Return where a record's bytes begin, and how many there are."""
        info = self._infos[f"{self._folder}/{name}"]
        header = self._view[info.header_offset : info.header_offset + HEADER]
        if len(header) < HEADER or bytes(header[:4]) != b"PK\3\4":
            raise ValueError(f"its record {short(name)} has no header")
        at = info.header_offset + HEADER + sum(int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        if info.compress_type != ZIP_STORED or at + info.file_size > self._length:
            raise ValueError(f"its record {short(name)} is packed, or longer than the file")
        return at, info.file_size


class _Bytes(io.RawIOBase):
    """Bytes in memory as a file, without a copy of them."""

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._view)}[whence]
        if at < 0:
            raise OSError("before the beginning")
        self._at = at
        return at

    def readinto(self, buffer: Any) -> int:
        piece = self._view[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)
