"""How the tp or ep axis divides one parameter: shapes, values and boxes of the logical and of the local tensor.

    logical, blocks = 2 (gate and up), tp = 2        local of rank 1
    |  gate 0  |  gate 1  |   up 0   |   up 1   |    |  gate 1  |   up 1   |
    <------- block 0 -----><----- block 1 ------>    <- chunk -> <- chunk ->

Blocks may be segments of unlike lengths, such as queries, keys and values of a convolution's channels.

A box of the local tensor is at most one box of the logical one per block, so that whoever knows flat
ranges of local tensors (units, checkpoints, loading) never sees which rank of which mesh holds what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd, prod
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.errors import ConfigError
from zero3d.shards.boxes import Box, Shape, box_shape, boxes, intersect, slices


class Cut(NamedTuple):
    """Dimension `dim` is `blocks` equal blocks, each cut into `size` equal chunks; or segments of unlike lengths.

    segments  lengths in proportion, one for every block; none where blocks are equal
    Rank `rank` of the axis holds its chunk of every block, one behind the other.
    """

    dim: int
    size: int
    rank: int
    blocks: int = 1
    axis: str = "tp"
    segments: tuple[int, ...] = ()

    @property
    def even_blocks(self) -> int:
        """Return the fewest equal blocks at whose borders every segment begins: tp divides them or no segment."""
        return sum(self.segments) // gcd(*self.segments) if self.segments else self.blocks

    def local_shape(self, shape: Shape) -> Shape:
        """Return the local shape of a logical tensor's. Raises ConfigError where it cannot be cut equally."""
        if self.dim >= len(shape):
            raise ConfigError(
                f"a tensor of shape {shape} has {len(shape)} dimensions, and dimension {self.dim} of it should be cut "
                f"over tp {self.size}: give this parameter another style in the tensor parallel plan."
            )
        length = shape[self.dim]
        if length % (self.even_blocks * self.size):
            raise ConfigError(self._does_not_divide(shape))
        return (*shape[: self.dim], length // self.size, *shape[self.dim + 1 :])

    def logical_shape(self, local: Shape) -> Shape:
        """Return the logical shape of a local tensor's."""
        return (*local[: self.dim], local[self.dim] * self.size, *local[self.dim + 1 :])

    def extract(self, logical: Tensor) -> Tensor:
        """Return a copy of this rank's part of a logical tensor, contiguous and detached. Raises ConfigError."""
        local = self.local_shape(tuple(logical.shape))
        chunks = self._chunks(local[self.dim])
        blocks = torch.split(logical.detach(), [chunk * self.size for chunk in chunks], self.dim)
        own = [block.narrow(self.dim, self.rank * n, n) for block, n in zip(blocks, chunks, strict=True)]
        return torch.cat([part.contiguous() for part in own], self.dim)

    def join(self, locals: Sequence[Tensor]) -> Tensor:
        """Return the logical tensor of all ranks' local ones, in rank order."""
        parts = [torch.split(t, self._chunks(t.shape[self.dim]), self.dim) for t in locals]
        return torch.cat([chunk for block in zip(*parts, strict=True) for chunk in block], self.dim)

    def boxes(self, local_box: Box, local_shape: Shape) -> list[tuple[Box, Box]]:
        """Return a local box as boxes of the logical tensor: (logical box, its part of the local box), in order."""
        pairs, begin = [], 0
        for chunk in self._chunks(local_shape[self.dim]):
            here = (*local_box[: self.dim], (begin, begin + chunk), *local_box[self.dim + 1 :])
            part = intersect(local_box, here)
            if part is not None:
                away = begin * (self.size - 1) + self.rank * chunk  # from local to logical
                start, stop = part[self.dim]
                pairs.append(((*part[: self.dim], (start + away, stop + away), *part[self.dim + 1 :]), part))
            begin += chunk
        return pairs

    def _chunks(self, local: int) -> list[int]:
        """Return the length of this rank's chunk of every block, of so many places in all."""
        segments = self.segments or (1,) * self.blocks
        return [local * segment // sum(segments) for segment in segments]

    def _does_not_divide(self, shape: Shape) -> str:
        length, blocks = shape[self.dim], self.even_blocks
        where = f"dimension {self.dim} of a tensor of shape {shape}"
        if length % blocks:
            return (
                f"{length} is not divisible by blocks {blocks} ({where}): give this parameter a style with "
                "fewer blocks in the tensor parallel plan."
            )
        works = next(tp for tp in range(self.size, 0, -1) if length // blocks % tp == 0)
        instead = f"pass tp={works}, or leave this parameter whole in the tensor parallel plan."
        if self.segments:
            lengths = ", ".join(str(length * segment // sum(self.segments)) for segment in self.segments)
            return f"tp {self.size} does not divide each of {lengths}, the segments of {where}: {instead}"
        requested = f"tp {self.size}" if blocks == 1 else f"blocks {blocks} x tp {self.size}"
        product = "" if blocks == 1 else f" = {blocks * self.size}"
        return f"{length} is not divisible by {requested}{product} ({where}): {instead}"


class Tile(NamedTuple):
    """Rows of a parameter that are a parameter of their own: a flat range of what this rank has of it.

    owner         name of the whole parameter
    shape, start  of this rank's whole parameter, and where in it the tile begins
    """

    owner: str
    shape: Shape
    start: int


def cover(shape: Shape, start: int, values: Tensor, cut: Cut | None = None) -> Iterator[tuple[Box, Tensor]]:
    """Yield a flat range of a parameter as boxes of the logical tensor, in order, each with a view of its values.

    shape   of the parameter as this rank has it: local where there is a cut
    start   of the range, in elements; `values` [n] are those from there on
    """
    offset = 0
    for local_box in boxes(shape, start, start + values.numel()):
        size = box_shape(local_box)
        inside = values[offset : offset + prod(size)].view(size)
        offset += inside.numel()
        for box, part in cut.boxes(local_box, shape) if cut is not None else [(local_box, local_box)]:
            yield box, inside[slices(part, local_box)]
