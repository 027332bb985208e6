"""A file of records that are written once, such as frozen weights, and read from then on. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from zero3d.errors import CheckpointError, ConfigError, OutOfBudget, remedy_of
from zero3d.memory.blocks import padded
from zero3d.offload.direct_file import DirectFile
from zero3d.offload.disk_slab import ELSEWHERE, FULL
from zero3d.spec.sizes import decimal


class RecordFile:
    """Owns the file; its folder is locked by who has made it. One copy of each record: no step is ever half written."""

    def __init__(self, path: Path, nbytes: Sequence[int]) -> None:
        """Open a file for records of so many bytes. Raises OutOfBudget for a full disk, ConfigError."""
        self.path = path
        self._starts = list(accumulate(map(padded, nbytes), initial=0))
        try:
            self._file = DirectFile(path, self._starts[-1])
        except OSError as error:
            asked = f"{path} takes {decimal(self._starts[-1])} ({self._starts[-1]} bytes of frozen weights)"
            kind = OutOfBudget if error.errno in FULL else ConfigError
            raise kind(
                f"{asked}, and cannot be made ({error.strerror}): {remedy_of(error)}, or {ELSEWHERE}."
            ) from error

    def newest(self, index: int) -> tuple[Path, int]:
        """Return where a record begins: the file, and bytes from its beginning."""
        return self.path, self._starts[index]

    def read(self, index: int, memory: memoryview) -> None:
        """Fill memory, in whole blocks, with a record. Raises CheckpointError."""
        self._move(self._file.read, index, memory)

    def write(self, index: int, memory: memoryview) -> None:
        """Write a record, from memory in whole blocks. Raises CheckpointError."""
        self._move(self._file.write, index, memory)

    def _move(self, move: object, index: int, memory: memoryview) -> None:
        assert callable(move)
        start, stop = self._starts[index : index + 2]
        try:
            move(memory.cast("B")[: stop - start], start)
        except OSError as error:
            raise CheckpointError(
                f"frozen weights ({stop - start} bytes) at byte {start} of {self.path} ({error.strerror}): "
                f"{remedy_of(error)}, and go on from a checkpoint with --resume auto."
            ) from error

    def close(self) -> None:
        """Close the file, which stays."""
        self._file.close()
