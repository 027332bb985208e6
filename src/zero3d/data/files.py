"""Which files are read, and as what.

    format   suffixes                    a document is
    text     .txt .md .text .py          a file
    jsonl    .jsonl .ndjson .json        a line
    npy      .npy                        the array (1-D) or a row of it (2-D)
    parquet  .parquet                    a row
    arrow    .arrow                      a row

`stdlib` stands for the text of Python's standard library without its tests. Folders are read with
everything below them, in sorted order, without hidden files; those of the datasets library as it wrote them. Links are
followed, and each real file is read once, however many lead to it.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from zero3d.config.hints import LIKE, nearest
from zero3d.config.sections import Data
from zero3d.config.sources import Part, names_function, parts_of
from zero3d.data.fetched import objects_of
from zero3d.data.saved_datasets import SPLITS, files_of, is_bookkeeping, is_saved, split_of
from zero3d.errors import DataError, short
from zero3d.reading import Unreadable, check_regular
from zero3d.stores.urls import is_url

STDLIB = "stdlib"
FILL_ME = "FILL-ME"  # in the place of data and a tokenizer, in a file that a plan has written for a preset
HELD_OUT = "validation"  # the split of a folder with several that data.validation means
SUFFIXES = {
    "text": (".txt", ".md", ".text", ".py"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "npy": (".npy",),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source(NamedTuple):
    """A file and how it is read."""

    path: Path
    format: str


def find_sources(paths: Sequence[str], format: str = "auto", split: str = "train") -> list[Source]:
    """Return all files behind `paths`, each folder's sorted. Raises DataError where there are none.

    split  taken of a folder with several
    """
    if not paths:
        raise DataError("no data: give data.train files or folders.")
    return [source for path in paths for source in _find(path, format, split)]


def parts_of_data(data: Data) -> list[Part]:
    """Return all that is read, to train on and to evaluate on."""
    held_out = parts_of(data.validation, data.format, HELD_OUT) if isinstance(data.validation, tuple) else []
    return parts_of(data.train, data.format) + held_out


def function_of(part: Part) -> str | None:
    """Return the function that a part names as module:function; None where it names files."""
    path = part.paths[0]
    return path if names_function(path) and not os.path.exists(path) else None


def check_paths(data: Data) -> None:
    """Refuse files that are not there, and folders and URLs without any, by their names. Raises DataError."""
    for part in parts_of_data(data):
        for path in () if function_of(part) else part.paths:
            if is_url(path):
                objects_of(path)
            else:
                check_path(path, part.format)


def named_formats(data: Data) -> dict[str, str]:
    """Return the format of each path whose name tells it, without a look into a folder but for a saved dataset's."""
    named = [(path, part.format) for part in parts_of_data(data) if not function_of(part) for path in part.paths]
    return {path: known for path, format in named if (known := _named_format(path, format)) is not None}


def _named_format(path: str, format: str) -> str | None:
    if format != "auto":
        return format
    place = _place(path)
    return "text" if path == STDLIB else "arrow" if is_saved(place) else _format_of(place)


def check_path(path: str, format: str) -> None:
    """Refuse a file that is not there or cannot be read, and a folder without one. Raises DataError.

    A folder is read up to the first name that fits: it may be large, and ranks list it once more.
    """
    if path == FILL_ME:
        raise DataError(f"data.train={FILL_ME} stands for the data: name them, with data.train=FILES.")
    if path == STDLIB or not _is_folder(place := _place(path)) or not any(_may_be_read(place, format)):
        _find(path, format, "")


def _may_be_read(folder: Path, format: str) -> Iterator[bool]:
    """Yield for each name below a folder whether files like it are read."""
    for path in _below(folder):
        yield (
            path.name == SPLITS or format == "text" or _format_of(path) in (SUFFIXES if format == "auto" else (format,))
        )


def _find(path: str, format: str, split: str) -> list[Source]:
    if path == STDLIB:
        return _library(format)
    place = _place(path)
    if _is_folder(place):
        return _in_folder(split_of(place, split), format)
    known_format = format if format != "auto" else _format_of(place)
    if known_format is None:
        known = " ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise DataError(
            f"{path}: the suffix {place.suffix or '(none)'} is none of {known}: "
            f"set data.format to {', '.join(SUFFIXES)}."
        )
    return [Source(place.resolve(), known_format)]


