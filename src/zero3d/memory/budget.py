"""How many bytes a rank may take of its host's memory. No torch.

    least of   what is available (MemAvailable: page cache counts as free)
               what each cgroup above this process still allows: its limit - what it holds (cgroups.py)
               `offload.host_budget`, for all ranks of the host together
    / ranks    of the host: everyone may take the same

All ranks of a host measure before any of them takes: the first to take would leave less for the next. Who asks for
more is refused before anything is mapped; the kernel would end a process later, in the middle of a step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import psutil

from zero3d.errors import ConfigError, OutOfBudget, short
from zero3d.memory.cgroups import ROOT, cgroups

UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?) *([kKMGT]?B)?")
LARGEST, MOST_DIGITS = 10**18, 40  # bytes; of a number
SETTING = "offload.host_budget"


class Bound(NamedTuple):
    """Bytes that the ranks of a host may take together, and who says so."""

    nbytes: int
    source: str


@dataclass(frozen=True)
class HostBudget:
    """What one rank may take: an equal share of the least bound."""

    bounds: tuple[Bound, ...]
    ranks: int

    @property
    def least(self) -> Bound:
        """Return the bound that decides."""
        return min(self.bounds)

    @property
    def nbytes(self) -> int:
        """Return the bytes of this rank."""
        return self.least.nbytes // self.ranks

    def __str__(self) -> str:
        shared = f" / {self.ranks} ranks = {decimal(self.nbytes)} for each" if self.ranks > 1 else ""
        others = "; ".join(f"{decimal(nbytes)} {source}" for nbytes, source in sorted(self.bounds)[1:])
        return f"{decimal(self.least.nbytes)} {self.least.source}{shared}" + (
            f" (other bounds: {others})" if others else ""
        )

    def check(self, asked: Mapping[str, int]) -> None:
        """Refuse what is too much. asked: bytes of this rank by what they are for. Raises OutOfBudget."""
        total = sum(asked.values())
        if total <= self.nbytes:
            return
        parts = " + ".join(f"{name} {decimal(nbytes)}" for name, nbytes in asked.items() if nbytes)
        remedy = f"raise {SETTING} to {decimal(total * self.ranks)}, or " if self.least.source == SETTING else ""
        raise OutOfBudget(
            f"a rank's states on the host take {decimal(total)} ({parts}), and it may take {decimal(self.nbytes)}: "
            f"{self}. What fits is {self.nbytes / total:.2f} of it: {remedy}lower offload.fraction, type "
            "offload.moments=bf16 or, where buffers are not the most of it, offload.optimizer=disk, or use more hosts."
        )


def host_budget(ranks: int, limit: int | None = None, root: Path = ROOT) -> HostBudget:
    """Measure what `ranks` ranks of this host may take, each; limit: `offload.host_budget` in bytes."""
    return HostBudget(tuple(_bounds(limit, root)), ranks)


def _bounds(limit: int | None, root: Path) -> Iterator[Bound]:
    yield Bound(int(psutil.virtual_memory().available), "of available memory")
    for group in cgroups(root):
        allowed = group.limit()
        if allowed is not None:
            held = group.held()
            free = max(allowed - held, 0)
            yield Bound(free, f"left of cgroup {group.folder} ({decimal(allowed)} - {decimal(held)} held)")
    if limit is not None:
        yield Bound(limit, SETTING)


def decimal(nbytes: int) -> str:
    """Write bytes in decimal units with two digits: 1.25 GB."""
    for unit in ("TB", "GB", "MB", "kB"):
        if nbytes >= UNITS[unit]:
            return f"{nbytes / UNITS[unit]:.2f} {unit}"
    return f"{nbytes} B"


def parse_size(value: object, setting: str = SETTING) -> int:
    """Return the bytes that a number, or a text such as 64GB, means; units are decimal. Raises ConfigError."""
    sized = isinstance(value, str) or (isinstance(value, int) and abs(value) < LARGEST)
    found = SIZE.fullmatch(str(value).strip()) if sized else None
    if found is None and not (isinstance(value, int) and value >= LARGEST):
        raise ConfigError(
            f"{setting} {short(value)!r} is no size: type bytes, or a number with kB, MB, GB or TB (1GB is 10^9 bytes)."
        )
    if found is not None and len(found[1]) <= MOST_DIGITS:
        size = int(Fraction(found[1]) * UNITS[found[2] or ""])
        if size < LARGEST:
            return size
    raise ConfigError(
        f"{setting} {short(value)!r} is more than any machine has: type less than {LARGEST // UNITS['TB']:,}TB, in at "
        f"most {MOST_DIGITS} digits."
    )
