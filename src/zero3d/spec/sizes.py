"""Sizes as people write them: bytes, or a number with kB, MB, GB or TB. No torch."""

from __future__ import annotations

import re
from fractions import Fraction

from zero3d.errors import ConfigError, short

UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]?B)?")
LARGEST, MOST_DIGITS = 10**18, 40  # bytes; of a number


def decimal(nbytes: int) -> str:
    """Write bytes in decimal units with two digits: 1.25 GB."""
    for unit in ("TB", "GB", "MB", "kB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f} {unit}"
    return f"{nbytes} B"


def parse_size(value: object, setting: str) -> int:
    """Return the bytes that a number, or a text such as 64GB, means; units are decimal. Raises ConfigError."""
    sized = isinstance(value, str) or (isinstance(value, int) and abs(value) < LARGEST)
    found = SIZE.fullmatch(str(value).strip()) if sized else None
    if found is None and not (isinstance(value, int) and value >= LARGEST):
        raise ConfigError(
            f"{setting} {short(value)!r} is not a size: type bytes, or a number with kB, MB, GB or TB (1GB is 10^9 "
            "bytes)."
        )
    if found is not None and len(found[1]) <= MOST_DIGITS:
        size = int(Fraction(found[1]) * UNITS[found[2] or ""])
        if size < LARGEST:
            return size
    raise ConfigError(
        f"{setting} {short(value)!r} is more than any machine has: type less than {LARGEST // UNITS['TB']:,}TB, in at "
        f"most {MOST_DIGITS} digits."
    )
