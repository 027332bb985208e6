"""Stores of an engine that runs dry: no memory of the host is mapped, no file made, no thread started.

    record on a tier                a tensor without memory, which the log of the device does not count
    ring on the device              its buffers, one record after the other in them; nothing is copied
    update on the host              left out: it reads values, and changes no memory of the device

Bytes by place are the engine's own account (`offload.tiers`), which all of this leaves as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from zero3d.account.transients import STAGED
from zero3d.blueprint.auto import LINK, MEMORY, UPDATE, MeasuredRates
from zero3d.memory.arena import Arena
from zero3d.offload.executors import DeviceExecutor, Executor, StagedGradients
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.offload.tiered_records import InPlace, Tier
from zero3d.offload.tiers import Opening, OpenTier, Site, Stores
from zero3d.spec.tiers import TierRow
from zero3d.tools.sim.memory import ObservedArena
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.updates import OpenBucket, Options


class DrySlab(HostSlab):
    """Stands for memory of the host."""

    def __init__(self, parts: Mapping[str, Sequence[Record]], arena: ObservedArena) -> None:
        self.nbytes, self.pinned = 0, False
        self.memory = {part: [arena.elsewhere(each.nbytes) for each in records] for part, records in parts.items()}
        self.views = {
            part: [record.views(memory) for record, memory in zip(records, self.memory[part], strict=True)]
            for part, records in parts.items()
        }


class Passing(InPlace):
    """Records that are used in a ring's buffers, in turn."""

    def __init__(self, records: Sequence[Record], buffers: Sequence[Tensor], fields: Sequence[list[Tensor]]) -> None:
        super().__init__(fields)
        self._records, self._buffers = records, buffers

    def fetch(self, index: int) -> list[Tensor]:
        """Return a record's fields in the buffer that it has its turn in."""
        return self._records[index].views(self._buffers[index % len(self._buffers)])


class DryTier(OpenTier):
    """Stands for any tier."""

    def __init__(self, opening: Opening, arena: ObservedArena) -> None:
        super().__init__(opening)
        self._arena = arena

    def tier(self, kind: str, buffers: Sequence[Tensor], staging: Sequence[Tensor]) -> Tier:
        """Return records that are used where they are, or in these buffers."""
        records = self.records(kind)
        fields = [record.views(self._arena.elsewhere(record.nbytes)) for record in records]
        return Passing(records, buffers, fields) if buffers else InPlace(fields)


class DryStaged(StagedGradients):
    """Stands for buffers in which gradients come from the host."""

    def __init__(self, arena: Arena, elements: int, dtype: torch.dtype) -> None:
        self._held = [arena.borrow("wire", elements, dtype) for _ in range(STAGED)]

    def ahead(self, grad: Tensor) -> None:
        """Bring nothing."""

    @contextmanager
    def here(self, grad: Tensor) -> Iterator[Tensor]:
        """Have a buffer of it inside."""
        yield self._held[0][: grad.numel()]


class NoUpdate(Executor):
    """Stands for updates on the host."""

    def ahead(self, grad: Tensor) -> None:
        """Bring nothing."""

    def update(self, opened: OpenBucket, options: Options) -> None:
        """Change nothing."""


class DryStores(Stores):
    """Stands for memory, files and threads of ranks on CPUs or accelerators."""

    def __init__(self, site: Site, on_cpu: bool) -> None:
        super().__init__(site)
        assert isinstance(site.arena, ObservedArena)
        self.on_cpu, self._arena = on_cpu, site.arena

    def rates(self) -> MeasuredRates:
        """Return those of no machine in particular."""
        return MeasuredRates(LINK, LINK, LINK, MEMORY / UPDATE / self._site.world.size)

    def host(self, parts: Mapping[str, Sequence[Record]], asked: Mapping[str, int]) -> HostSlab:
        """Return what stands for the host's memory."""
        return DrySlab(parts, self._arena)

    def open(self, row: TierRow, opening: Opening) -> OpenTier:
        """Return what stands for a tier, whichever it is."""
        return DryTier(opening, self._arena)

    def staged(self, arena: Arena, elements: int, dtype: torch.dtype) -> StagedGradients:
        """Return what has buffers alone."""
        return DryStaged(arena, elements, dtype)

    def updates_on_host(
        self, optimizer: ShardedOptimizer, arena: Arena, staging: tuple[Tensor, Tensor] | None, near: DeviceExecutor
    ) -> Executor:
        """Return what changes nothing."""
        return NoUpdate()
