"""Rows of files with columns, through pyarrow alone: parquet, and Arrow as `Dataset.save_to_disk` writes it.

    parquet   row groups, decoded a batch at a time
    arrow     record batches, mapped: a stream, or a file with an index (it begins with ARROW1)

Of a file one batch is held as Python objects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError, DataError

ROWS = 1024  # made to Python objects at once
MAGIC = b"ARROW1"
Rows = list[dict[str, Any]]


class NoColumn(ValueError):
    """A file without any of the columns wanted. columns: those it has."""

    def __init__(self, columns: Sequence[str]) -> None:
        super().__init__(f"the columns are {', '.join(columns)}")
        self.columns = columns


def read_rows(path: Path, format: str, wanted: Sequence[str], passed: Callable[[int], None]) -> Iterator[Rows]:
    """Yield the rows of a file with those of the columns wanted that it has; `passed` is told how many bytes they were.

    Raises NoColumn, DataError, ConfigError.
    """
    with pyarrow_errors(path, format):
        yield from (_parquet if format == "parquet" else _arrow)(path, wanted, passed)


def columns_of(path: Path, format: str) -> list[str]:
    """Return the names of a file's columns. Raises DataError, ConfigError."""
    with pyarrow_errors(path, format):
        if format == "arrow":
            return list(open_arrow(path).column_names)
        from pyarrow import parquet

        return list(parquet.ParquetFile(path).schema_arrow.names)


@contextmanager
def pyarrow_errors(path: Path, format: str) -> Iterator[None]:
    """Say in one line what pyarrow cannot read, or that it is not there."""
    try:
        from pyarrow import ArrowException
    except ImportError:
        raise ConfigError(f"{path}: reading {format} needs pyarrow: type pip install 'zero3d[data]'.") from None
    try:
        yield
    except ArrowException as error:
        raise DataError(
            f"{path} is not {'a parquet' if format == 'parquet' else 'an Arrow'} file that can be read: {error}"
        ) from error


def open_arrow(path: Path) -> Any:
    """Return an Arrow file's table, mapped: nothing of it is read before it is looked at."""
    import pyarrow

    mapped = pyarrow.memory_map(str(path))
    is_file = mapped.read(len(MAGIC)) == MAGIC
    mapped.seek(0)
    return (pyarrow.ipc.open_file if is_file else pyarrow.ipc.open_stream)(mapped).read_all()


def chosen(columns: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Return those of the columns that are wanted. Raises NoColumn where none is."""
    if found := [name for name in columns if name in wanted]:
        return found
    raise NoColumn(columns)


def _parquet(path: Path, wanted: Sequence[str], passed: Callable[[int], None]) -> Iterator[Rows]:
    from pyarrow import parquet

    file = parquet.ParquetFile(path)
    size, count = path.stat().st_size, file.metadata.num_rows
    for batch in file.iter_batches(batch_size=ROWS, columns=chosen(file.schema_arrow.names, wanted)):
        passed(size * len(batch) // count)
        yield batch.to_pylist()


def _arrow(path: Path, wanted: Sequence[str], passed: Callable[[int], None]) -> Iterator[Rows]:
    table = open_arrow(path)
    size, count = path.stat().st_size, len(table)
    for batch in table.select(chosen(table.column_names, wanted)).to_batches(max_chunksize=ROWS):
        passed(size * len(batch) // count)
        yield batch.to_pylist()
