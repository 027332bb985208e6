"""The tiers of an engine: memory, files and rings for the records that leave the device.

    records  of optimizer states, one a bucket; of shards of weights; of gradients      states.py, placement.py
      -> budget   host bytes of this rank, refused with the arithmetic before any are taken   memory/budget.py
      -> store    one host slab, one file, rings                                              tiered_records.py

All of it is made before the first unit, and nothing later. What it is made of comes from `Stores`, which maps memory,
opens files and starts threads; a dry run has its own.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.errors import CheckpointError
from zero3d.memory.arena import STATES, TRANSIENT, Arena
from zero3d.memory.blocks import padded
from zero3d.memory.budget import HostBudget
from zero3d.memory.threads import Threads, unwaited
from zero3d.offload import commit_file
from zero3d.offload.auto_place import ExecutorChoice, MeasuredRates
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.executors import DeviceExecutor, Executor, OnHost, StagedGradients
from zero3d.offload.host_adam import HostExecutor, scratch_bytes
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.placement import FROZEN, GRADIENTS, OPTIMIZER, PARAMETERS
from zero3d.offload.rates import measure_rates
from zero3d.offload.record_file import RecordFile
from zero3d.offload.records import Record
from zero3d.offload.ring import DiskStore, HostStore, Ring, ring_buffers
from zero3d.offload.states import CATEGORY, WORDS, StateRecord, planned_bytes
from zero3d.offload.tiered_records import Address, InPlace, OnDisk, ThroughRing, Tier, TieredRecords
from zero3d.offload.updates import RecordUpdates
from zero3d.spec.offload import DEVICE, DISK, HOST, Offload
from zero3d.zero.buckets import Bucket, UnitBuckets
from zero3d.zero.optimizer import ShardedOptimizer

BUFFERS, STAGING = "ring buffers", "staging"
NEVER, UNKNOWN = -1, 0  # no step; one whose number cannot be read


class Site(NamedTuple):
    """Describes the rank that tiers are made for.

    world    all ranks, which make theirs together
    owner    who writes on the disk, in words
    compute  dtype of weights
    budget   measures what this rank may take of its host
    threads  that may update on the host
    """

    arena: Arena
    world: Comm
    owner: str
    compute: torch.dtype
    budget: Callable[[], HostBudget]
    threads: int = 1


class Stores:
    """Opens what records are kept in, on all ranks or none.

    on_cpu    whether the device is a CPU
    replaced  the step of another run that was on the disk; NEVER, or UNKNOWN
    """

    replaced = NEVER

    def __init__(self, site: Site) -> None:
        self._site = site
        self.on_cpu = site.arena.device.type == "cpu"

    def rates(self) -> MeasuredRates:
        """Measure by what the executor is chosen."""
        return measure_rates(self._site.arena, self._site.threads)

    def host(self, parts: Mapping[str, Sequence[Record]], asked: Mapping[str, int]) -> HostSlab:
        """Map the host's memory of all parts. asked: bytes by what they are for. Raises OutOfBudget."""
        budget = self._site.budget()

        def open_slab() -> HostSlab:
            budget.check(asked)
            return HostSlab(parts, self._site.arena.device)

        return agree(self._site.world, open_slab)

    def disk(self, folder: Path, records: Mapping[str, int]) -> DiskSlab | None:
        """Open the file of records that change, of so many bytes by name. Raises ConfigError, OutOfBudget."""
        rank = self._site.world.rank
        open_slab = partial(DiskSlab, folder, rank, records, self._site.owner)

        def open_or_replace() -> DiskSlab:
            try:
                return open_slab()
            except CheckpointError:  # of other records, or damaged: nothing to go on from, and all ranks say so
                commit = (folder / f"rank-{rank:05d}").with_suffix(".commit")
                self.replaced = commit_file.step_of(commit) or UNKNOWN
                return open_slab(discard=True)

        return agree(self._site.world, open_or_replace)

    def host_ring(self, records: Sequence[Record], memory: Sequence[Tensor], buffers: Sequence[Tensor]) -> Tier:
        """Return records of the host that pass through buffers."""
        fields = [record.views(own) for record, own in zip(records, memory, strict=True)]
        return ThroughRing(Ring(HostStore(memory), records, buffers), fields)

    def disk_ring(
        self,
        records: Sequence[Record],
        slab: DiskSlab | None,
        first: int,
        buffers: Sequence[Tensor],
        staging: Sequence[Tensor],
    ) -> Tier:
        """Return records of a disk slab, from number `first` on, that pass through buffers."""
        assert slab is not None
        ring = Ring(DiskStore(slab, first), records, buffers, staging)
        return OnDisk(ring, records, lambda index: slab.newest(first + index))

    def frozen_ring(self, records: Sequence[Record], slab: DiskSlab | None, buffers: Sequence[Tensor]) -> Tier:
        """Return records of frozen weights, in a file beside a disk slab, that pass through buffers."""
        assert slab is not None
        file = RecordFile(slab.path.with_suffix(".frozen"), [record.nbytes for record in records])
        return OnDisk(Ring(DiskStore(file), records, buffers), records, file.newest, changes=False)

    def staged(self, arena: Arena, elements: int, dtype: torch.dtype) -> StagedGradients:
        """Return what brings gradients of at most so many elements from the host."""
        return StagedGradients(arena, elements, dtype)

    def updates_on_host(
        self, optimizer: ShardedOptimizer, arena: Arena, staging: tuple[Tensor, Tensor] | None, near: DeviceExecutor
    ) -> Executor:
        """Return what updates on the host, with threads of its own; arena: the host's account."""
        threads = HostExecutor(self._site.threads, arena)
        weakref.finalize(optimizer, threads.close)
        return OnHost(optimizer.torch, threads, staging, near)


