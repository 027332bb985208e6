"""A disk as a tier: records in the file of a disk slab, two slots for each, and frozen ones in a file beside it.

    offload.directory/
      rank-00003.states    what changes in every step: optimizer states, then weights     disk_slab.py
      rank-00003.frozen    frozen weights, written once                                   record_file.py

Records are read and written by threads, from and to buffers of the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakValueDictionary

import numpy
import torch
from torch import Tensor

from zero3d.blueprint.places import FROZEN
from zero3d.distributed.agreement import agree
from zero3d.errors import CheckpointError
from zero3d.offload import commit_file
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.record_file import RecordFile
from zero3d.offload.records import Record
from zero3d.offload.ring import Buffer, Ring, copy_bytes
from zero3d.offload.tiered_records import ThroughRing, Tier
from zero3d.offload.tiers import UNKNOWN, Opening, OpenTier


class DiskTier(OpenTier):
    """Owns the files of a rank's records."""

    def __init__(self, opening: Opening) -> None:
        """Open the file of what changes, on all ranks or none. Raises ConfigError, OutOfBudget."""
        super().__init__(opening)
        assert opening.folder is not None
        self._changing = [each for each in opening.records if each.kind != FROZEN]
        records = {each.described: each.record.nbytes for each in self._changing}
        folder, rank = opening.folder, opening.site.world.rank
        open_slab = partial(DiskSlab, folder, rank, records, opening.site.owner)

        def open_or_replace() -> DiskSlab:
            try:
                return open_slab()
            except CheckpointError:  # of other records, or damaged: nothing to go on from, and all ranks say so
                commit = (folder / f"rank-{rank:05d}").with_suffix(".commit")
                self.replaced = commit_file.step_of(commit) or UNKNOWN
                return open_slab(discard=True)

        self.slab: DiskSlab = agree(opening.site.world, open_or_replace)

    def tier(self, kind: str, buffers: Sequence[Tensor], staging: Sequence[Tensor]) -> Tier:
        """Return a kind's records, which pass through buffers; staging: memory of the host for buffers on a device."""
        records, slab = self.records(kind), self.slab
        if kind == FROZEN:
            file = RecordFile(slab.path.with_suffix(".frozen"), [record.nbytes for record in records])
            return OnDisk(Ring(DiskStore(file), records, buffers), records, file.newest, changes=False)
        first = [each.kind for each in self._changing].index(kind)
        ring = Ring(DiskStore(slab, first), records, buffers, staging)
        return OnDisk(ring, records, lambda index: slab.newest(first + index))


class OnDisk(ThroughRing):
    """Records of a file that pass through a ring of buffers.

    place    where in which file a record begins
    changes  whether they change in every step
    """

    def __init__(
        self, ring: Ring, records: Sequence[Record], place: Callable[[int], tuple[Path, int]], changes: bool = True
    ) -> None:
        super().__init__(ring)
        self._records = records
        self._place = place
        self.commits = changes
        self._mapped: WeakValueDictionary[tuple[int, int], numpy.memmap[Any, Any]] = WeakValueDictionary()

    def view(self, index: int) -> list[Tensor]:
        """Return its fields in pages of the file: private ones, read when somebody looks at them.

        One mapping of a record for all who look at the same time: a process may have some ten thousand.
        """
        path, start = self._place(index)
        record = self._records[index]
        if not record.nbytes:
            return record.views(torch.empty(0, dtype=torch.uint8))
        pages = self._mapped.get((index, start))
        if pages is None:
            pages = self._mapped[index, start] = numpy.memmap(path, numpy.uint8, "c", start, (record.nbytes,))
        return record.views(torch.from_numpy(pages))


class RecordsOnDisk(Protocol):
    """Who reads and writes records by their numbers, from and to memory in whole blocks."""

    def read(self, index: int, memory: memoryview) -> None: ...

    def write(self, index: int, memory: memoryview) -> None: ...


class DiskStore:
    """Records on a disk, in a slab from number `first` on."""

    waits = True

    def __init__(self, slab: RecordsOnDisk, first: int = 0) -> None:
        self._slab, self._first = slab, first

    def load(self, index: int, nbytes: int, buffer: Buffer) -> None:
        """Read a record, and copy it to the device if that has other memory."""
        if buffer.staging is not None:
            buffer.arrived.synchronize()  # of a record that was not taken back, the copy may still be under way
        self._slab.read(self._first + index, buffer.host.numpy().data)
        if buffer.staging is not None:
            copy_bytes(buffer.memory[:nbytes], buffer.staging[:nbytes])

    def store(self, index: int, nbytes: int, buffer: Buffer) -> None:
        """Write a record, once it is in the host's memory."""
        if buffer.staging is not None:
            copy_bytes(buffer.staging[:nbytes], buffer.memory[:nbytes])
            torch.accelerator.current_stream(buffer.memory.device).synchronize()
        self._slab.write(self._first + index, buffer.host.numpy().data)
