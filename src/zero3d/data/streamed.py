"""Records of local files by index (`data.streaming`): nothing is tokenized or kept before a batch needs it.

    jsonl     every STRIDE-th record's place; from there on lines are read
    parquet   rows before each row group; the last group that was read is held
    arrow     rows of a mapped table
    text      a file

Only the index is held: 16 bytes for STRIDE lines. Every rank makes it, and its workers get it.
"""

from __future__ import annotations

import codecs
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy

from zero3d.data.columns import NoColumn, chosen, open_arrow, pyarrow_errors
from zero3d.data.files import Source
from zero3d.data.json_list import LONGEST
from zero3d.data.orders import Ints
from zero3d.data.records import (
    COLUMNS,
    LOOK,
    BadRecord,
    parse_line,
    raw_lines,
    read_text,
    row_of,
    too_long,
    wanted_keys,
)
from zero3d.errors import ConfigError, DataError

STRIDE = 64  # lines from one known place to the next
ENDS = 1 << 20  # bytes at both ends of a file that its digest is of


class RecordFile(Protocol):
    """A file whose records are read by number.

    unread  its columns at which nobody looks
    """

    count: int
    unread: Sequence[str]

    def record(self, number: int) -> Mapping[str, Any] | BadRecord:
        """Return a record, as an object with known keys."""

    def place(self, number: int) -> str:
        """Return what a message calls a record."""


class StreamedRecords:
    """Records of all files, one file's after another's. Pickling carries the index.

    beat  called now and then while files are looked through
    Raises DataError, ConfigError.
    """

    where = "file"

    def __init__(self, sources: Sequence[Source], beat: Callable[[], None] = lambda: None) -> None:
        self.name = str(sources[0].path) + (f" and {len(sources) - 1:,} more" if len(sources) > 1 else "")
        self._files = [_opened(source, beat) for source in sources]
        self._ends = list(accumulate(file.count for file in self._files))
        self.unread: Sequence[str] = sorted({name for file in self._files for name in file.unread})
        self.count = self._ends[-1]
        if not self.count:
            raise DataError(f"no record: {self.name} hold nothing to train on.")
        kinds = [f"{source.format} {_digest(source.path)}" for source in sources]
        self.says = " ".join([*kinds, str(self.count)])

    def place(self, index: int) -> str:
        """Return the file and line of a record."""
        file, number = self._find(index)
        return file.place(number)

    def item(self, index: int) -> Mapping[str, Any]:
        """Return a record. Raises DataError for one that cannot be used."""
        file, number = self._find(index)
        try:
            record = file.record(number)
        except OSError as error:
            raise DataError(f"{file.place(number)} cannot be read: {error.strerror or error}.") from error
        if isinstance(record, BadRecord):
            raise DataError(f"{record.place}: {record.why.removesuffix('.')}. Correct it in the {self.where}.")
        return record

    @property
    def lengths(self) -> Ints:
        """Raises ConfigError: how long a record is shows when it is tokenized."""
        raise ConfigError(
            "data.group_by_length sorts by length, and with data.streaming=true nobody knows how long a record is "
            "before a batch needs it: set one of them to false."
        )

    def _find(self, index: int) -> tuple[RecordFile, int]:
        at = int(numpy.searchsorted(self._ends, index, side="right"))
        return self._files[at], index - (self._ends[at - 1] if at else 0)


def _opened(source: Source, beat: Callable[[], None]) -> RecordFile:
    try:
        match source.format:
            case "jsonl":
                return _Lines(source.path, beat)
            case "parquet":
                return _Parquet(source.path)
            case "arrow":
                return _Arrow(source.path)
            case "text":
                return _Text(source.path)
    except OSError as error:
        raise DataError(f"{source.path} cannot be read: {error.strerror or error}.") from error
    except NoColumn as error:
        raise DataError(f"{source.path}: {wanted_keys(error.columns)}") from None
    raise ConfigError(f"{source.path} has token ids already, which are not streamed: set data.streaming=false.")


def _digest(path: Path) -> str:
    """Hash a file's size and its two ends: the same wherever it lies, without reading all."""
    size = path.stat().st_size
    with path.open("rb") as file:
        found = hashlib.sha256(str(size).encode() + file.read(ENDS))
        file.seek(max(size - ENDS, 0))
        found.update(file.read(ENDS))
    return found.hexdigest()


