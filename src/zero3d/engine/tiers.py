"""The tiers of an engine: which records its units have, and slabs, files and rings for those that leave the device.

    specs of units, in forward order
      -> records     of optimizer states, one a bucket; of shards of weights                  offload/placement.py
      -> places      device, host, disk
      -> budget      host bytes of this rank, refused with the arithmetic before any are taken   memory/budget.py
      -> store       one host slab, one file, rings                                           offload/record_store.py

All of it is made before the first unit, and nothing later.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zero3d.distributed.agreement import agree
from zero3d.engine.auto_offload import settle_executor
from zero3d.engine.foundation import Foundation, host_share
from zero3d.engine.slots import NEVER, UNKNOWN, Slots
from zero3d.engine.tier_records import (
    BUFFERS,
    CATEGORY,
    FROZEN,
    GRADIENTS,
    OPTIMIZER,
    PARAMETERS,
    STAGING,
    Placed,
    StateKinds,
    copies,
    place_bytes,
    placed_records,
    planned_bytes,
    restarts_from,
)
from zero3d.errors import CheckpointError, ConfigError
from zero3d.memory.arena import STATES, TRANSIENT, Arena
from zero3d.memory.blocks import padded
from zero3d.memory.threads import Threads, unwaited
from zero3d.models.blocks import UnitSpec
from zero3d.offload import commit_file
from zero3d.offload.auto_place import ExecutorChoice
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.executors import DeviceExecutor, Executor, OnHost
from zero3d.offload.host_adam import HostExecutor, scratch_bytes
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.record_file import RecordFile
from zero3d.offload.record_store import InPlace, OnDisk, RecordStore, Shelf, Standing, ThroughRing
from zero3d.offload.records import Record
from zero3d.offload.ring import DiskTier, HostTier, Ring, ring_buffers
from zero3d.offload.updates import RecordUpdates
from zero3d.spec.offload import DEVICE, DISK, HOST, Offload
from zero3d.zero.buckets import Bucket, UnitBuckets
from zero3d.zero.layout import UnitLayout
from zero3d.zero.optimizer import ShardedOptimizer, in_turn


@dataclass(frozen=True)
class Tiers:
    """Owns what an engine has off its device.

    units     what each unit has in records, by name
    kept      memory of the host for units' reduced gradients, by name, where they leave the device
    arenas    accounts of the host and of the disk
    executor  "device" | "host": where updates are made
    planned   bytes by (category, place), from layouts alone
    why       the arithmetic of the executor, where that was open
    slots     of a disk, for a restart; None where not all that is trained is there
    """

    units: Mapping[str, UnitBuckets]
    kept: Mapping[str, Tensor]
    store: RecordStore
    arenas: Mapping[str, Arena]
    executor: str
    planned: Mapping[tuple[str, str], Fraction]
    ring_of_weights: bool
    staging: tuple[Tensor, Tensor] | None = None
    why: str = ""
    slots: Slots | None = None

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host's slab."""
        return int(sum(self.arenas[HOST].live(category) for category in (*STATES, *TRANSIENT)))

    def updates(self, optimizer: ShardedOptimizer, arena: Arena) -> RecordUpdates | None:
        """Return what updates an optimizer's pieces in records; None where only frozen weights are."""
        if all(unit.weights.records is None for unit in optimizer.units):
            return None
        near = DeviceExecutor(optimizer.torch, arena)
        executor = near if self.executor == DEVICE else self._on_host(optimizer, near)
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

    def _on_host(self, optimizer: ShardedOptimizer, near: DeviceExecutor) -> Executor:
        """Return what updates on the host."""
        threads = HostExecutor(torch.get_num_threads(), self.arenas[HOST])
        weakref.finalize(optimizer, threads.close)
        return OnHost(optimizer.torch, threads, self.staging, near)


def open_tiers(base: Foundation, specs: Sequence[UnitSpec], layouts: Mapping[str, UnitLayout]) -> Tiers | None:
    """Make what an engine's records need; None where nothing leaves the device. Raises ConfigError, OutOfBudget."""
    offload = base.options.offload
    if not offload.states:
        return None
    if offload.params != "none" and base.resolved.policy.release == "every_step":
        raise ConfigError(
            f"offload.params={offload.params} with release='every_step', which keeps all parameters gathered: pass "
            "release='every_use', or offload.params=none."
        )
    policy = base.resolved.policy
    if offload.gradients == HOST and (policy.reduce != "every_micro_batch" or base.options.zero.exact):
        why = "exact=True sums" if base.options.zero.exact else "reduce='every_step' keeps"
        raise ConfigError(
            f"offload.gradients=host, and {why} gradients on the device until the last micro-batch: pass "
            "offload.gradients=device."
        )
    kinds = StateKinds.of(base)
    executor = _executor(base, kinds)
    placed = list(placed_records(base, in_turn(specs), layouts, kinds))
    return Builder(base, offload, placed, executor).tiers(restarts_from(specs, placed, kinds))


