"""How many bytes a rank may take of its host's memory. No torch.

    least of   what is available (MemAvailable: page cache counts as free)
               what each cgroup above this process still allows: its limit - what it holds (cgroups.py)
               `offload.host_budget`, for all ranks of the host together
    / ranks    of the host: everyone may take the same

All ranks of a host measure before any of them takes: the first to take would leave less for the next. Who asks for
more is refused before anything is mapped; the kernel would end a process later, in the middle of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil

from zero3d.errors import OutOfBudget
from zero3d.memory.cgroups import ROOT, cgroups
from zero3d.spec.offload import HOST_BUDGET
from zero3d.spec.sizes import decimal


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
        remedy = (
            f"raise {HOST_BUDGET} to {decimal(total * self.ranks)}, or " if self.least.source == HOST_BUDGET else ""
        )
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
        yield Bound(limit, HOST_BUDGET)
