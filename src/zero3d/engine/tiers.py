"""The tiers of an engine: which records its units have, and slabs, files and rings for those that leave the device.

    specs of units, in forward order
      -> records     of optimizer states, one a bucket; of shards of weights                  memory/placement.py
      -> places      device, host, disk
      -> budget      host bytes of this rank, refused with the arithmetic before any are taken   memory/budget.py
      -> store       one host slab, one file, rings                                           memory/record_store.py

All of it is made before the first unit, and nothing later.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import Adam, AdamW, Optimizer

from zero3d.distributed.agreement import agree
from zero3d.engine.checks import check_moments
from zero3d.engine.foundation import Foundation, ranks_per_host
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.memory.blocks import padded
from zero3d.memory.budget import HostBudget, host_budget
from zero3d.memory.disk_slab import DiskSlab
from zero3d.memory.host_slab import HostSlab
from zero3d.memory.offload import DEVICE, DISK, HOST, Offload
from zero3d.memory.placement import bucket_ranges, leave_device
from zero3d.memory.record_file import RecordFile
from zero3d.memory.record_store import InPlace, OnDisk, RecordStore, Shelf, Standing, ThroughRing
from zero3d.memory.records import Record
from zero3d.memory.ring import DiskTier, HostTier, Ring, ring_buffers
from zero3d.memory.scratch import update_bucket
from zero3d.models.blocks import UnitSpec
from zero3d.zero.host_update import HostExecutor
from zero3d.zero.layout import UnitLayout
from zero3d.zero.masters import REMAINDER
from zero3d.zero.optimizer import ShardedOptimizer, in_turn
from zero3d.zero.record_updates import DeviceExecutor, Executor, OnHost, RecordUpdates, record_portions
from zero3d.zero.state_records import MASTER, WEIGHTS, Bucket, UnitRecords

OPTIMIZER, PARAMETERS, FROZEN = "optimizer states", "parameters", "frozen parameters"
BUFFERS, STAGING = "ring buffers", "staging"
CATEGORY = {OPTIMIZER: "optimizer", PARAMETERS: "parameters", FROZEN: "parameters"}


@dataclass(frozen=True)
class Placed:
    """A record, what it is part of, and its place.

    used   the share of its elements that are parameters
    names  of its fields
    start  of its bucket, in what this rank updates of the unit
    """

    part: str
    unit: str
    record: Record
    place: str
    used: Fraction
    names: tuple[str, ...]
    start: int = 0


@dataclass(frozen=True)
class StateKinds:
    """What an optimizer keeps for each element, found by trying it on a few.

    states  dtype of every state that is as long as its parameter, by name
    """

    kind: type[Optimizer]
    fused: bool
    states: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, base: Foundation) -> StateKinds:
        """Try the engine's optimizer on small pieces; what it keeps of them is forgotten. Raises ConfigError."""
        groups, wide = base.resolved.groups, base.resolved.policy.master
        pieces = [[torch.zeros(16, dtype=wide, device=base.axes.arena.device)] for _ in range(groups.groups)]
        optimizer = groups.build(pieces)
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        check_moments(base.options.zero.offload, optimizer)
        for (piece,) in pieces:
            piece.grad = torch.zeros_like(piece)
        optimizer.step()
        states = {
            name: value.dtype
            for name, value in optimizer.state[pieces[0][0]].items()
            if isinstance(value, Tensor) and value.dim() == 1
        }
        optimizer.state.clear()
        for group, own in zip(optimizer.param_groups, options, strict=True):
            group.clear()
            group.update(own, params=[])
        fused = all(bool(group.get("fused")) for group in optimizer.param_groups)
        return cls(type(optimizer), fused, states)

    @property
    def on_host(self) -> bool:
        """Whether the host updates with the bits of this optimizer."""
        return self.fused and self.kind in (Adam, AdamW) and len(self.states) == 2


@dataclass(frozen=True)
class Tiers:
    """Owns what an engine has off its device.

    units     what each unit has in records, by name
    arenas    accounts of the host and of the disk
    executor  "device" | "host": where updates are made
    planned   bytes by (category, place), from layouts alone
    """

    units: Mapping[str, UnitRecords]
    store: RecordStore
    arenas: Mapping[str, Arena]
    executor: str
    planned: Mapping[tuple[str, str], Fraction]
    device: torch.device
    staging: tuple[Tensor, Tensor] | None = None

    @property
    def updates_on(self) -> torch.device:
        """The device of the executor."""
        return self.device if self.executor == DEVICE else torch.device("cpu")

    def updates(self, optimizer: ShardedOptimizer, arena: Arena, rank: int) -> RecordUpdates | None:
        """Return what updates an optimizer's pieces in records; None where only frozen weights are."""
        units = [unit for unit in optimizer.units if unit.weights.records is not None]
        if not units:
            return None
        executor: Executor
        if self.executor == DEVICE:
            executor = DeviceExecutor(optimizer.torch, arena)
        else:
            threads = HostExecutor(torch.get_num_threads(), self.arenas[HOST])
            weakref.finalize(optimizer, threads.close)
            executor = OnHost(optimizer.torch, threads, self.staging)
        portions = record_portions(units, optimizer.pieces, rank)
        return RecordUpdates(optimizer.torch, executor, self.store, portions, optimizer.send)


