"""Which files are read, and as what.

    format   suffixes                    a document is
    text     .txt .md .text .py          a file
    jsonl    .jsonl .ndjson .json        a line
    npy      .npy                        the array (1-D) or a row of it (2-D)
    parquet  .parquet                    a row

`stdlib` stands for the text of Python's standard library without its tests. Folders are read with
everything below them, in sorted order, without hidden files.
"""

from __future__ import annotations

import difflib
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zero3d.errors import DataError

STDLIB = "stdlib"
SUFFIXES = {
    "text": (".txt", ".md", ".text", ".py"),
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "npy": (".npy",),
    "parquet": (".parquet",),
}
NO_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class Source(NamedTuple):
    """A file and how it is read."""

    path: Path
    format: str


def find_sources(paths: Sequence[str], format: str = "auto") -> list[Source]:
    """All files behind `paths`, each folder's sorted. Raises DataError where there are none."""
    if not paths:
        raise DataError("no data: give data.train files or folders.")
    return [source for path in paths for source in _find(path, format)]


def _find(path: str, format: str) -> list[Source]:
    if path == STDLIB:
        return _library(format)
    place = Path(path).expanduser()
    if place.is_dir():
        return _in_folder(place, format)
    if not place.exists():
        raise DataError(f"{path} does not exist.{_nearest(place)}")
    found = format if format != "auto" else _format_of(place)
    if found is None:
        known = " ".join(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
        raise DataError(
            f"{path}: the suffix {place.suffix or '(none)'} is none of {known}: "
            f"set data.format to {', '.join(SUFFIXES)}."
        )
    return [Source(place.resolve(), found)]


def _in_folder(folder: Path, format: str) -> list[Source]:
    files = list(_visible_files(folder))
    if format == "auto":
        sources = [Source(file.resolve(), found) for file in files if (found := _format_of(file))]
    elif format == "text":  # asked for by name: any file
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
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.rglob("*.py") if not NO_SOURCES & set(file.relative_to(folder).parts))
    if not files:
        raise DataError(f"{folder} holds no Python source: set data.train to files of yours.")
    return [Source(file.resolve(), "text") for file in files]


def _visible_files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts):
            yield path


def _format_of(path: Path) -> str | None:
    suffix = path.suffix.lower()
    return next((name for name, suffixes in SUFFIXES.items() if suffix in suffixes), None)


def _nearest(path: Path) -> str:
    """A sentence with the name that was probably meant; without a folder, the folder is what is missing."""
    if not path.parent.is_dir():
        return f" Neither does its folder {path.parent}."
    near = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
    return f" Did you mean {path.parent / near[0]}?" if near else ""