@dataclass(frozen=True)
class Tiers:
    """Owns what an engine has off its device.

    units     what each unit has in records, by name
    kept      memory of the host for units' reduced gradients, by name, where they leave the device
    arenas    accounts of the host and of the disk
    executor  "device" | "host": where updates are made
    planned   bytes by (category, place), from layouts alone
    why       the arithmetic of the executor, where that was open
    disk      the file of what changes in every step, if anything is on a disk
    threads   of this rank on the host
    replaced  the step of another run that was on the disk; NEVER, or UNKNOWN
    """

    units: Mapping[str, UnitBuckets]
    kept: Mapping[str, Tensor]
    store: TieredRecords
    stores: Stores
    arenas: Mapping[str, Arena]
    executor: str
    planned: Mapping[tuple[str, str], Fraction]
    ring_of_weights: bool
    staging: tuple[Tensor, Tensor] | None
    why: str
    disk: DiskSlab | None
    threads: int
    replaced: int

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host's slab."""
        return int(sum(self.arenas[HOST].live(category) for category in (*STATES, *TRANSIENT)))

    def updates(self, optimizer: ShardedOptimizer, arena: Arena) -> RecordUpdates | None:
        """Return what updates an optimizer's pieces in records; None where only frozen weights are."""
        if all(unit.weights.records is None for unit in optimizer.units):
            return None
        executor: Executor = (near := DeviceExecutor(optimizer.torch, arena, self._staged(optimizer, arena)))
        if self.executor == HOST:
            executor = self.stores.updates_on_host(optimizer, self.arenas[HOST], self.staging, near)
        hooks = optimizer.torch._optimizer_step_pre_hooks, optimizer.torch._optimizer_step_post_hooks
        if any(hooks):
            warnings.warn(
                "the optimizer has step hooks: where states leave the device they are called once a bucket, and never "
                "where the host updates.",
                stacklevel=6,
            )
        # Of weights on a disk one ring serves gathers and updates, from one thread.
        behind = self.executor == HOST and arena.device.type != "cpu" and not self.ring_of_weights
        thread = Threads(1, "updates") if behind else None
        return RecordUpdates(optimizer, executor, self.store, arena.device, thread)

    def _staged(self, optimizer: ShardedOptimizer, arena: Arena) -> StagedGradients | None:
        """Return what brings gradients from the host of an accelerator, if any bucket is updated on the device."""
        of_units = [unit.weights.records for unit in optimizer.units if unit.weights.records is not None]
        buckets = [bucket for each in of_units for bucket in each.buckets]
        if not self.kept or self.stores.on_cpu or all(bucket.device != arena.device for bucket in buckets):
            return None
        longest = max(bucket.stop - bucket.start for bucket in buckets)
        return self.stores.staged(arena, longest, next(iter(self.kept.values())).dtype)


