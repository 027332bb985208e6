"""All records of a rank, wherever each has its place, behind one way to use them.

    place         updated on the device                  updated on the host
    device        where it is                            -
    host          through a ring of device buffers       where it is
    other tiers   through a ring of device buffers       through a ring of host buffers, unless the host addresses them

    with store.opened(index) as fields:     brought, used, taken back; `ahead` before it hides the way
    store.view(index)                       its fields as they are stored, to be read: all at once, as a checkpoint does

`TieredRecords` has records of several places, and asks the tier that a record is in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from zero3d.offload.disk_slab import DiskSlab
from zero3d.offload.ring import Ring


class Tier(Protocol):
    """Records of one kind at one place.

    commits  whether a slab commits them with their step
    """

    commits: bool = False

    def ahead(self, index: int) -> None:
        """Begin to bring a record."""

    def fetch(self, index: int) -> list[Tensor]:
        """Return a record's fields where they are used."""

    def retire(self, index: int, changed: bool = True) -> None:
        """Take a record back."""

    def used(self, index: int, device: torch.device) -> None:
        """Say that a device's current stream copies from or to a record."""

    def view(self, index: int) -> list[Tensor]:
        """Return a record's fields as they are stored, to be read."""

    def drain(self) -> None:
        """Wait until all that was retired is at its place."""

    def close(self) -> None:
        """Wait for all that is under way and give threads and files back."""


class InPlace(Tier):
    """Records that are used where they are."""

    def __init__(self, fields: Sequence[list[Tensor]]) -> None:
        self._fields = fields

    def ahead(self, index: int) -> None: ...

    def fetch(self, index: int) -> list[Tensor]:
        return self._fields[index]

    def retire(self, index: int, changed: bool = True) -> None: ...

    def used(self, index: int, device: torch.device) -> None: ...

    def view(self, index: int) -> list[Tensor]:
        return self._fields[index]

    def drain(self) -> None: ...

    def close(self) -> None: ...


class ThroughRing(Tier):
    """Records that pass through a ring of buffers; `fields`: of records in a host slab."""

    def __init__(self, ring: Ring, fields: Sequence[list[Tensor]] = ()) -> None:
        self._ring, self._fields = ring, fields

    def ahead(self, index: int) -> None:
        self._ring.ahead(index)

    def fetch(self, index: int) -> list[Tensor]:
        return self._ring.fetch(index)

    def retire(self, index: int, changed: bool = True) -> None:
        self._ring.retire(index, changed)

    def used(self, index: int, device: torch.device) -> None:
        self._ring.used(index, device)

    def view(self, index: int) -> list[Tensor]:
        return self._fields[index]

    def drain(self) -> None:
        self._ring.drain()

    def close(self) -> None:
        self._ring.close()


class Address(NamedTuple):
    """Where a record is: its tier, and its number there."""

    tier: Tier
    number: int


class TieredRecords:
    """Owns all records of a rank, numbered through; in the order of their numbers they are needed first."""

    def __init__(self, addresses: Sequence[Address], slab: DiskSlab | None = None) -> None:
        """Take over the tiers of the records; slab: of the records that are committed step by step."""
        self._addresses, self._slab = addresses, slab
        self._tiers = list({id(each.tier): each.tier for each in addresses}.values())
        self._open: dict[int, int] = {}
        self._changed: set[int] = set()
        self._steps = 0  # as the engine counts them
        self._unconfirmed = False

    def ahead(self, index: int) -> None:
        """Begin to bring a record; nobody waits."""
        tier, number = self._addresses[index]
        tier.ahead(number)

    @contextmanager
    def opened(self, index: int, changed: bool = True) -> Iterator[list[Tensor]]:
        """Have a record's fields where they are used inside, and take them back; may be nested.

        What an exception leaves is not taken back.
        """
        tier, number = self._addresses[index]
        self._open[index] = self._open.get(index, 0) + 1
        try:
            yield tier.fetch(number)
            if changed:
                self._changed.add(index)
        finally:
            self._open[index] -= 1
            if not self._open[index]:
                del self._open[index]
                tier.retire(number, index in self._changed)
                self._changed.discard(index)

    def used(self, index: int, device: torch.device) -> None:
        """Say that a device's current stream copies from or to an open record."""
        tier, number = self._addresses[index]
        tier.used(number, device)

    def view(self, index: int) -> list[Tensor]:
        """Return a record's fields as they are stored, to be read; those of an open one as they are used."""
        tier, number = self._addresses[index]
        if index in self._open:
            return tier.fetch(number)
        tier.drain()
        return tier.view(number)

    def drain(self) -> None:
        """Wait until all that was changed is at its place."""
        for tier in self._tiers:
            tier.drain()

    def commit(self) -> None:
        """Say that all records of a step are changed; a disk has its records whole when this returns."""
        if self._slab is not None:
            self.drain()
            if not self._steps:
                self._slab.discard()  # what an earlier process has left
            self._steps += 1
            self._slab.commit(self._steps)
            self._unconfirmed = True

    def confirm(self) -> None:
        """Say that all ranks have committed their last step."""
        if self._slab is not None and self._unconfirmed:
            self._slab.confirm(self._steps)
            self._unconfirmed = False

    def discard(self) -> None:
        """Say that others than a step write records: the step that is committed is not to be gone back to."""
        if self._slab is not None and self._slab.steps:
            self._slab.discard()
            self._unconfirmed = False

    def count_from(self, step: int) -> None:
        """Say which step the records are of now."""
        self._steps = step

    def clear(self) -> None:
        """Have the records of the slab be zeros, as those of a new file are."""
        for index, (tier, _) in enumerate(self._addresses):
            if tier.commits:
                with self.opened(index) as fields:
                    for values in fields:
                        values.zero_()

    def verify(self) -> bool:
        """Compare the records committed by an earlier process with their checksums; False where there are none.

        Raises CheckpointError.
        """
        assert self._slab is not None
        return self._slab.verify()

    def go_back(self) -> None:
        """Go back to the records of the step committed by an earlier process that all ranks have agreed on."""
        assert self._slab is not None
        self.drain()
        self._steps = self._slab.steps[0]
        self._slab.resume(self._steps)

    def close(self) -> None:
        """Wait for all that is under way and give threads and files back."""
        for tier in self._tiers:
            tier.close()
        if self._slab is not None:
            self._slab.close()
