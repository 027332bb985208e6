"""A unit's states in buckets, each wherever it is placed: on the device, the host or a disk.

    shard_or_full of a unit   |  bucket 0   |  bucket 1   |b 2|
    a bucket's record         [ weights? | master? | exp_avg | exp_avg_sq ]      fields by name
    a shard of weights        [ weights ]                                        one record, stage 3; or none,
                                                                                 where gathers cast its masters

This file says which buckets a unit has and what is in them. The owner of their records brings them (`Records`):
`Resident` owns records on the device, which are used where they are; offload/ owns all others.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero3d.memory.arena import Arena
from zero3d.memory.scratch import cast_scratch
from zero3d.precision import cast_flat, rounds_away, to_compute

MASTER, WEIGHTS = "master", "weights"  # fields of a record, beside the states that an optimizer names


class Records(Protocol):
    """Requests to the owner of the records."""

    def ahead(self, index: int) -> None:
        """Begin to bring a record; nobody waits."""

    def opened(self, index: int, changed: bool = True) -> AbstractContextManager[list[Tensor]]:
        """Have a record's fields where they are used inside, and take them back."""

    def used(self, index: int, device: torch.device) -> None:
        """Say that a device's current stream copies from or to an open record: its memory is not another's before."""

    def view(self, index: int) -> list[Tensor]:
        """Return a record's fields as they are stored, to be read; those of an open one as they are used."""

    def drain(self) -> None:
        """Wait until all that was changed is at its place."""

    def commit(self) -> None:
        """Say that all records of a step are changed; a disk has its records whole when this returns."""

    def confirm(self) -> None:
        """Say that all ranks have committed their last step."""

    def discard(self) -> None:
        """Say that something other than a step writes records: nobody may go back to the committed step."""

    def count_from(self, step: int) -> None:
        """Say which step the records are of now."""


class Resident(Records):
    """Records on the device: nothing is brought, and nothing is taken back."""

    def __init__(self, fields: Sequence[list[Tensor]]) -> None:
        self._fields = fields

    def ahead(self, index: int) -> None: ...

    @contextmanager
    def opened(self, index: int, changed: bool = True) -> Iterator[list[Tensor]]:
        yield self._fields[index]

    def used(self, index: int, device: torch.device) -> None: ...

    def view(self, index: int) -> list[Tensor]:
        return self._fields[index]

    def drain(self) -> None: ...

    def commit(self) -> None: ...

    def confirm(self) -> None: ...

    def discard(self) -> None: ...

    def count_from(self, step: int) -> None: ...


class Bucket(NamedTuple):
    """A range of a unit's elements on the rank that updates them, its record's number and fields, and the device."""

    start: int
    stop: int
    record: int
    names: tuple[str, ...]
    device: torch.device


@dataclass(frozen=True)
class UnitBuckets:
    """The buckets of a unit, and who owns their records.

    buckets  of a trainable unit, in order; of a frozen one its weights
    shard    the number of the record of its weights, where they are not on the device while sharded
    passes   whether that comes through a ring's buffers
    """

    records: Records
    buckets: Sequence[Bucket]
    shard: int | None = None
    passes: bool = False

    @property
    def resident(self) -> bool:
        """Return whether all buckets are on the device, where they are used."""
        return isinstance(self.records, Resident)

    @contextmanager
    def opened(self, bucket: Bucket, changed: bool = True) -> Iterator[dict[str, Tensor]]:
        """Have a bucket's fields by name inside."""
        with self.records.opened(bucket.record, changed) as fields:
            yield dict(zip(bucket.names, fields, strict=True))

    def fields(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return a bucket's fields by name as they are stored: on the device they may be changed, else read."""
        return dict(zip(bucket.names, self.records.view(bucket.record), strict=True))

    def view(self, bucket: Bucket, name: str) -> Tensor:
        """Return one field of a bucket as it is stored, to be read."""
        return self.records.view(bucket.record)[bucket.names.index(name)]

    def within(self, start: int, stop: int) -> Iterator[tuple[Bucket, int, int]]:
        """Yield the buckets that a range overlaps, each with the start and stop of the overlap."""
        first = bisect_right(self.buckets, start, key=lambda bucket: bucket.stop)
        for bucket in self.buckets[first:]:
            if bucket.start >= stop:
                break
            yield bucket, max(start, bucket.start), min(stop, bucket.stop)


class ShardPlace(Protocol):
    """Where a unit's shard of weights is while the unit is not gathered."""

    def view(self) -> Tensor:
        """Return it, to be read."""

    def opened(self, changed: bool) -> AbstractContextManager[Tensor]:
        """Have it inside, to be changed."""

    def ahead(self) -> None:
        """Begin to bring it."""

    def bring(self, slot: Tensor, spare: Tensor) -> Tensor:
        """Return it on the device: there already, or written to its slot of what is gathered.

        spare  memory that may be written meanwhile, in the slot's dtype
        """


class OnDevice(ShardPlace):
    """A shard on the device."""

    def __init__(self, shard: Tensor) -> None:
        self._shard = shard

    def view(self) -> Tensor:
        return self._shard

    @contextmanager
    def opened(self, changed: bool) -> Iterator[Tensor]:
        yield self._shard

    def ahead(self) -> None: ...

    def bring(self, slot: Tensor, spare: Tensor) -> Tensor:
        return self._shard


class InMasters(ShardPlace):
    """A shard of which nothing is kept: it is cast from its masters on the device whenever it is read.

    What is written into it is lost: a change is one of masters.
    """

    def __init__(self, masters: Tensor, dtype: torch.dtype, arena: Arena) -> None:
        self.masters = masters
        self._dtype, self._arena = dtype, arena

    def view(self) -> Tensor:
        return to_compute(self.masters, self._dtype)

    @contextmanager
    def opened(self, changed: bool) -> Iterator[Tensor]:
        shard = self._arena.borrow("wire", self.masters.numel(), self._dtype)
        try:
            yield self.bring(shard, shard[:0])
        finally:
            self._arena.give_back("wire", shard)

    def ahead(self) -> None: ...

    def bring(self, slot: Tensor, spare: Tensor) -> Tensor:
        rounds = rounds_away(self.masters.dtype, slot.dtype)
        room = rounds * cast_scratch(self.masters.numel(), slot.device.type)
        if spare.numel():
            cast_flat(self.masters, slot, spare.view(torch.float32)[:room])
            return slot
        scratch = self._arena.borrow("wire", room, torch.float32)
        cast_flat(self.masters, slot, scratch)
        self._arena.give_back("wire", scratch)
        return slot


class InRecord(ShardPlace):
    """A shard that is a record; of an engine on `device`. passes: through a buffer that has others, too."""

    def __init__(self, records: Records, index: int, device: torch.device, passes: bool) -> None:
        self._records = records
        self._index = index
        self._device = device
        self._passes = passes

    def view(self) -> Tensor:
        return self._records.view(self._index)[0]

    @contextmanager
    def opened(self, changed: bool) -> Iterator[Tensor]:
        with self._records.opened(self._index, changed) as (shard,):
            yield shard
            if shard.device != self._device and self._passes:
                self._records.used(self._index, self._device)

    def ahead(self) -> None:
        self._records.ahead(self._index)

    def bring(self, slot: Tensor, spare: Tensor) -> Tensor:
        with self.opened(False) as shard:
            slot.copy_(shard, non_blocking=True)
        return slot