class Builder:
    """Makes slabs, files and rings for records that have their places."""

    def __init__(
        self, site: Site, offload: Offload, records: Sequence[StateRecord], executor: ExecutorChoice, stores: Stores
    ) -> None:
        self._site = site
        self._offload = offload
        self._records = records
        self._stores = stores
        self._executor, self._why = executor
        self._arena = site.arena
        self._host_arena = Arena(torch.device("cpu"), HOST)
        self._disk_arena = Arena(torch.device("cpu"), DISK)
        self._here = self._executor == HOST or stores.on_cpu  # records pass through memory of the host

    def tiers(self) -> Tiers:
        """Make them all, or raise on all ranks."""
        slab = self._open_slab()
        disk = self._open_disk()
        store = TieredRecords(self._addresses(slab, disk), disk)
        names = [each.unit for each in self._records if each.kind == GRADIENTS]
        tiers = Tiers(
            units=self._units(store),
            kept={name: shard for name, (shard,) in zip(names, slab.views[WORDS[GRADIENTS]], strict=True)},
            store=store,
            stores=self._stores,
            arenas={HOST: self._host_arena, DISK: self._disk_arena},
            executor=self._executor,
            planned=planned_bytes(self._records),
            ring_of_weights=self._offload.params == DISK,
            staging=self._staging(slab),
            why=self._why,
            disk=disk,
            threads=self._site.threads,
            replaced=self._stores.replaced,
        )
        weakref.finalize(tiers, unwaited, store.close)
        return tiers

    def _open_slab(self) -> HostSlab:
        """Map what all records and buffers on the host take. Raises OutOfBudget."""
        parts = self._parts()
        asked = {part: sum(padded(record.nbytes) for record in records) for part, records in parts.items()}
        if self._executor == HOST and self._of(OPTIMIZER, HOST) + self._of(OPTIMIZER, DISK):
            asked["scratch of updates"] = scratch_bytes(self._site.threads)
        return self._stores.host(parts, asked)

    def _open_disk(self) -> DiskSlab | None:
        """Open the file of what changes in every step, if anything is on a disk."""
        if not self._offload.uses_disk:
            return None
        assert self._offload.directory is not None
        changing = [each for each in self._records if each.place == DISK and each.kind != FROZEN]
        records = {each.described: each.record.nbytes for each in changing}
        return self._stores.disk(Path(self._offload.directory), records)

    # --- memory of the host -----------------------------------------------------------------------

    def _of(self, kind: str, place: str) -> list[Record]:
        return [each.record for each in self._records if each.kind == kind and each.place == place]

    def _parts(self) -> dict[str, list[Record]]:
        """Return what the host's slab holds, by what it is in words."""
        parts = {WORDS[kind]: self._of(kind, HOST) for kind in CATEGORY}
        for kind in CATEGORY:
            if self._rings_on_host(kind):
                parts[f"{BUFFERS} of {WORDS[kind]}"] = ring_buffers(self._ring_records(kind))
        if self._executor == HOST and not self._stores.on_cpu:
            longest = max(each.placed.elements for each in self._records if each.kind == OPTIMIZER)
            parts[STAGING] = [Record(STAGING, ((torch.float32, longest), (self._site.compute, longest)))]
        return parts

    def _ring_records(self, kind: str) -> list[Record]:
        """Return the records of a kind that pass through a ring, those of one place."""
        place = {OPTIMIZER: self._offload.optimizer, GRADIENTS: HOST}.get(kind, self._offload.params)
        through = place == DISK or (place == HOST and kind == OPTIMIZER and self._executor == DEVICE)
        return self._of(kind, place) if through else []

    def _rings_on_host(self, kind: str) -> bool:
        """Whether a kind's ring has buffers, or staging memory for them, on the host."""
        disk = (self._offload.optimizer if kind == OPTIMIZER else self._offload.params) == DISK
        return bool(self._ring_records(kind)) and (disk or self._here)

    def _staging(self, slab: HostSlab) -> tuple[Tensor, Tensor] | None:
        if STAGING not in slab.views:
            return None
        grads, weights = slab.views[STAGING][0]
        return grads, weights

    # --- records ------------------------------------------------------------------------------------

    def _addresses(self, slab: HostSlab, disk: DiskSlab | None) -> list[Address]:
        """Put every record in the tier of its kind and place, and on that place's account."""
        places = dict.fromkeys((each.kind, each.place) for each in self._records)
        tiers = {key: self._tier(*key, slab, disk) for key in places}
        numbers = dict.fromkeys(tiers, 0)
        found = []
        for each in self._records:
            key = each.kind, each.place
            found.append(Address(tiers[key], numbers[key]))
            numbers[key] += 1
            if each.place != DEVICE:
                arena = self._host_arena if each.place == HOST else self._disk_arena
                held = each.placed.held
                used = each.used * Fraction(each.placed.slots * each.record.nbytes, held) if held else Fraction(0)
                arena.hold(CATEGORY[each.kind], held, used)
        for part, memory in slab.memory.items():
            if part not in WORDS.values():
                self._host_arena.hold("wire", sum(padded(each.numel()) for each in memory), Fraction(1))
        return found

    def _tier(self, kind: str, place: str, slab: HostSlab, disk: DiskSlab | None) -> Tier:
        records = self._of(kind, place)
        if place == DEVICE:
            return InPlace(
                [self._on_device(each) for each in self._records if (each.kind, each.place) == (kind, place)]
            )
        if not self._ring_records(kind):
            return InPlace(slab.views[WORDS[kind]])
        memory = slab.memory.get(f"{BUFFERS} of {WORDS[kind]}", [])
        on_device = self._executor == DEVICE and kind == OPTIMIZER and not self._stores.on_cpu
        buffers = memory
        if on_device:
            buffers = [self._arena.borrow("wire", each.nbytes, torch.uint8) for each in ring_buffers(records)]
        if place == HOST:
            return self._stores.host_ring(records, slab.memory[WORDS[kind]], buffers)
        if kind == FROZEN:
            return self._stores.frozen_ring(records, disk, buffers)
        first = len(self._of(OPTIMIZER, DISK)) if kind == PARAMETERS else 0
        return self._stores.disk_ring(records, disk, first, buffers, memory if on_device else ())

    def _on_device(self, each: StateRecord) -> list[Tensor]:
        return [
            self._arena.allocate("optimizer", elements, elements * each.used, dtype)
            for dtype, elements in each.record.fields
        ]

    def _updated_on(self, each: StateRecord) -> torch.device:
        """Return where a bucket is updated: one that is on the device is so there, whoever updates the others."""
        return self._arena.device if DEVICE in (self._executor, each.place) else torch.device("cpu")

    def _units(self, store: TieredRecords) -> dict[str, UnitBuckets]:
        """Return which records each unit has."""
        buckets: dict[str, list[Bucket]] = {}
        shards: dict[str, int] = {}
        for index, each in enumerate(self._records):
            if each.kind in (OPTIMIZER, FROZEN):
                start, stop = each.placed.start, each.placed.start + each.placed.elements
                bucket = Bucket(start, stop, index, each.names, self._updated_on(each))
                buckets.setdefault(each.unit, []).append(bucket)
            if each.kind in (PARAMETERS, FROZEN):
                shards[each.unit] = index
        passes = self._offload.params == DISK
        return {unit: UnitBuckets(store, own, shards.get(unit), passes) for unit, own in buckets.items()}