def open_tiers(base: Foundation, specs: Sequence[UnitSpec], layouts: Mapping[str, UnitLayout]) -> Tiers | None:
    """Make what an engine's records need; None where nothing leaves the device. Raises ConfigError, OutOfBudget."""
    offload = base.options.zero.offload
    if not offload.states:
        return None
    if offload.params != "none" and base.resolved.policy.release == "every_step":
        raise ConfigError(
            f"offload.params={offload.params} with release='every_step', which keeps all parameters gathered for a step: "
            "pass release='every_use', or offload.params=none."
        )
    kinds = StateKinds.of(base)
    executor = _executor(offload, kinds, base.axes.arena.device)
    placed = list(_placed(base, in_turn(specs), layouts, kinds))
    return _Builder(base, offload, placed, executor).tiers()


def _executor(offload: Offload, kinds: StateKinds, device: torch.device) -> str:
    """Return where updates are made."""
    if offload.executor == HOST and not kinds.on_host:
        raise ConfigError(
            f"offload.executor=host updates with torch's fused Adam and AdamW, and the optimizer is {kinds.kind.__name__}"
            f"(fused={kinds.fused}): pass fused=True to one of them, or offload.executor=device."
        )
    if offload.executor != "auto":
        return offload.executor
    return HOST if device.type == "cpu" and kinds.on_host else DEVICE


def _placed(
    base: Foundation, specs: Sequence[UnitSpec], layouts: Mapping[str, UnitLayout], kinds: StateKinds
) -> Iterator[Placed]:
    """Yield all records in forward order: of optimizer states, then of weights."""
    offload, sharded = base.options.zero.offload, base.resolved.policy.stage.shards_optimizer
    fields = partial(_fields, base, kinds)
    device = base.axes.arena.device.type
    buckets = [
        (spec, bucket)
        for spec in specs
        if trains(spec)
        for layout in [layouts[spec.name]]
        for bucket in bucket_ranges(layout.shard if sharded else layout.total, update_bucket(device))
    ]
    sizes = [(stop - start) * sum(d.itemsize for d in fields(spec, HOST).values()) for spec, (start, stop) in buckets]
    away = offload.optimizer
    places = [DEVICE] * len(sizes) if away == "none" else leave_device(sizes, offload.fraction, away)
    for (spec, (start, stop)), place in zip(buckets, places, strict=True):
        names = fields(spec, place)
        record = Record(f"{spec.name}[{start}:{stop}]", tuple((dtype, stop - start) for dtype in names.values()))
        yield Placed(OPTIMIZER, spec.name, record, place, _used(layouts[spec.name]), tuple(names), start)
    for spec in specs if offload.params != "none" else ():
        record = Record(f"{spec.name} weights", ((spec.dtype, layouts[spec.name].shard),))
        part = PARAMETERS if trains(spec) else FROZEN
        yield Placed(part, spec.name, record, offload.params, _used(layouts[spec.name]), (WEIGHTS,))


def trains(spec: UnitSpec) -> bool:
    """Return whether a unit is trainable."""
    return next(iter(spec.params.values())).requires_grad


def _used(layout: UnitLayout) -> Fraction:
    return Fraction(layout.numel, layout.total)


def _fields(base: Foundation, kinds: StateKinds, spec: UnitSpec, place: str) -> dict[str, torch.dtype]:
    """Return the dtypes of a record's fields by name: 16-bit ones first, so that all are aligned."""
    policy, offload = base.resolved.policy, base.options.zero.offload
    fields: dict[str, torch.dtype] = {}
    if spec.dtype != policy.master:
        split = policy.split_master
        if split and place == DISK and offload.params == "none":
            fields[WEIGHTS] = spec.dtype
        fields[MASTER] = REMAINDER if split else policy.master
    return fields | {
        name: torch.bfloat16 if offload.moments == "bf16" else dtype for name, dtype in kinds.states.items()
    }


