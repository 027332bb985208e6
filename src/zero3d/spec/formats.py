"""Formats of 8 and 4 bits that frozen matrices are held in. No torch.

A matrix is stored as *groups*, runs of bytes: the codes of some of its weights, and behind them their scale in fp32.

    format  weights of a group             codes          bytes a weight, of whole groups
    nf4     64 that follow one another      32 bytes       0.5 + 4/64      Dettmers et al., "QLoRA" (2023), section 3
    int8    a row                           1 byte each    1 + 4/columns
    fp8     128 rows x 128 columns          1 byte each    1 + 4/16384

    int8, rows [out, in + 4]            fp8 [out/128, in/128, 16388]
    nf4, [out, in/64, 36], where 64 divides in; else over the end of rows, [out x in / 64, 36]

A group at an edge takes as many bytes as any other. Groups lie in rows and columns as the weights do, so that a box
of groups is made of a box of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import NamedTuple

Shape = tuple[int, ...]
SCALE = 4  # bytes of a scale in fp32


class Format(NamedTuple):
    """A format: a row of the table.

    rows, columns  weights of a group; no columns: all of a row
    bits           of a code
    flat           groups go over the end of a row where `columns` do not divide it
    """

    name: str
    rows: int
    columns: int | None
    bits: int
    flat: bool = False

    def grid(self, shape: Shape) -> Shape:
        """Return how many groups a matrix [out, in] has: [rows of them, columns of them], or flat [all of them]."""
        if self.columns is None:
            return (shape[0],)
        if self.flat and shape[1] % self.columns:
            return (-(-prod(shape) // self.columns),)
        return -(-shape[0] // self.rows), -(-shape[1] // self.columns)

    def weights(self, shape: Shape) -> int:
        """Return how many weights a whole group of a matrix has."""
        return shape[1] if self.columns is None else self.rows * self.columns

    def packed_shape(self, shape: Shape) -> Shape:
        """Return the shape of a matrix's groups, in bytes."""
        return *self.grid(shape), self.weights(shape) * self.bits // 8 + SCALE

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes that a matrix [out, in] takes."""
        return prod(self.packed_shape(shape))


NF4 = Format("nf4", 1, 64, 4, flat=True)
INT8 = Format("int8", 1, None, 8)
FP8 = Format("fp8", 128, 128, 8)
FORMATS: Mapping[str, Format] = MappingProxyType({each.name: each for each in (NF4, INT8, FP8)})