def _in_folder(folder: Path, format: str) -> list[Source]:
    if is_saved(folder) and format in ("auto", "arrow"):
        return [Source(file.resolve(), "arrow") for file in files_of(folder)]
    files = _visible_files(folder)
    if format == "auto":
        sources = [Source(file.resolve(), known) for file in files if (known := _format_of(file))]
    elif format == "text":  # named: any file
        sources = [Source(file.resolve(), format) for file in files]
    else:
        sources = [Source(file.resolve(), format) for file in files if _format_of(file) == format]
    if not sources:
        wanted = [suffix for name, suffixes in SUFFIXES.items() if format in ("auto", name) for suffix in suffixes]
        raise DataError(f"the folder {folder} holds {len(files)} files, none of which ends in {' '.join(wanted)}.")
    return sources


def _library(format: str) -> list[Source]:
    if format not in ("auto", "text"):
        raise DataError(f"stdlib is text, and data.format is {format}: leave it at auto.")
    folder, files = Path(sysconfig.get_path("stdlib")), []
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in NO_SOURCES]  # not entered: packages are most of the files
        files += [Path(place, name) for name in names if name.endswith(".py")]
    if not files:
        raise DataError(f"{folder} holds no Python source: set data.train to files of yours.")
    return [Source(file.resolve(), "text") for file in sorted(files)]


def _visible_files(folder: Path) -> list[Path]:
    """Return the files below a folder, without hidden ones. Raises DataError for what cannot be read or followed."""
    files: dict[tuple[int, int], Path] = {}
    for path in sorted(_below(folder)):
        if path.name == SPLITS:
            raise DataError(f"{path.parent} is a DatasetDict, below {folder}: name it, or one of its splits, itself.")
        if path.is_file():
            if not is_bookkeeping(path):
                at = path.stat()
                files.setdefault((at.st_dev, at.st_ino), path)  # one file, whatever links, hard ones too, lead to it
        elif path.is_symlink() and not path.exists():
            raise DataError(_missing(path).replace("or name the file", "or remove it"))
        elif _format_of(path):  # a pipe, under the name of data
            _check_readable(path)
    return list(files.values())


def _below(folder: Path) -> Iterator[Path]:
    """Yield all that is below a folder but folders and what is hidden, each real folder's once."""
    seen: set[str] = set()
    for place, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        real = os.path.realpath(place)
        if real in seen:  # links in a circle, or two to one folder
            folders.clear()
            continue
        seen.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (Path(place, name) for name in names if not name.startswith("."))


def _refuse(error: OSError) -> None:
    raise DataError(f"{short(error.filename)} cannot be read: {error.strerror}.") from error


def _format_of(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return next((name for name, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def _place(path: str) -> Path:
    return Path(os.path.expanduser(path))  # a Path's own raises for a user who is not there


def _is_folder(place: Path) -> bool:
    """Return whether it is a folder, and not a regular file. Raises DataError for all that is neither."""
    try:
        _check_readable(place)
    except IsADirectoryError:
        return True
    return False


def _check_readable(place: Path) -> None:
    """Raise DataError for what is not a regular file, IsADirectoryError for a folder."""
    try:
        check_regular(place)
    except IsADirectoryError:
        raise
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(_missing(place)) from None
    except Unreadable as error:
        raise DataError(f"{place} {error}.") from None
    except OSError as error:
        raise DataError(f"{short(place)} cannot be read: {error.strerror}.") from None


def _missing(place: Path) -> str:
    """Say what is missing: the target of a link, the folder, or the file, with the name that was probably meant."""
    if place.is_symlink():
        return f"{place} is a link to {place.readlink()}, which does not exist: make the link anew, or name the file."
    if not place.parent.is_dir():
        return f"{place} does not exist. Neither does its folder {place.parent}."
    with suppress(OSError):  # a folder that may be entered but not listed
        near = nearest(place.name, [other.name for other in place.parent.iterdir()], cutoff=LIKE)
        return f"{place} does not exist." + (f" Did you mean {place.parent / near}?" if near else "")
    return f"{place} does not exist."
