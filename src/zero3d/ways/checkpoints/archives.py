"""Files of torch.save, read by torch.load(weights_only=True): mapped, and only such as lie in the folder.

torch.load names what it does not load. Such classes are stood in for (restricted.py), so that what a program has saved
beside its tensors does not keep them from being read. What torch.load leaves open is checked here:

    its pickle     nests no deeper than hashing can follow, which ends the process
    its records    are stored as they are: a mapped one is taken for the tensor's bytes
    its tensors    are strided ones in memory, and all together at most COPIES times as large as the file: some of an
                   ordinary file show the same storage, or are expanded
"""

from __future__ import annotations

import io
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero3d.errors import CheckpointError, short
from zero3d.ways.checkpoints.restricted import Inert, check_pickle, told

COPIES, SMALL = 16, 64 << 20  # bytes that tensors may show for each of a file, and of a small one
PROTOCOL = 2  # of pickles by torch.save, whose instructions torch.load knows
NEVER = ("nt", "os", "posix", "sys")  # modules that torch.load lets nobody stand in for


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
    """Read what torch.save has written to a file, or to a part of it. Raises CheckpointError.

    The tensors of a file stay in it until they are read; those of a part are copied.
    """
    size = mapped.storage.nbytes()
    length = size - start if length is None else length
    if not (0 <= start <= start + length <= size):
        raise CheckpointError(
            f"{mapped.path} has {size:,} bytes, and bytes {start:,} to {start + length:,} of it are wanted: copy it "
            "again."
        )
    part = None if length == size else mapped.view[start : start + length]
    return told(mapped.path, lambda: _read(mapped.path, part, length))


def _read(path: Path, part: memoryview | None, size: int) -> Any:
    def source() -> Any:
        return str(path) if part is None else _Bytes(part)

    with ZipFile(source()) as archive:
        if packed := [info.filename for info in archive.infolist() if info.compress_type != ZIP_STORED]:
            raise ValueError(f"its record {short(packed[0])} is packed")
    text = torch._C.PyTorchFileReader(source()).get_record("data.pkl")
    filled = check_pickle(text)
    if text[:1] == b"\x80" and text[1] > PROTOCOL:
        raise ValueError(f"it is a pickle of protocol {text[1]}, and torch.load reads {PROTOCOL}: save it with that")
    names = get_unsafe_globals_in_checkpoint(source())
    if never := [name for name in names if name.startswith(tuple(f"{module}." for module in NEVER))]:
        raise ValueError(f"it names {short(min(never))}, which no checkpoint needs")
    with safe_globals([(filled.get(name, Inert), name) for name in names]):
        found = torch.load(source(), map_location="cpu", mmap=part is None, weights_only=True)
    _check_tensors(found, size)
    return found


def _check_tensors(found: Any, size: int) -> None:
    """Raise ValueError for tensors of other kinds, or that show too much; all of them are made to need no gradients."""
    room, seen, waiting = COPIES * size + SMALL, set(), [found]
    while waiting:
        if id(value := waiting.pop()) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_conj() or value.is_neg():
                raise ValueError(f"it has a tensor that is {value.layout} on {value.device}, conjugate or negated")
            value.requires_grad_(False)
            room -= value.numel() * value.itemsize
            if room < 0:
                raise ValueError(f"its tensors together are more than {COPIES} times as large as its {size:,} bytes")
        elif isinstance(value, (list, tuple, dict)):
            waiting += value.values() if isinstance(value, dict) else value


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
