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

`nf4-double` has nf4's codes, and 8 bits for each of their maxima ("double quantisation", section 3 there): 0.5 + 1/64 +
4/16384 bytes a weight, and 4 for a matrix. Maxima are in groups of 256 over the whole matrix, so it is one run:

    [codes of weights | codes of maxima | the largest of 256 maxima, fp32 | their mean over the matrix, fp32]
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from math import prod
from types import MappingProxyType
from typing import NamedTuple

Shape = tuple[int, ...]
SCALE = 4  # bytes of a scale in fp32


class Format(NamedTuple):
    """A format: a row of the table.

    rows, columns  weights of a group; no columns: all of a row
    bits           of a code
    text           what it is, in a few words
    flat           groups go over the end of a row where `columns` do not divide it
    """

    name: str
    rows: int
    columns: int | None
    bits: int
    text: str
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

    def cut_unit(self, shape: Shape, dim: int) -> int | None:
        """Return what a rank's outputs (0) or inputs (1) must be a multiple of; None where they cannot be cut."""
        flat = self.columns is not None and len(self.grid(shape)) == 1
        return None if flat else (self.rows, self.columns)[dim]

    @property
    def scales_of(self) -> str:
        """Return, for an error message, which weights share a scale where a matrix cannot be cut."""
        return "rows" if self.columns is None else f"{self.columns} weights that go over the end of a row"


class Runs(NamedTuple):
    """Holds the offsets of a doubly quantised matrix's parts in its bytes; codes of weights begin at 0."""

    maxima: int
    scales: int
    mean: int
    end: int


class DoubleFormat(NamedTuple):
    """A format whose scales are quantised, too: one run of bytes for a matrix.

    columns  weights of a scale, that follow one another, over the end of rows
    maxima   scales of a scale
    text     what it is, in a few words
    """

    name: str
    columns: int
    maxima: int
    text: str

    def blocks(self, shape: Shape) -> int:
        """Return how many scales a matrix has."""
        return -(-prod(shape) // self.columns)

    def runs(self, shape: Shape) -> Runs:
        """Return the borders of the parts."""
        codes, blocks = -(-prod(shape) // 2), self.blocks(shape)
        mean = codes + blocks + SCALE * -(-blocks // self.maxima)
        return Runs(codes, codes + blocks, mean, mean + SCALE)

    def packed_shape(self, shape: Shape) -> Shape:
        """Return the shape of a matrix's run, in bytes."""
        return (self.nbytes(shape),)

    def nbytes(self, shape: Shape) -> int:
        """Return the bytes that a matrix [out, in] takes."""
        return self.runs(shape).end

    def cut_unit(self, shape: Shape, dim: int) -> int | None:
        """Return None: no part of a matrix has scales of its own."""
        return None

    @property
    def scales_of(self) -> str:
        """Return, for an error message, which scales share a scale of their own."""
        return f"{self.maxima} scales that go over the end of a row"


NF4 = Format("nf4", 1, 64, 4, "4 bits, as in QLoRA", flat=True)
INT8 = Format("int8", 1, None, 8, "8 bits")
FP8 = Format("fp8", 128, 128, 8, "8 bits")
NF4_DOUBLE = DoubleFormat("nf4-double", 64, 256, "with 8-bit scales: double quantisation")
FORMATS: Mapping[str, Format | DoubleFormat] = MappingProxyType(
    {each.name: each for each in (NF4, NF4_DOUBLE, INT8, FP8)}
)


def described() -> str:
    """Return all formats with what they are, those that are said alike together: nf4 (4 bits, as in QLoRA), ..."""
    alike = groupby(FORMATS.values(), key=lambda each: each.text)
    return ", ".join(f"{' or '.join(each.name for each in same)} ({text})" for text, same in alike)
