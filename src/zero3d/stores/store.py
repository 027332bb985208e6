"""The objects below a URL, by their names relative to it.

Whatever a file system of fsspec raises becomes an OSError, so that callers tell it as they tell errors of disks:

a missing object or bucket            FileNotFoundError
no right, no or wrong credentials     PermissionError
anything else of the store            ConnectionError, without a number
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from errno import EACCES, ENOENT
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from zero3d.stores.urls import protocol_of

TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "checksum",
    "blob_id",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
OPTIONS = {protocol: {"auto_mkdir": True} for protocol in ("file", "local")}
OF_RIGHTS = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "RefreshError")  # of clients of stores


class Stored(NamedTuple):
    """Describes an object: its bytes, and a text that is another one when they are others."""

    size: int
    tag: str


class Store:
    """Reaches the objects below a URL. Every method raises OSError alone.

    Nothing is kept open, and listings are never remembered.
    """

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        self.url = url.rstrip("/")
        self._fs: Any
        with _errors(self.url):
            self._fs, root = url_to_fs(self.url, **OPTIONS.get(protocol_of(url), {}))
        self._root = root.rstrip("/")
        self._has_folders = protocol_of(url) in OPTIONS

    def objects(self) -> dict[str, Stored]:
        """Return all objects below the URL by name, "" for one that is there itself; nothing where none is.

        A name that would lead out of a folder is left out.
        """
        with _errors(self.url):
            self._fs.invalidate_cache()
            try:
                found = self._fs.find(self._root, detail=True)
                infos = {path: info or self._fs.info(path) for path, info in found.items()}
            except FileNotFoundError:
                return {}
        files = {
            path[len(self._root) :].lstrip("/"): Stored(int(info.get("size") or 0), _tag(info))
            for path, info in infos.items()
            if info.get("type", "file") == "file" and f"{path}/".startswith(f"{self._root}/") and not path.endswith("/")
        }
        return {name: stored for name, stored in files.items() if ".." not in name.split("/")}

    def upload(self, path: Path, name: str) -> None:
        """Write a file of this host as an object."""
        with _errors(self._url_of(name)):
            self._placed(lambda: self._fs.put_file(str(path), self._path(name)))

    def download(self, name: str, path: Path) -> None:
        """Write an object to a file of this host."""
        with _errors(self._url_of(name)):
            self._fs.get_file(self._path(name), str(path))

    def write(self, name: str, data: bytes) -> None:
        """Write a small object."""
        with _errors(self._url_of(name)):
            self._placed(lambda: self._fs.pipe_file(self._path(name), data))

    def read(self, name: str) -> bytes:
        """Return the bytes of a small object."""
        with _errors(self._url_of(name)):
            return bytes(self._fs.cat_file(self._path(name)))

    def copy(self, name: str, target: str) -> None:
        """Copy an object within the store; its bytes do not come here."""
        with _errors(self._url_of(name)):
            self._placed(lambda: self._fs.cp_file(self._path(name), self._path(target)))

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects; none of them need be there. A store that has folders loses those that are empty then."""
        for name in names:
            with _errors(self._url_of(name)):
                with suppress(FileNotFoundError):
                    self._fs.rm_file(self._path(name))
                if self._has_folders:
                    self._remove_empty(PurePosixPath(name).parents)

    def _remove_empty(self, folders: Iterable[PurePosixPath]) -> None:
        """Remove folders below the URL, the innermost first, up to one that has something in it."""
        with suppress(OSError):  # it is not empty: the system looks and removes at once
            for folder in folders:
                if folder.parts:
                    os.rmdir(self._path(str(folder)))

    def _placed(self, write: Callable[[], object]) -> None:
        """Write an object, again where another process has removed its folder, still empty, on the way."""
        for attempts_left in (2, 1, 0):
            try:
                write()
                return
            except FileNotFoundError:
                if not self._has_folders or not attempts_left:
                    raise

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _url_of(self, name: str) -> str:
        return f"{self.url}/{name}" if name else self.url


def _tag(info: Mapping[str, Any]) -> str:
    """Return the first mark by which a store tells bytes apart."""
    return next((f"{key} {info[key]}" for key in TAGS if info.get(key)), "")


@contextmanager
def _errors(url: str) -> Iterator[None]:
    """Raise what a file system says as an OSError that names the URL."""
    try:
        yield
    except FileNotFoundError as error:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), url) from error
    except PermissionError as error:
        raise PermissionError(EACCES, _said(error), url) from error
    except OSError as error:
        if error.errno:
            raise
        raise ConnectionError(f"{url}: {_said(error)}") from error
    except Exception as error:
        if type(error).__name__ in OF_RIGHTS:
            raise PermissionError(EACCES, _said(error), url) from error
        raise ConnectionError(f"{url}: {type(error).__name__}: {_said(error)}") from error


def _said(error: Exception) -> str:
    """Return the text of an error on one line."""
    return " ".join(str(error).split()) or type(error).__name__
