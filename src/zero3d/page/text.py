"""Figures as text: bytes, counts of parameters, columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def columns(rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Yield lines of a table, columns as wide as their widest cells; `align` has one of < > per column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        yield ("   " + "  ".join(cells)).rstrip()


def size(nbytes: Fraction | int) -> str:
    """Write decimal GB, MB, kB or B with one digit, as the paper prints them."""
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{trim(float(nbytes) / scale)} {unit}"
    return f"{trim(float(nbytes))} B"


def trim(value: float) -> str:
    """Write one digit after the point, none when it is zero."""
    return f"{value:.1f}".removesuffix(".0")


def count(params: float) -> str:
    """Write a number of parameters in short: 7500000000 -> 7.5B."""
    for unit, scale in reversed(SUFFIXES.items()):
        if params >= scale:
            return f"{params / scale:.4g}{unit}"
    return f"{params:.4g}"
