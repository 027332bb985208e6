"""Files of this user in folders that others may write to, such as /dev/shm: of what lies there nothing else is used.

folder   is private where it is this user's, no link, and closed to all others: names there can be computed, and taken,
         by anybody
read     a regular file of this user, opened without waiting and through no link, and no more of it than is asked for;
         what it is, the open file says (fstat), since a name may mean another one a moment later
made     under a name that is free (O_EXCL), so never through a link; `write_whole` puts it in place when it is whole

All that is not so is an OSError: whoever looks for what others left goes on without it.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from errno import EEXIST, EPERM
from pathlib import Path

from zero3d.errors import ConfigError, remedy_of
from zero3d.reading import what_it_is

FOR_ALL, PRIVATE = 0o666, 0o600  # modes of new files; the umask takes from them


@contextmanager
def private_folder(prefix: str = "zero3d-") -> Iterator[Path]:
    """Make a temporary folder that is private, removed at the end. Raises ConfigError where none can be made."""
    with no_room_told(None):
        folder = tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    with folder as path:
        yield Path(path)


@contextmanager
def no_room_told(place: Path | None) -> Iterator[None]:
    """Say of an error of the temporary folder, or of one that is made there, what to type. Raises ConfigError."""
    try:
        yield
    except OSError as error:
        named = Path(error.filename).parent if isinstance(error.filename, str) else place
        where = "" if named is None else f" {named}"
        raise ConfigError(
            f"nothing can be made in the temporary folder{where} ({error.strerror}): {remedy_of(error)}, or name "
            "another with TMPDIR=FOLDER."
        ) from error


def is_private(folder: Path) -> bool:
    """Return whether a folder is this user's, no link, and closed to all others."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            found = os.fstat(opened)
        finally:
            os.close(opened)
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
    return False


def open_own(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file of this user; return its descriptor. Raises OSError for anything else."""
    file = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(EEXIST, f"it is {what_it_is(found.st_mode)}", str(path))
        if found.st_uid != os.getuid():
            raise PermissionError(EPERM, f"it is user {found.st_uid}'s, and this is user {os.getuid()}", str(path))
    except BaseException:
        os.close(file)
        raise
    return file


def read_own(path: Path, most: int, start: int = 0) -> bytes:
    """Return at most `most` bytes of a regular file of this user, from byte `start` on. Raises OSError."""
    with os.fdopen(open_own(path), "rb") as file:
        file.seek(start)
        return file.read(most)


def create_own(path: Path, mode: int = PRIVATE) -> int:
    """Make a file in the place of one that has its name; return its descriptor, to read and write. Raises OSError."""
    with suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)


def write_whole(path: Path, text: str, mode: int = FOR_ALL) -> None:
    """Write a text file beside itself and put it in place: readers find all of it or the one before. Raises OSError."""
    fresh = path.with_name(f".{path.name}.new")
    try:
        with os.fdopen(create_own(fresh, mode), "w", encoding="utf-8") as file:
            file.write(text)
        fresh.replace(path)
    except OSError:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)  # it would take what little room there is
        raise