def _executor(base: Foundation, kinds: StateKinds) -> ExecutorChoice:
    """Return where updates are made. Raises ConfigError."""
    executor = settle_executor(base, kinds.on_host, sum(dtype.itemsize for dtype in kinds.states.values()))
    if executor.name == HOST and not kinds.on_host:
        raise ConfigError(
            f"offload.executor=host has torch's fused Adam and AdamW with fp32 moments, and the optimizer is "
            f"{kinds.kind.__name__}(fused={kinds.fused}), whose states are {kinds.described}: pass one of them with "
            "fused=True, without amsgrad and not in fp64, or offload.executor=device."
        )
    return executor


class Builder:
    """Makes slabs, files and rings for records that have their places."""

    def __init__(self, base: Foundation, offload: Offload, placed: Sequence[Placed], executor: ExecutorChoice) -> None:
        self._base, self._offload, self._placed = base, offload, placed
        self._executor, self._why = executor
        self._arena = base.axes.arena
        self._host_arena = Arena(torch.device("cpu"), HOST)
        self._disk_arena = Arena(torch.device("cpu"), DISK)
        self._on_cpu = self._arena.device.type == "cpu"
        self._replaced = NEVER  # the step of another run that was on the disk
        self._here = self._executor == HOST or self._on_cpu  # records pass through memory of the host

    def tiers(self, restartable: bool) -> Tiers:
        """Make them all, or raise on all ranks; restartable: from slots of a disk."""
        slab = self._open_slab()
        disk = self._open_disk()
        slots = None if disk is None else Slots.agreed(disk, self._base.axes.world, restartable, self._replaced)
        standing = self._standing(slab, disk)
        store = RecordStore(standing, disk)
        if disk is not None and disk.had_steps:
            store.clear()
        arenas = {HOST: self._host_arena, DISK: self._disk_arena}
        names = [each.unit for each in self._placed if each.part == GRADIENTS]
        tiers = Tiers(
            units=self._units(store),
            kept={name: shard for name, (shard,) in zip(names, slab.views[GRADIENTS], strict=True)},
            store=store,
            arenas=arenas,
            executor=self._executor,
            planned=planned_bytes(self._placed),
            ring_of_weights=self._offload.params == DISK,
            staging=self._staging(slab),
            why=self._why,
            slots=slots if restartable else None,
        )
        weakref.finalize(tiers, unwaited, store.close)
        return tiers

    def _open_slab(self) -> HostSlab:
        """Map what all records and buffers on the host take. Raises OutOfBudget."""
        budget, parts = host_share(self._base), self._parts()
        asked = {part: sum(padded(record.nbytes) for record in records) for part, records in parts.items()}
        if self._executor == HOST and self._of(OPTIMIZER, HOST) + self._of(OPTIMIZER, DISK):
            asked["scratch of updates"] = scratch_bytes(torch.get_num_threads())

        def open_slab() -> HostSlab:
            budget.check(asked)
            return HostSlab(parts, self._arena.device)

        return agree(self._base.axes.world, open_slab)

    def _of(self, part: str, place: str) -> list[Record]:
        return [each.record for each in self._placed if each.part == part and each.place == place]

    def _parts(self) -> dict[str, list[Record]]:
        """Return what the host's slab holds."""
        parts = {part: self._of(part, HOST) for part in CATEGORY}
        for part in CATEGORY:
            if self._rings_on_host(part):
                parts[f"{BUFFERS} of {part}"] = ring_buffers(self._ring_records(part))
        if self._executor == HOST and not self._on_cpu:
            longest = max(each.elements for each in self._placed if each.part == OPTIMIZER)
            parts[STAGING] = [
                Record(STAGING, ((torch.float32, longest), (self._base.resolved.precision.dtype, longest)))
            ]
        return parts

    def _ring_records(self, part: str) -> list[Record]:
        """Return the records of a part that pass through a ring, those of one place."""
        place = {OPTIMIZER: self._offload.optimizer, GRADIENTS: HOST}.get(part, self._offload.params)
        through = place == DISK or (place == HOST and part == OPTIMIZER and self._executor == DEVICE)
        return self._of(part, place) if through else []

    def _rings_on_host(self, part: str) -> bool:
        """Whether a part's ring has buffers, or staging memory for them, on the host."""
        disk = (self._offload.optimizer if part == OPTIMIZER else self._offload.params) == DISK
        return bool(self._ring_records(part)) and (disk or self._here)

    def _staging(self, slab: HostSlab) -> tuple[Tensor, Tensor] | None:
        if STAGING not in slab.views:
            return None
        grads, weights = slab.views[STAGING][0]
        return grads, weights

    def _open_disk(self) -> DiskSlab | None:
        """Open the file of what changes in every step, if anything is on a disk. Raises as DiskSlab does."""
        return agree(self._base.axes.world, self._disk)

    def _disk(self) -> DiskSlab | None:
        if not self._offload.uses_disk:
            return None
        records = {
            each.described: each.record.nbytes for each in self._placed if each.place == DISK and each.part != FROZEN
        }
        world, mesh = self._base.axes.world, self._base.resolved.mesh
        assert self._offload.directory is not None
        owner = f"rank {world.rank} of {mesh.degrees}"
        open_slab = partial(DiskSlab, Path(self._offload.directory), world.rank, records, owner)
        try:
            return open_slab()
        except CheckpointError:  # of other records, or damaged: nothing to go on from, and all ranks say so
            commit = (Path(self._offload.directory) / f"rank-{world.rank:05d}").with_suffix(".commit")
            self._replaced = commit_file.step_of(commit) or UNKNOWN
            return open_slab(discard=True)

    def _standing(self, slab: HostSlab, disk: DiskSlab | None) -> list[Standing]:
        """Put every record on a shelf of its part and place, and on that place's account."""
        shelves = {key: self._shelf(*key, slab, disk) for key in dict.fromkeys((e.part, e.place) for e in self._placed)}
        numbers = dict.fromkeys(shelves, 0)
        standing = []
        for each in self._placed:
            key = each.part, each.place
            standing.append(Standing(shelves[key], numbers[key]))
            numbers[key] += 1
            if each.place != DEVICE:
                arena = self._host_arena if each.place == HOST else self._disk_arena
                nbytes = place_bytes(each)
                used = each.used * Fraction(copies(each) * each.record.nbytes, nbytes) if nbytes else Fraction(0)
                arena.hold(CATEGORY[each.part], nbytes, used)
        for part, memory in slab.memory.items():
            if part not in CATEGORY:
                self._host_arena.hold("wire", sum(padded(each.numel()) for each in memory), Fraction(1))
        return standing

    def _shelf(self, part: str, place: str, slab: HostSlab, disk: DiskSlab | None) -> Shelf:
        records = self._of(part, place)
        if place == DEVICE:
            return InPlace(
                [self._on_device(each) for each in self._placed if each.part == part and each.place == place]
            )
        if place == HOST and part not in self._through_rings():
            return InPlace(slab.views[part])
        memory = slab.memory.get(f"{BUFFERS} of {part}", [])
        on_device = self._executor == DEVICE and part == OPTIMIZER and not self._on_cpu
        buffers = (
            [self._arena.borrow("wire", each.nbytes, torch.uint8) for each in ring_buffers(records)]
            if on_device
            else memory
        )
        staging = memory if on_device and place == DISK else ()
        if place == HOST:
            return ThroughRing(Ring(HostTier(slab.memory[part]), records, buffers), slab.views[part])
        if part == FROZEN:
            assert disk is not None
            file = RecordFile(disk.path.with_suffix(".frozen"), [record.nbytes for record in records])
            return OnDisk(Ring(DiskTier(file), records, buffers), records, file.newest, changes=False)
        assert disk is not None
        first = len(self._of(OPTIMIZER, DISK)) if part == PARAMETERS else 0
        ring = Ring(DiskTier(disk, first), records, buffers, staging)
        return OnDisk(ring, records, lambda index: disk.newest(first + index))

    def _through_rings(self) -> list[str]:
        return [part for part in CATEGORY if self._ring_records(part)]

    def _on_device(self, each: Placed) -> list[Tensor]:
        return [
            self._arena.allocate("optimizer", elements, elements * each.used, dtype)
            for dtype, elements in each.record.fields
        ]

    def _updated_on(self, each: Placed) -> torch.device:
        """Return where a bucket is updated: one that is on the device is so there, whoever updates the others."""
        return self._arena.device if DEVICE in (self._executor, each.place) else torch.device("cpu")

    def _units(self, store: RecordStore) -> dict[str, UnitBuckets]:
        """Return which records each unit has."""
        buckets: dict[str, list[Bucket]] = {}
        shards: dict[str, int] = {}
        for index, each in enumerate(self._placed):
            if each.part == OPTIMIZER:
                bucket = Bucket(each.start, each.start + each.elements, index, each.names, self._updated_on(each))
                buckets.setdefault(each.unit, []).append(bucket)
            elif each.part != GRADIENTS:
                shards[each.unit] = index
                if each.part == FROZEN:
                    buckets[each.unit] = [Bucket(0, each.elements, index, each.names, self._updated_on(each))]
        passes = self._offload.params == DISK
        return {unit: UnitBuckets(store, own, shards.get(unit), passes) for unit, own in buckets.items()}
