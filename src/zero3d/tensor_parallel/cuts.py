"""How the tp axis divides one parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.boxes import Shape
from zero3d.errors import ConfigError


class Cut(NamedTuple):
    """Dimension `dim` is `blocks` equal blocks, each cut into `size` equal chunks; a rank has its chunk of each."""

    dim: int
    size: int
    rank: int
    blocks: int = 1

    def local_shape(self, shape: Shape) -> Shape:
        """Of a logical tensor's shape. Raises ConfigError where it cannot be cut equally."""
        if shape[self.dim] % (self.blocks * self.size):
            raise ConfigError(f"{shape[self.dim]} is not divisible by {self.blocks} x tp {self.size}.")
        return (*shape[: self.dim], shape[self.dim] // self.size, *shape[self.dim + 1 :])

    def take(self, logical: Tensor) -> Tensor:
        """This rank's part, a contiguous tensor of its own."""
        self.local_shape(tuple(logical.shape))
        blocks = logical.detach().chunk(self.blocks, self.dim)
        return torch.cat([block.chunk(self.size, self.dim)[self.rank] for block in blocks], self.dim)

    def join(self, locals: Sequence[Tensor]) -> Tensor:
        """The logical tensor of all ranks' local ones, in rank order."""
        parts = [local.chunk(self.blocks, self.dim) for local in locals]
        return torch.cat([part[block] for block in range(self.blocks) for part in parts], self.dim)
