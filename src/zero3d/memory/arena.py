"""The one place that allocates persistent and bucket buffers, and the one that reads device values.

Every buffer has a category and a place. Categories of model states are held for the engine's
life, gradients from their first use in a step to their unit's update; transient ones come and go with a unit:

    states     parameters | gradients | optimizer | padding (elements of a storage that are no parameter)
    transient  gathered (full parameters) | bucket (local gradients on their way) | wire (send and receive; scratch of
               sums and of the cast to weights) |
               received (activations and their gradients from neighbours in a pipeline)

A dry run sees all memory here, and no value-dependent branch but through `host_value` or `Comm.read`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from fractions import Fraction
from typing import TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

STATES = ("parameters", "gradients", "optimizer", "padding")
TRANSIENT = ("gathered", "bucket", "wire", "received")

LOOK = 5e-5  # seconds between two looks at whether the device has got to a copy

Number = TypeVar("Number", int, float)


class GivenBack:
    """Buffers that a side stream gave back, until compute has waited for their last use there.

    Before that the side stream may borrow them again, whose work is done in order.

    number  of what is being issued: a buffer that is given back was used by it, and by none after
    """

    def __init__(self) -> None:
        self.number = 0
        self._buffers: list[tuple[int, Tensor]] = []

    def keep(self, buffer: Tensor) -> None:
        """Keep a buffer that is given back."""
        self._buffers.append((self.number, buffer))

    def again(self, elements: int, dtype: torch.dtype) -> Tensor | None:
        """Return one of this size and dtype, which is no longer kept, if there is one."""
        for place, (_, buffer) in enumerate(self._buffers):
            if buffer.numel() == elements and buffer.dtype == dtype:
                del self._buffers[place]
                return buffer
        return None

    def let_go(self, number: int) -> None:
        """Drop those whose last use was issued as this number or before: compute has waited for it."""
        self._buffers = [kept for kept in self._buffers if kept[0] > number]


def nothing() -> None:
    """Do nothing."""


class Arena:
    """Allocates flat buffers on one device and keeps account of them by category.

    `states` are exact fractions: padding is counted per rank as its share of the unit's
    padding, so that parameters + padding is the buffer to the byte.
    """

    def __init__(self, device: torch.device, place: str = "device") -> None:
        self.device = device
        self.place = place
        self._live: dict[str, Fraction | int] = {}  # a transient buffer's are whole: Fractions take longer to add
        self._peak: dict[str, Fraction | int] = {}
        self._total = self._most = 0  # of whole buffers, now and at the fullest instant
        self._fullest: dict[str, Fraction | int] = {}  # by category then
        self._away: dict[str, Fraction | int] = {}  # of states that come and go: those that are without memory now
        self._stuck: set[int] = set()
        self._pinned = torch.empty(0, dtype=torch.uint8)
        self.stream: AbstractContextManager[object] = (
            nullcontext()
        )  # of whose pool transient memory is; see `SideStream`
        self.used: GivenBack | None = None  # what a side stream gives back goes here

    def _account(self, category: str, change: Fraction | int) -> None:
        live = self._live.get(category, 0) + change
        assert live >= 0, f"arena: {category} fell below zero"
        self._live[category] = live
        self._peak[category] = max(self._peak.get(category, 0), live)

    def _add(self, nbytes: int) -> None:
        """Take a whole buffer, whose categories have been accounted, into the sum of all."""
        self._total += nbytes
        if self._total > self._most:
            self._most, self._fullest = self._total, dict(self._live)

    def allocate(self, category: str, elements: int, used: Fraction | int, dtype: torch.dtype) -> Tensor:
        """Return a zeroed flat buffer for model states, `used` of its `elements` standing for parameters."""
        self._account(category, used * dtype.itemsize)
        self._account("padding", (elements - used) * dtype.itemsize)
        self._add(elements * dtype.itemsize)
        return torch.zeros(elements, dtype=dtype, device=self.device)

    def let_go(self, category: str, elements: int, used: Fraction | int, dtype: torch.dtype) -> None:
        """Take states off the account that were allocated so; their owner drops the reference."""
        self._account(category, -used * dtype.itemsize)
        self._account("padding", -(elements - used) * dtype.itemsize)
        self._add(-elements * dtype.itemsize)

    def hold(self, category: str, nbytes: int, used: Fraction) -> None:
        """Take a slab's memory on the account; used: the share of it that stands for parameters."""
        self._account(category, nbytes * used)
        self._account("padding", nbytes - nbytes * used)
        self._add(nbytes)

    def reserve(self, category: str, elements: int, used: Fraction | int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised flat buffer for states that come and go: `drain` and `fill` take the same `used`."""
        self._account(category, used * dtype.itemsize)
        self._account("padding", (elements - used) * dtype.itemsize)
        self._add(elements * dtype.itemsize)
        return torch.empty(elements, dtype=dtype, device=self.device)

    def borrow(self, category: str, elements: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised transient buffer, to be given back."""
        self._account(category, elements * dtype.itemsize)
        self._add(elements * dtype.itemsize)
        again = None if self.used is None else self.used.again(elements, dtype)
        if again is not None:
            return again
        with self.stream:
            return torch.empty(elements, dtype=dtype, device=self.device)

    def give_back(self, category: str, buffer: Tensor) -> None:
        """Take a transient buffer off the account; its owner drops the reference."""
        self._account(category, -buffer.numel() * buffer.dtype.itemsize)
        self._add(-buffer.numel() * buffer.dtype.itemsize)
        if self.used is not None:
            self.used.keep(buffer)

    def fill(self, category: str, buffer: Tensor, used: Fraction | int | None = None) -> None:
        """Give a storage its memory back: views of it come alive. used: as in `allocate`, of states."""
        if id(buffer) in self._stuck:
            return
        self._count(category, buffer, used, 1)
        with self.stream:
            buffer.untyped_storage().resize_(buffer.numel() * buffer.dtype.itemsize)

    def _count(self, category: str, buffer: Tensor, used: Fraction | int | None, sign: int) -> None:
        nbytes = sign * buffer.dtype.itemsize
        if used is None:
            self._account(category, nbytes * buffer.numel())
        else:
            for name, elements in ((category, used), ("padding", buffer.numel() - used)):
                self._account(name, nbytes * elements)
                self._away[name] = self._away.get(name, 0) - nbytes * elements
        self._add(nbytes * buffer.numel())

    def forget(self, category: str, buffer: Tensor, used: Fraction | int) -> None:
        """Hear that a buffer which is without memory is never filled again."""
        for name, elements in ((category, used), ("padding", buffer.numel() - used)):
            self._away[name] -= elements * buffer.dtype.itemsize

    def drain(
        self,
        category: str,
        buffer: Tensor,
        poison: bool = False,
        kept: bool = False,
        used: Fraction | int | None = None,
    ) -> None:
        """Free a storage's memory and keep its identity. used: as in `fill`.

        A storage that somebody made a numpy array of cannot be freed any more: it stays on the account.
        `poison` fills it with NaN and keeps the pages, so that a test that reads a released view
        sees NaN where a run would crash. `kept` does so, too: somebody else still has views.
        """
        if not buffer.untyped_storage().resizable():
            self._stuck.add(id(buffer))
            return
        self._count(category, buffer, used, -1)
        if kept:
            buffer.view(torch.uint8).fill_(255)  # which is NaN, of whatever it is read as
        elif poison and buffer.is_floating_point():
            buffer.fill_(float("nan"))
        else:
            buffer.untyped_storage().resize_(0)

    def on_host(self, values: Tensor, patience: float, look: Callable[[], object] = nothing) -> Tensor:
        """Return a small tensor as it is on the host, from the device by way of pinned memory that is used again.

        Waits for what the device has still to do before, and calls `look` again and again, which may raise an error.
        Raises TimeoutError after `patience` seconds, where a plain read would wait for ever.
        """
        if values.device.type == "cpu":
            return values
        if self._pinned.numel() < values.nbytes:
            self._pinned = torch.empty(values.nbytes, dtype=torch.uint8, pin_memory=torch.accelerator.is_available())
        copy = self._pinned[: values.nbytes].view(values.dtype).copy_(values.flatten(), non_blocking=True)
        event, end = torch.Event(values.device), time.monotonic() + patience
        event.record()
        while not event.query():
            look()
            if time.monotonic() > end:
                raise TimeoutError(f"the device has not got to a copy of {values.nbytes} bytes in {patience:.0f} s")
            time.sleep(LOOK)
        return copy.view(values.shape).clone()

    def live(self, category: str) -> Fraction:
        """Return the bytes held now."""
        return Fraction(self._live.get(category, 0))

    def peak(self, category: str) -> Fraction:
        """Return the most bytes held at any instant since the last `reset_peaks`."""
        return Fraction(self._peak.get(category, 0))

    def at_peak(self, category: str) -> Fraction:
        """Return the bytes held at the instant since the last `reset_peaks` at which most was held of all together."""
        return Fraction(self._fullest.get(category, 0))

    def held(self, category: str) -> Fraction:
        """Return the bytes of states when all of them are there: of gradients and padding those without memory, too."""
        return self.live(category) + self._away.get(category, 0)

    def reset_peaks(self) -> None:
        """Start measuring peaks anew."""
        self._peak = dict(self._live)
        self._fullest = dict(self._live)
        self._most = self._total


def device_values(values: Sequence[float], device: torch.device) -> Tensor:
    """Return numbers of the host as a float64 vector on the device, which is not waited for."""
    on_host = torch.tensor(values, dtype=torch.float64, pin_memory=device.type != "cpu")
    return on_host.to(device, non_blocking=True)


def host_value(values: Tensor, assumed: list[Number]) -> list[Number]:
    """Read a small vector on the host, before there are ranks to name if it never comes (`Comm.read` is for then).

    In a dry run, where values do not exist, `assumed` stands in for them.
    """
    if isinstance(values, FakeTensor):
        return assumed
    return list(values.tolist())