class _Builder:
    """Makes slabs, files and rings for records that have their places."""

    def __init__(self, base: Foundation, offload: Offload, placed: Sequence[Placed], executor: str) -> None:
        self._base, self._offload, self._placed, self._executor = base, offload, placed, executor
        self._arena = base.axes.arena
        self._host_arena = Arena(torch.device("cpu"), HOST)
        self._disk_arena = Arena(torch.device("cpu"), DISK)
        self._on_cpu = self._arena.device.type == "cpu"
        self._here = executor == HOST or self._on_cpu  # records pass through memory of the host

    def tiers(self) -> Tiers:
        """Make them all, or raise on all ranks."""
        world = self._base.axes.world
        budget = self._budget()
        slab = agree(world, lambda: HostSlab(self._parts(), self._arena.device, budget))
        disk = agree(world, self._disk)
        standing = self._standing(slab, disk)
        store = RecordStore(standing, disk)
        arenas = {place: arena for place, arena in ((HOST, self._host_arena), (DISK, self._disk_arena))}
        units = self._units(store)
        tiers = Tiers(
            units, store, arenas, self._executor, planned_bytes(self._placed), self._arena.device, self._staging(slab)
        )
        weakref.finalize(tiers, store.close)
        return tiers

    def _budget(self) -> HostBudget:
        """Measure what this rank may take; all ranks of a host have measured before any takes."""
        mesh, world = self._base.resolved.mesh, self._base.axes.world
        ranks = ranks_per_host(mesh, world) or mesh.local_world or world.size
        limit = self._offload.host_budget
        assert limit is None or isinstance(limit, int)
        budget = host_budget(ranks, limit)
        world.exchange(torch.zeros(1, device=self._arena.device))
        return budget

    def _of(self, part: str, place: str) -> list[Record]:
        return [each.record for each in self._placed if each.part == part and each.place == place]

    def _parts(self) -> dict[str, list[Record]]:
        """Return what the host's slab holds."""
        parts = {part: self._of(part, HOST) for part in CATEGORY}
        for part in CATEGORY:
            if self._rings_on_host(part):
                parts[f"{BUFFERS} of {part}"] = ring_buffers(self._ring_records(part))
        if self._executor == HOST and not self._on_cpu:
            longest = max(each.record.fields[-1][1] for each in self._placed if each.part == OPTIMIZER)
            parts[STAGING] = [
                Record(STAGING, ((torch.float32, longest), (self._base.resolved.precision.dtype, longest)))
            ]
        return parts

    def _ring_records(self, part: str) -> list[Record]:
        """Return the records of a part that pass through a ring, those of one place."""
        place = self._offload.optimizer if part == OPTIMIZER else self._offload.params
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

    def _disk(self) -> DiskSlab | None:
        """Open the file of what changes in every step."""
        if not self._offload.uses_disk:
            return None
        records = {
            each.record.name: each.record.nbytes for each in self._placed if each.place == DISK and each.part != FROZEN
        }
        world, mesh = self._base.axes.world, self._base.resolved.mesh
        assert self._offload.directory is not None
        owner = f"rank {world.rank} of {mesh.degrees}"
        return DiskSlab(Path(self._offload.directory), world.rank, records, owner, discard=True)

    def _standing(self, slab: HostSlab, disk: DiskSlab | None) -> list[Standing]:
        """Put every record on a shelf of its part and place, and on that place's account."""
        shelves = {key: self._shelf(*key, slab, disk) for key in dict.fromkeys((e.part, e.place) for e in self._placed)}
        numbers = dict.fromkeys(shelves, 0)
        standing = []
        for each in self._placed:
            key = each.part, each.place
            standing.append(Standing(shelves[key], numbers[key], each.place))
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
            return OnDisk(Ring(DiskTier(file), records, buffers), records, file.newest)
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

    def _units(self, store: RecordStore) -> dict[str, UnitRecords]:
        """Return which records each unit has."""
        buckets: dict[str, list[Bucket]] = {}
        shards: dict[str, int] = {}
        for index, each in enumerate(self._placed):
            if each.part == OPTIMIZER:
                elements = each.record.fields[0][1]
                bucket = Bucket(each.start, each.start + elements, index, each.names)
                buckets.setdefault(each.unit, []).append(bucket)
            else:
                shards[each.unit] = index
                if each.part == FROZEN:
                    buckets[each.unit] = [Bucket(0, each.record.fields[0][1], index, each.names)]
        return {unit: UnitRecords(store, own, shards.get(unit)) for unit, own in buckets.items()}


def copies(each: Placed) -> int:
    """Return how often a record is at its place: twice on a disk, in slots that take turns, but for frozen weights."""
    return 2 if each.place == DISK and each.part != FROZEN else 1


def place_bytes(each: Placed) -> int:
    """Return what a record takes at its place."""
    return each.record.nbytes if each.place == DEVICE else copies(each) * padded(each.record.nbytes)


def planned_bytes(placed: Sequence[Placed]) -> dict[tuple[str, str], Fraction]:
    """Return bytes by (category, place): of parameters, and as padding those of other elements and of whole blocks."""
    planned: dict[tuple[str, str], Fraction] = {}
    for each in placed:
        used = each.record.nbytes * copies(each) * each.used
        for category, nbytes in ((CATEGORY[each.part], used), ("padding", place_bytes(each) - used)):
            planned[category, each.place] = planned.get((category, each.place), Fraction(0)) + nbytes
    return planned
