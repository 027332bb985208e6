"""States of a checkpoint in one process, without an engine: any flat range of any state, whatever mesh has saved it.

    boxes of all ranks  -->  Reader (restore.py)  -->  ranges of at most CHUNK elements, in order

A range is assembled from the boxes that overlap it, so that no more than a range is ever in memory, and of mapped files
no more than REOPEN_BYTES.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf, nan, prod, sqrt
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor

from zero3d.checkpoint.folders import find
from zero3d.checkpoint.integrity import check_header, header
from zero3d.checkpoint.manifest import AVERAGE, BUFFER, MASTER, STREAM, ParameterSpec, Part, TensorSpec
from zero3d.checkpoint.manifest_parser import open_manifest, read_contents
from zero3d.checkpoint.restore import Reader
from zero3d.checkpoint.state import StatePiece
from zero3d.errors import CheckpointError

CHUNK = 1 << 22  # elements
REOPEN_BYTES = 1 << 28


class Own(NamedTuple):
    """Describes what a rank has of its own in its file: buffers, random states, and those of Python."""

    file: str
    buffers: dict[str, TensorSpec]
    streams: dict[str, TensorSpec]
    python_rng: Any


class StoredStates:
    """Owns the open files of one checkpoint, and knows which boxes of which states are in them.

    parameters  by name
    states      parameter -> its states -> dtype
    own         of each rank
    trained     which state of a trainable parameter its weight is made of: the master, or the average

    Manifest, parts and headers are checked, bytes of tensors are not: `integrity.verify`. Raises CheckpointError.
    """

    def __init__(self, directory: Path, averages: bool = False) -> None:
        """Open a checkpoint, or the newest in a directory of them; averages: weights are to be made of those."""
        self.folder = find(directory)
        self.manifest = open_manifest(self.folder)
        self.states: dict[str, dict[str, torch.dtype]] = {}
        self.own: list[Own] = []
        self._reader, self._read = Reader(self.folder), 0
        contents = read_contents(self.manifest, self._take)
        self.scalars = contents.scalars
        self.parameters: dict[str, ParameterSpec] = dict(contents.parameters)
        self.trained = AVERAGE if averages else MASTER
        if averages and not any(AVERAGE in states for states in self.states.values()):
            raise CheckpointError(
                f"{self.folder} has no averages of weights: it was saved without train.ema. Leave --ema out."
            )

    def _take(self, rank: int, part: Part) -> None:
        check_header(self.manifest, part)
        stored = header(self.folder / part.file)
        for row in part.rows:
            self._reader.add(part.file, row)
            self.states.setdefault(row.name, {})[row.state] = getattr(torch, stored[row.key].dtype)
        buffers, streams = (
            {key.removeprefix(kind): spec for key, spec in part.own.items() if key.startswith(kind)}
            for kind in (BUFFER, STREAM)
        )
        self.own.append(Own(part.file, buffers, streams, part.python_rng.value))

    def chunks(self, name: str, state: str) -> Iterator[tuple[int, Tensor]]:
        """Yield a state of a parameter in flat ranges: (first element, values [n]), each in memory of its own."""
        shape, dtype = self.parameters[name].shape, self.states[name][state]
        total = prod(shape)
        for start in range(0, total, CHUNK):
            values = torch.empty(min(CHUNK, total - start), dtype=dtype)
            self._reader.fill(StatePiece(name, state, shape, start, values))
            self._read += values.nbytes
            if self._read > REOPEN_BYTES:
                self._reader.close()
                self._read = 0
            yield start, values

    def own_tensor(self, rank: int, key: str) -> Tensor:
        """Return a buffer or a random state of one rank, by its key in the file."""
        with safe_open(self.folder / self.own[rank].file, framework="pt") as file:
            tensor: Tensor = file.get_tensor(key).clone()
            return tensor


class Statistics(NamedTuple):
    """Describes the values of a tensor; those of the finite ones, but for the count of the others."""

    elements: int
    least: float
    most: float
    mean: float
    deviation: float
    norm: float
    zeros: int
    nonfinite: int


def statistics(stored: StoredStates, name: str, state: str) -> Statistics:
    """Return statistics of one state of a parameter, taken in fp64, range by range."""
    elements = count = zeros = nonfinite = 0
    least, most, mean, spread, square = inf, -inf, 0.0, 0.0, 0.0
    for _, values in stored.chunks(name, state):
        wide = (torch.view_as_real(values).flatten() if values.is_complex() else values).double()
        finite = wide[wide.isfinite()]
        elements, nonfinite = elements + wide.numel(), nonfinite + wide.numel() - finite.numel()
        if not finite.numel():
            continue
        zeros += int((finite == 0).sum())
        least, most = min(least, float(finite.min())), max(most, float(finite.max()))
        square += float(finite.square().sum())
        new, apart = float(finite.mean()), float(finite.mean()) - mean
        together = count + finite.numel()
        spread += float((finite - new).square().sum()) + apart * apart * count * finite.numel() / together
        mean += apart * finite.numel() / together
        count = together
    if not count:
        return Statistics(elements, nan, nan, nan, nan, nan, zeros, nonfinite)
    return Statistics(elements, least, most, mean, sqrt(spread / count), sqrt(square), zeros, nonfinite)
