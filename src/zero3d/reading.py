"""Small files of other people as text and as JSON: regular files of a bounded size, every fault in words.

fault                                          told as
---------------------------------------------  ------------------------------------------------
a pipe, a device, a socket                     Unreadable: nobody waits for what never ends; the open file says
                                               what it is, since a name may mean another one a moment later
more bytes than are read, no UTF-8, no JSON    Unreadable
a key twice, for who asks for unique keys      Unreadable
no object, or nested deeper than Python goes   Unreadable
missing, a folder, forbidden                   OSError, as Python has it; read_object makes it Unreadable, too
"""

from __future__ import annotations

import json
import os
import stat
from errno import EISDIR
from io import BufferedReader
from pathlib import Path
from typing import Any

from zero3d.errors import short

MOST = 64 << 20  # bytes; the largest index of a published model has about 10 MB
ODD = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class Unreadable(ValueError):
    """Why a file cannot be used, in words that follow its name."""


def what_it_is(mode: int) -> str:
    """Return in words what a file of this mode is that is not a regular one."""
    return ODD.get(stat.S_IFMT(mode), "no regular file")


def check_regular(path: Path) -> int:
    """Return the size of a regular file in bytes.

    Raises OSError for one that is missing or a folder, Unreadable for pipes and devices.
    """
    return _size(path.stat(), path)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, behind a link or not, without waiting. Raises OSError and Unreadable."""
    check_regular(path)  # some devices do something when they are opened
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _size(os.fstat(file), path)
    except BaseException:
        os.close(file)
        raise
    return os.fdopen(file, "rb")


def read_bytes(path: Path, most: int = MOST) -> bytes:
    """Return the whole of a regular file. Raises OSError and Unreadable."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > most else file.read(most + 1)  # it may grow meanwhile
    if max(size, len(data)) > most:
        raise Unreadable(f"has {max(size, len(data)):,} bytes, and at most {most:,} are read")
    return data


def read_text(path: Path, most: int = MOST) -> str:
    """Return the whole of a text file. Raises OSError and Unreadable."""
    return _decode(read_bytes(path, most))


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file. Raises Unreadable for everything that can be wrong with it."""
    try:
        return parse_object(read_text(path))
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from error


def tensor_places(path: Path) -> dict[str, tuple[int, int, str, tuple[int, ...]]]:
    """Return of each tensor in a safetensors file where its bytes begin and end, its dtype and its shape.

    Raises OSError and Unreadable.
    """
    with open_regular(path) as file:
        length = int.from_bytes(file.read(8), "little")
        size = os.fstat(file.fileno()).st_size
        if not 0 < length <= min(size, MOST):
            raise Unreadable("cannot be read as safetensors")
        header = parse_object(_decode(file.read(length)))
    header.pop("__metadata__", None)
    try:
        return {
            name: (*(8 + length + offset for offset in entry["data_offsets"]), entry["dtype"], tuple(entry["shape"]))
            for name, entry in header.items()
        }
    except (LookupError, TypeError, AttributeError):
        raise Unreadable("cannot be read as safetensors") from None


def parse_object(text: str) -> dict[str, Any]:
    """Return the object that a JSON text is. Raises Unreadable."""
    value = parse_json(text)
    if not isinstance(value, dict):
        raise Unreadable(f"holds a {type(value).__name__} instead of an object")
    return value


def parse_json(text: str | bytes, unique_keys: bool = False) -> Any:
    """Return the value that a JSON text is; with `unique_keys` no object may have a key twice. Raises Unreadable."""
    decoded = _decode(text) if isinstance(text, bytes) else text
    try:
        return json.loads(decoded, object_pairs_hook=_unique if unique_keys else None)
    except Unreadable:
        raise
    except RecursionError:
        raise Unreadable("is nested too deeply") from None
    except ValueError as error:
        raise Unreadable(f"is not JSON: {short(str(error).partition(';')[0])}") from None


def _size(status: os.stat_result, path: Path) -> int:
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR:
        raise IsADirectoryError(EISDIR, os.strerror(EISDIR), str(path))
    if kind != stat.S_IFREG:
        raise Unreadable(f"is {what_it_is(status.st_mode)}, not a regular file: write its contents to one")
    return status.st_size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        keys = [key for key, _ in pairs]
        raise Unreadable(f"has the key {short(ascii(next(key for key in keys if keys.count(key) > 1)))} twice")
    return entries


def _decode(text: bytes) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not UTF-8 text: {error.reason} at byte {error.start}") from None