class _Lines:
    unread: Sequence[str] = ()

    def __init__(self, path: Path, beat: Callable[[], None]) -> None:
        self._path = path
        known: list[tuple[int, int]] = []
        self.count = 0
        with path.open("rb") as file:
            if file.read(LOOK).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
                raise ConfigError(
                    f"{path} is one JSON list, and data.streaming reads a record a line: write it as "
                    "lines, or set data.streaming=false."
                )
            file.seek(0)
            offset = 0
            for line, (raw, length) in enumerate(raw_lines(file), 1):
                if length > LONGEST or raw.strip():
                    if self.count % STRIDE == 0:
                        known.append((offset, line))
                        beat()
                    self.count += 1
                offset += length
        self._known = numpy.asarray(known, numpy.int64).reshape(-1, 2)

    def place(self, number: int) -> str:
        return self._find(number)[1]

    def record(self, number: int) -> Mapping[str, Any] | BadRecord:
        raw, place = self._find(number)
        return too_long(place) if len(raw) > LONGEST else parse_line(raw, place)

    def _find(self, number: int) -> tuple[bytes, str]:
        """Return a record's line and its place."""
        offset, line = (int(value) for value in self._known[number // STRIDE])
        with self._path.open("rb") as file:
            file.seek(offset)
            left = number % STRIDE
            for at, (raw, length) in enumerate(raw_lines(file), line):
                if length > LONGEST or raw.strip():
                    if not left:
                        return raw.removeprefix(codecs.BOM_UTF8) if at == 1 else raw, f"{self._path}:{at}"
                    left -= 1
        raise DataError(f"{self._path} has become shorter since this run began: leave data alone while they are read.")


class _Text:
    count = 1
    unread: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self._path = path

    def place(self, number: int) -> str:
        return str(self._path)

    def record(self, number: int) -> Mapping[str, Any]:
        return {"text": read_text(self._path)}


class _Arrow:
    def __init__(self, path: Path) -> None:
        self._path = path
        with pyarrow_errors(path, "arrow"):
            table = open_arrow(path)
            self._table: Any = table.select(chosen(table.column_names, COLUMNS))
            self.unread: Sequence[str] = [name for name in table.column_names if name not in COLUMNS]
        self.count = len(self._table)

    def __reduce__(self) -> tuple[type[_Arrow], tuple[Path]]:
        return _Arrow, (self._path,)  # mapped again

    def place(self, number: int) -> str:
        return f"{self._path}:row {number + 1}"

    def record(self, number: int) -> Mapping[str, Any]:
        return row_of(self._table.slice(number, 1).to_pylist()[0])


class _Group(NamedTuple):
    number: int
    table: Any


class _Parquet:
    def __init__(self, path: Path) -> None:
        self._path = path
        with pyarrow_errors(path, "parquet"):
            self._file = self._open()
            names = self._file.schema_arrow.names
            self._columns = chosen(names, COLUMNS)
            self.unread: Sequence[str] = [name for name in names if name not in COLUMNS]
            self._ends = list(accumulate(_rows_of_groups(self._file.metadata)))
        self.count = self._ends[-1] if self._ends else 0
        self._group = _Group(-1, None)

    def __reduce__(self) -> tuple[type[_Parquet], tuple[Path]]:
        return _Parquet, (self._path,)

    def _open(self) -> Any:
        from pyarrow import parquet

        return parquet.ParquetFile(self._path)

    def place(self, number: int) -> str:
        return f"{self._path}:row {number + 1}"

    def record(self, number: int) -> Mapping[str, Any]:
        at = int(numpy.searchsorted(self._ends, number, side="right"))
        with pyarrow_errors(self._path, "parquet"):
            if self._group.number != at:
                self._group = _Group(at, self._file.read_row_group(at, columns=self._columns))
            rows = self._group.table.slice(number - (self._ends[at - 1] if at else 0), 1).to_pylist()
        return row_of(rows[0])


def _rows_of_groups(metadata: Any) -> Iterator[int]:
    return (metadata.row_group(at).num_rows for at in range(metadata.num_row_groups))
