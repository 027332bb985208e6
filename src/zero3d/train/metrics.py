"""Writes the record of each step on rank 0: always to metrics.jsonl, and to the trackers that the run names."""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Any, Protocol, Self

from zero3d.config import Config
from zero3d.errors import CheckpointError, remedy_of
from zero3d.train.folder import Folder
from zero3d.train.trackers import Trackers

Record = dict[str, Any]


class Sink(Protocol):
    """Takes one record per step."""

    def write(self, record: Record) -> None:
        """Take a record of plain numbers; a number that is not finite is null."""

    def close(self) -> None:
        """Finish: there are no more records."""


class JsonLines:
    """Writes metrics.jsonl, one line per step, flushed; the first begins a line whatever is before it."""

    def __init__(self, folder: Folder) -> None:
        self._file = folder.metrics.open("ab+")
        if self._file.tell():
            self._file.seek(-1, os.SEEK_END)
            if self._file.read() != b"\n":
                self._file.write(b"\n")

    def write(self, record: Record) -> None:
        self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class Metrics:
    """Owns all sinks of a run; none on other ranks than 0, and none where no step is left.

    first  step of this session
    say    prints one line: of a tracker that fails
    """

    def __init__(
        self,
        folder: Folder,
        config: Config,
        rank: int,
        first: int = 1,
        any_left: bool = True,
        say: Callable[[str], Any] = warnings.warn,
    ) -> None:
        self._sinks: Sequence[Sink] = ()
        if rank == 0 and any_left:
            with told(folder, f"before step {first}"):
                self._sinks = JsonLines(folder), Trackers(folder, config, say)
        self._folder, self._last = folder, first - 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all sinks. Raises CheckpointError when the disk does not take the last of it.

        The error that ends a run is the one reported: a sink that fails after it, as on the same full disk, is silent.
        """
        failing = told(self._folder, f"after step {self._last}") if error is None else suppress(Exception)
        with failing, ExitStack() as stack:
            for sink in self._sinks:
                stack.callback(sink.close)

    def write(self, record: Record) -> None:
        """Write a record to all sinks. Raises CheckpointError when the disk does not take it."""
        values = {k: finite(v) if isinstance(v, float) else v for k, v in record.items()}
        with told(self._folder, f"at step {record['step']}"):
            for sink in self._sinks:
                sink.write(values)
        self._last = record["step"]


@contextmanager
def told(folder: Folder, when: str) -> Iterator[None]:
    """Report an error of the disk: the folder that cannot be written, and the remedy. Raises CheckpointError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            f"cannot write to {folder.root} {when} ({error.strerror or error}): {remedy_of(error)}, then go on from "
            "the last checkpoint with --resume auto."
        ) from error


def finite(value: float) -> float | None:
    """Return the value, or None where it is not finite: JSON has no NaN."""
    return value if math.isfinite(value) else None


def losses(history: Sequence[Mapping[str, Any]], name: str = "loss") -> list[float]:
    """Return one field of all records; NaN where it is missing."""
    return [math.nan if record.get(name) is None else float(record[name]) for record in history]
