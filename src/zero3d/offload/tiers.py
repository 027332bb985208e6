"""The tiers of an engine: memory, files and rings for the records that leave the device.

    records  of optimizer states, one a bucket; of shards of weights; of gradients      states.py, blueprint/places.py
      -> budget   host bytes of this rank, refused with the arithmetic before any are taken   memory/budget.py
      -> slab     one mapping of the host: its own records, and buffers of all                host_slab.py
      -> tiers    each tier with records, opened as its row says (spec/tiers.py)              host_tier.py, disk_tier.py
      -> store    all records, each in place or behind a ring                                 tiered_records.py

All of it is made before the first unit, and nothing later. `Stores` maps the memory, opens the tiers and starts the
threads; a dry run has its own `Stores`, for any row.
"""

from __future__ import annotations

import warnings
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.blueprint.auto import ExecutorChoice, MeasuredRates
from zero3d.blueprint.places import FROZEN, GRADIENTS, OPTIMIZER, PARAMETERS
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import STATES, TRANSIENT, Arena
from zero3d.memory.blocks import padded
from zero3d.memory.budget import HostBudget
from zero3d.memory.threads import Threads, unwaited
from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.executors import DeviceExecutor, Executor, OnHost, StagedGradients
from zero3d.offload.host_adam import HostExecutor, scratch_bytes
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.rates import measure_rates
from zero3d.offload.records import Record
from zero3d.offload.ring import ring_buffers
from zero3d.offload.states import CATEGORY, WORDS, StateRecord, planned_bytes
from zero3d.offload.tiered_records import Address, InPlace, Tier, TieredRecords
from zero3d.offload.updates import RecordUpdates
from zero3d.spec.offload import Offload
from zero3d.spec.tiers import DEVICE, HOST, TIERS, TierRow, is_buffered
from zero3d.zero.buckets import Bucket, UnitBuckets
from zero3d.zero.clocks import Clocks
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
    norms    bytes of the host in which norms of gradients are taken
    """

    arena: Arena
    world: Comm
    owner: str
    compute: torch.dtype
    budget: Callable[[], HostBudget]
    threads: int = 1
    norms: int = 0


class Opening(NamedTuple):
    """Describes what a tier is opened for.

    records  that are there, in the order of their numbers
    folder   for a tier that has files
    slab     of the host, which has the records of the host's own tier
    """

    site: Site
    records: Sequence[StateRecord]
    folder: Path | None
    slab: HostSlab


class OpenTier(ABC):
    """Owns a rank's open files and memory of one tier. Each tier's row names the tier's subclass and its file.

    A constructor that may fail does so on all ranks (`distributed.agreement.agree`); new records are zeros.

    slab      the file with committed steps, if the tier's records have slots that take turns
    replaced  the step of another run that was there; NEVER, or UNKNOWN
    """

    slab: DiskSlab | None = None
    replaced = NEVER

    def __init__(self, opening: Opening) -> None:
        self._opening = opening

    def records(self, kind: str) -> list[Record]:
        """Return the records of a kind that are here."""
        return [each.record for each in self._opening.records if each.kind == kind]

    @abstractmethod
    def tier(self, kind: str, buffers: Sequence[Tensor], staging: Sequence[Tensor]) -> Tier:
        """Return the records of a kind, as they are used.

        buffers  of the ring through which they pass; none if they are used in place
        staging  as many buffers of the host, if the ring's are on a device and the tier is not addressed
        """


class Stores:
    """Opens what records are kept in.

    on_cpu  whether the device is a CPU
    """

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

    def open(self, row: TierRow, opening: Opening) -> OpenTier:
        """Open a tier by what its row names, on all ranks or none."""
        opened = resolve_name(row.call)(opening)
        assert isinstance(opened, OpenTier)
        return opened

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
    """Owns an engine's states off its device.

    units     the buckets of each unit in records, by its name
    kept      memory of the host for units' reduced gradients, by name, where they leave the device
    arenas    accounts of all tiers, by name
    executor  "device" | "host": where updates are made
    planned   bytes by (category, place), from layouts alone
    dtypes    of masters and optimizer states in records
    why       the arithmetic by which the executor was chosen, if it was open
    slab      the file with committed steps, if any tier has one
    threads   of this rank on the host
    replaced  the step of another run that was there; NEVER, or UNKNOWN
    """

    units: Mapping[str, UnitBuckets]
    kept: Mapping[str, Tensor]
    store: TieredRecords
    stores: Stores
    arenas: Mapping[str, Arena]
    executor: str
    planned: Mapping[tuple[str, str], Fraction]
    dtypes: frozenset[torch.dtype]
    ring_of_weights: bool
    staging: tuple[Tensor, Tensor] | None
    why: str
    slab: DiskSlab | None
    threads: int
    replaced: int

    @property
    def host_bytes(self) -> int:
        """Return the bytes of the host's slab."""
        return int(sum(self.arenas[HOST].live(category) for category in (*STATES, *TRANSIENT)))

    def updates(self, optimizer: ShardedOptimizer, arena: Arena, clocks: Clocks) -> RecordUpdates | None:
        """Return the updates of an optimizer's pieces in records; None if only frozen weights are in records."""
        if all(unit.weights.records is None for unit in optimizer.units):
            return None
        executor: Executor = (near := DeviceExecutor(optimizer.torch, arena, self._staged(optimizer, arena)))
        if self.executor == HOST:
            executor = self.stores.updates_on_host(optimizer, self.arenas[HOST], self.staging, near)
        hooks = optimizer.torch._optimizer_step_pre_hooks, optimizer.torch._optimizer_step_post_hooks
        if any(hooks):
            warnings.warn(
                "the optimizer has step hooks: with states off the device they are called once per bucket, and never "
                "if the host computes the updates.",
                stacklevel=6,
            )
        # Of weights behind a ring that one serves gathers and updates, from one thread.
        behind = self.executor == HOST and arena.device.type != "cpu" and not self.ring_of_weights
        thread = Threads(1, "updates") if behind else None
        return RecordUpdates(optimizer, executor, self.store, arena.device, clocks, thread)

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
        self._arenas = {name: Arena(torch.device("cpu"), name) for name in TIERS}
        self._here = self._executor == HOST or stores.on_cpu  # records pass through memory of the host

    def tiers(self) -> Tiers:
        """Make them all, or raise on all ranks."""
        slab = self._open_slab()
        opened = self._open_tiers(slab)
        committed = next((each.slab for each in opened.values() if each.slab is not None), None)
        store = TieredRecords(self._addresses(slab, opened), committed)
        tiers = Tiers(
            units=self._units(store),
            kept={each.unit: store.view(i)[0] for i, each in enumerate(self._records) if each.kind == GRADIENTS},
            store=store,
            stores=self._stores,
            arenas=self._arenas,
            executor=self._executor,
            planned=planned_bytes(self._records),
            dtypes=frozenset(d for each in self._records if each.kind == OPTIMIZER for d, _ in each.record.fields),
            ring_of_weights=is_buffered(self._offload.params),
            staging=self._staging(slab),
            why=self._why,
            slab=committed,
            threads=self._site.threads,
            replaced=max((each.replaced for each in opened.values()), default=NEVER),
        )
        weakref.finalize(tiers, unwaited, store.close)
        return tiers

    def _open_slab(self) -> HostSlab:
        """Map what all records and buffers on the host take. Raises OutOfBudget."""
        parts = self._parts()
        asked = {part: sum(padded(record.nbytes) for record in records) for part, records in parts.items()}
        for row in self._used:
            if row.on_host and row.name != HOST:
                held = sum(each.placed.held for each in self._records if each.place == row.name)
                asked[f"records {row.where}"] = held
        if self._executor == HOST and any(e.kind == OPTIMIZER and e.place != DEVICE for e in self._records):
            asked["scratch of updates"] = scratch_bytes(self._site.threads)
        if self._site.norms:
            asked["norms of gradients"] = self._site.norms
        return self._stores.host(parts, asked)

    def _open_tiers(self, slab: HostSlab) -> dict[str, OpenTier]:
        """Open the tiers of all records, and tiers that settings ask for though they have no record yet."""
        folder = None if self._offload.directory is None else Path(self._offload.directory)
        opened = {}
        for row in self._used:
            records = [each for each in self._records if each.place == row.name]
            opened[row.name] = self._stores.open(row, Opening(self._site, records, folder, slab))
        return opened

    @property
    def _used(self) -> list[TierRow]:
        """Return the tiers that may have records, in the order of their rows."""
        asked = {self._offload.optimizer, self._offload.params, self._offload.gradients}
        return [row for row in TIERS.values() if row.name in asked]

    # --- memory of the host -----------------------------------------------------------------------

    def _of(self, kind: str, place: str) -> list[Record]:
        return [each.record for each in self._records if each.kind == kind and each.place == place]

    def _parts(self) -> dict[str, list[Record]]:
        """Return the contents of the host's slab, by their names in words."""
        parts = {WORDS[kind]: self._of(kind, HOST) for kind in CATEGORY}
        for kind in CATEGORY:
            if self._rings_on_host(kind):
                parts[f"{BUFFERS} of {WORDS[kind]}"] = ring_buffers(self._ring_records(kind))
        if self._executor == HOST and not self._stores.on_cpu:
            longest = max(each.placed.elements for each in self._records if each.kind == OPTIMIZER)
            parts[STAGING] = [Record(STAGING, ((torch.float32, longest), (self._site.compute, longest)))]
        return parts

    def _place(self, kind: str) -> str:
        """Return the place of a kind's records that leave the device."""
        offload = self._offload
        return {OPTIMIZER: offload.optimizer, GRADIENTS: offload.gradients}.get(kind, offload.params)

    def _ring_records(self, kind: str) -> list[Record]:
        """Return the records of a kind, in its place, that pass through a ring."""
        place = self._place(kind)
        updated = place in TIERS and kind == OPTIMIZER and self._executor == DEVICE
        return self._of(kind, place) if updated or is_buffered(place) else []

    def _rings_on_host(self, kind: str) -> bool:
        """Whether a kind's ring has buffers, or staging memory for them, on the host."""
        return bool(self._ring_records(kind)) and (self._here or is_buffered(self._place(kind)))

    def _staging(self, slab: HostSlab) -> tuple[Tensor, Tensor] | None:
        if STAGING not in slab.views:
            return None
        grads, weights = slab.views[STAGING][0]
        return grads, weights

    # --- records ------------------------------------------------------------------------------------

    def _addresses(self, slab: HostSlab, opened: Mapping[str, OpenTier]) -> list[Address]:
        """Put every record in the tier of its kind and place, and on that place's account."""
        places = dict.fromkeys((each.kind, each.place) for each in self._records)
        tiers = {key: self._tier(*key, slab, opened) for key in places}
        numbers = dict.fromkeys(tiers, 0)
        found = []
        for each in self._records:
            key = each.kind, each.place
            found.append(Address(tiers[key], numbers[key]))
            numbers[key] += 1
            if each.place != DEVICE:
                held = each.placed.held
                used = each.used * Fraction(each.placed.slots * each.record.nbytes, held) if held else Fraction(0)
                self._arenas[each.place].hold(CATEGORY[each.kind], held, used)
        for part, memory in slab.memory.items():
            if part not in WORDS.values():
                self._arenas[HOST].hold("wire", sum(padded(each.numel()) for each in memory), Fraction(1))
        return found

    def _tier(self, kind: str, place: str, slab: HostSlab, opened: Mapping[str, OpenTier]) -> Tier:
        if place == DEVICE:
            return InPlace(
                [self._on_device(each) for each in self._records if (each.kind, each.place) == (kind, place)]
            )
        ring = self._ring_records(kind)
        memory = slab.memory.get(f"{BUFFERS} of {WORDS[kind]}", [])
        if ring and self._executor == DEVICE and kind == OPTIMIZER and not self._stores.on_cpu:
            buffers = [self._arena.borrow("wire", each.nbytes, torch.uint8) for each in ring_buffers(ring)]
            return opened[place].tier(kind, buffers, memory)
        return opened[place].tier(kind, memory if ring else (), ())

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
        passes = is_buffered(self._offload.params)
        return {unit: UnitBuckets(store, own, shards.get(unit), passes) for unit, own in buckets.items()}
