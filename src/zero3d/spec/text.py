"""Figures as text: bytes, counts of parameters, columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction

GIB = 2.0**30
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def columns(rows: Sequence[Sequence[str]], align: str) -> Iterator[str]:
    """Yield lines of a table, columns as wide as their widest cells; `align` has one of < > per column."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(align))]
    for row in rows:
        cells = (f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True))
        yield ("   " + "  ".join(cells)).rstrip()


def size(nbytes: Fraction | int, keep_zero: bool = False) -> str:
    """Write bytes as decimal GB, MB, kB or B with one digit after the point, as the paper prints them.

    keep_zero  12.0 MB, as figures that change from line to line are printed; else 12 MB
    """
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            value = float(nbytes) / scale
            return f"{f'{value:.1f}' if keep_zero else trim(value)} {unit}"
    return f"{trim(float(nbytes))} B"


def binary(nbytes: float, digits: int = 1) -> str:
    """Write bytes of a device's memory as GiB or MiB, in which cards are sold."""
    unit, scale = ("GiB", GIB) if abs(nbytes) >= GIB / 10 else ("MiB", GIB / 1024)
    return f"{f'{nbytes / scale:.{digits}f}'.removesuffix('.0')} {unit}"


def trim(value: float) -> str:
    """Write one digit after the point, none when it is zero."""
    return f"{value:.1f}".removesuffix(".0")


def count(params: float) -> str:
    """Write a number of parameters in short: 7500000000 -> 7.5B."""
    for unit, scale in reversed(SUFFIXES.items()):
        if params >= scale:
            return f"{params / scale:.4g}{unit}"
    return f"{params:.4g}"
