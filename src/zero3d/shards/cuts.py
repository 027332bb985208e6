"""How the tp or ep axis divides one parameter: shapes, values and boxes of the logical and of the local tensor.

    logical, blocks = 2 (gate and up), tp = 2        local of rank 1
    |  gate 0  |  gate 1  |   up 0   |   up 1   |    |  gate 1  |   up 1   |
    <------- block 0 -----><----- block 1 ------>    <- chunk -> <- chunk ->

A box of the local tensor is at most one box of the logical one per block, so that whoever knows flat
ranges of local tensors (units, checkpoints, loading) never sees which rank of which mesh holds what.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.errors import ConfigError
from zero3d.shards.boxes import Box, Shape, box_shape, boxes, intersect, slices


class Cut(NamedTuple):
    """Dimension `dim` is `blocks` equal blocks, each cut into `size` equal chunks.

    Rank `rank` of the axis holds its chunk of every block, one behind the other.
    """

    dim: int
    size: int
    rank: int
    blocks: int = 1
    axis: str = "tp"

    def local_shape(self, shape: Shape) -> Shape:
        """Return the local shape of a logical tensor's. Raises ConfigError where it cannot be cut equally."""
        if self.dim >= len(shape):
            raise ConfigError(
                f"a tensor of shape {shape} has {len(shape)} dimensions, and dimension {self.dim} of it should be cut "
                f"over tp {self.size}: give this parameter another style in the tensor parallel plan."
            )
        length = shape[self.dim]
        if length % (self.blocks * self.size):
            raise ConfigError(self._does_not_divide(shape))
        return (*shape[: self.dim], length // self.size, *shape[self.dim + 1 :])

    def logical_shape(self, local: Shape) -> Shape:
        """Return the logical shape of a local tensor's."""
        return (*local[: self.dim], local[self.dim] * self.size, *local[self.dim + 1 :])

    def extract(self, logical: Tensor) -> Tensor:
        """Return a copy of this rank's part of a logical tensor, contiguous and detached. Raises ConfigError."""
        local = self.local_shape(tuple(logical.shape))
        before, chunk, after = local[: self.dim], local[self.dim] // self.blocks, local[self.dim + 1 :]
        chunks = logical.detach().reshape(*before, self.blocks, self.size, chunk, *after)
        chunk_of_rank = chunks.select(self.dim + 1, self.rank)
        return chunk_of_rank.clone(memory_format=torch.contiguous_format).view(local)

    def join(self, locals: Sequence[Tensor]) -> Tensor:
        """Return the logical tensor of all ranks' local ones, in rank order."""
        local = tuple(locals[0].shape)
        before, chunk, after = local[: self.dim], local[self.dim] // self.blocks, local[self.dim + 1 :]
        parts = [t.reshape(*before, self.blocks, chunk, *after) for t in locals]
        return torch.stack(parts, self.dim + 1).view(self.logical_shape(local))

    def boxes(self, local_box: Box, local_shape: Shape) -> list[tuple[Box, Box]]:
        """Return a local box as boxes of the logical tensor: (logical box, its part of the local box), in order."""
        chunk = local_shape[self.dim] // self.blocks
        pairs = []
        for block in range(self.blocks):
            here = (*local_box[: self.dim], (block * chunk, (block + 1) * chunk), *local_box[self.dim + 1 :])
            part = intersect(local_box, here)
            if part is not None:
                away = (block * (self.size - 1) + self.rank) * chunk  # from local to logical
                start, stop = part[self.dim]
                pairs.append(((*part[: self.dim], (start + away, stop + away), *part[self.dim + 1 :]), part))
        return pairs

    def _does_not_divide(self, shape: Shape) -> str:
        length = shape[self.dim]
        where = f"dimension {self.dim} of a tensor of shape {shape}"
        if length % self.blocks:
            return (
                f"{length} is not divisible by blocks {self.blocks} ({where}): give this parameter a style with "
                "fewer blocks in the tensor parallel plan."
            )
        requested = f"tp {self.size}" if self.blocks == 1 else f"blocks {self.blocks} x tp {self.size}"
        product = "" if self.blocks == 1 else f" = {self.blocks * self.size}"
        works = next(tp for tp in range(self.size, 0, -1) if length // self.blocks % tp == 0)
        return (
            f"{length} is not divisible by {requested}{product} ({where}): pass tp={works}, or leave this parameter "
            "whole in the tensor parallel plan."
        )


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
