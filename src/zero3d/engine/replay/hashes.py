"""Sums of the bits of gradients: integers, so that their order is free and no bit is lost.

A gradient's bytes are read as words of 8, in rows of ROW. A row's words are added modulo 2^64, and the sums of rows
with odd weights: one flipped bit changes that by 2^k times an odd number, which is never 0 modulo 2^64. A second number
sums columns, so that words in exchanged places are seen, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.nested import tensors_in
from zero3d.zero.unit import Unit

ROW, WORD = 64, 8
AGAIN = 3  # multiplies what a parameter had before it got a further gradient

Parameter = tuple[Unit, int]  # a unit, and a place among its parameters


class Boundary(NamedTuple):
    """What leaves a model chunk of a pipeline: forwards its output, of the last one the loss; backwards a gradient."""

    chunk: int
    backwards: bool


Hashed = Parameter | Boundary


def bit_sums(t: Tensor) -> Tensor:
    """Return [2] int64 of a tensor's bits. Reads it twice and copies nothing of it, if it is contiguous."""
    if t.is_sparse:
        parts = t.coalesce()
        return bit_sums(parts.values()) * AGAIN + bit_sums(parts.indices())
    flat = t.detach().contiguous().view(-1)
    if flat.storage_offset() * flat.itemsize % WORD:
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    count = raw.numel() // WORD
    words, rest = raw[: count * WORD].view(torch.int64), raw[count * WORD :]
    rows = words[: count - count % ROW].view(-1, ROW)
    tail = _weighted(torch.cat([words[count - count % ROW :], rest.long()]))
    return torch.stack([_weighted(rows.sum(1)) + tail, _weighted(rows.sum(0)) + tail])


def _weighted(numbers: Tensor) -> Tensor:
    """Return the sum of integers, each times another odd number."""
    return (numbers * (torch.arange(len(numbers), device=numbers.device) * 2 + 1)).sum()


class GradientHashes:
    """Owns the sums of bits of every gradient of one backward, in the order in which they came; on the device.

    In a pipeline also of what leaves model chunks.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashed, Tensor] = {}

    def add(self, unit: Unit, index: int, grad: Tensor) -> None:
        """Add the bits of a gradient that has come."""
        self._look((unit, index), grad)

    def leaves(self, boundary: Boundary, values: Any) -> None:
        """Look at what leaves a model chunk."""
        for t in tensors_in(values):
            self._look(boundary, t)

    def _look(self, at: Hashed, values: Tensor) -> None:
        sums, before = bit_sums(values), self._sums.get(at)
        self._sums[at] = sums if before is None else before * AGAIN + sums

    @property
    def came(self) -> list[Hashed]:
        """What was looked at, in its order."""
        return list(self._sums)

    def table(self, hashed: Sequence[Hashed], device: torch.device) -> Tensor:
        """Return [hashed, 2]; zeros where nothing came."""
        nothing = torch.zeros(2, dtype=torch.int64, device=device)
        return torch.stack([self._sums.get(each, nothing) for each in hashed])


def digest(table: Tensor) -> Tensor:
    """Return [2] of a table of sums."""
    return torch.stack([_weighted(column) for column in table.unbind(1)])
