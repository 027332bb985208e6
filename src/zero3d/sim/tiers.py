"""Tiers of an engine that runs dry: no memory of the host is mapped, no file made, no thread started.

    record on the host or a disk    a tensor without memory, which the log of the device does not count
    ring on the device              its buffers, one record after the other in them; nothing is copied
    update on the host              left out: it reads values, and changes no memory of the device

Bytes by place are the engine's own account (`engine.tiers`), which all of this leaves as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from zero3d.engine import auto_offload, tiers
from zero3d.engine.foundation import Foundation
from zero3d.engine.tier_records import BUFFERS, OPTIMIZER, Placed
from zero3d.memory.arena import Arena
from zero3d.offload.auto_place import ExecutorChoice
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.executors import DeviceExecutor, Executor
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.record_store import InPlace, Shelf
from zero3d.offload.records import Record
from zero3d.offload.ring import ring_buffers
from zero3d.sim.group import FakeMesh
from zero3d.sim.memory import ObservedArena
from zero3d.sim.patches import replaced
from zero3d.spec.offload import DEVICE, HOST, Offload
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.updates import OpenBucket, Options

ACCELERATOR = torch.device("cuda")  # of any kind: nothing is ever on it


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


class NoUpdate(Executor):
    """Stands for updates on the host."""

    def update(self, opened: OpenBucket, options: Options) -> None:
        """Change nothing."""


class DryTiers(tiers.Tiers):
    """Tiers whose updates on the host are left out."""

    def _on_host(self, optimizer: ShardedOptimizer, near: DeviceExecutor) -> Executor:
        return NoUpdate()


class DryBuilder(tiers.Builder):
    """Makes what stands for slabs, files and rings, as they would be on the mesh's backend."""

    def __init__(self, base: Foundation, offload: Offload, placed: Sequence[Placed], executor: ExecutorChoice) -> None:
        mesh, arena = base.resolved.mesh, base.axes.arena
        assert isinstance(mesh, FakeMesh)
        assert isinstance(arena, ObservedArena)
        super().__init__(base, offload, placed, executor)
        self._on_cpu, self._observed = mesh.on_cpu, arena
        self._here = self._executor == HOST or mesh.on_cpu

    def _open_slab(self) -> HostSlab:
        return DrySlab(self._parts(), self._observed)

    def _open_disk(self) -> DiskSlab | None:
        return None

    def _shelf(self, part: str, place: str, slab: HostSlab, disk: DiskSlab | None) -> Shelf:
        if place == DEVICE or (place == HOST and part not in self._through_rings()):
            return super()._shelf(part, place, slab, disk)
        records = self._of(part, place)
        fields = slab.views[part] if place == HOST else [r.views(self._observed.elsewhere(r.nbytes)) for r in records]
        if self._executor == DEVICE and part == OPTIMIZER and not self._on_cpu:
            rings = [each.nbytes for each in ring_buffers(records)]
            return Passing(records, [self._arena.borrow("wire", nbytes, torch.uint8) for nbytes in rings], fields)
        return Passing(records, slab.memory[f"{BUFFERS} of {part}"], fields)


def settle_executor(base: Foundation, on_host: bool, states: int) -> ExecutorChoice:
    """Choose who updates records, as an engine does on the mesh's backend."""
    mesh = base.resolved.mesh
    assert isinstance(mesh, FakeMesh)
    there = base.axes if mesh.on_cpu else replace(base.axes, arena=Arena(ACCELERATOR))
    return auto_offload.settle_executor(replace(base, axes=there), on_host, states)


@contextmanager
def dry_tiers() -> Iterator[None]:
    """Have engines that are built inside the block take no memory of the host and no disk."""
    with ExitStack() as stack:
        stack.enter_context(replaced(tiers, "Builder", DryBuilder))
        stack.enter_context(replaced(tiers, "Tiers", DryTiers))
        stack.enter_context(replaced(tiers, "settle_executor", settle_executor))
        yield
