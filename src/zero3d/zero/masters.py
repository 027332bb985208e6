"""The masters of what a rank updates of a unit, `Weights.shard_or_full` [numel], and the ways to store them.

    StoredMasters  as they are: an fp32 copy, which is cast to weights after an update; or no copy, where weights are in
                   the masters' dtype, and for frozen units
    SplitMasters   in halves: the bf16 weights and a 16-bit remainder, which together are the fp32 master bit for bit
                   (`precision.join_master`): 10 bytes of optimizer states per parameter for 12

Whoever else reads or writes masters does so by flat ranges, and knows of neither. Those in halves exist in fp32 only
while they are updated, one bucket after the other (updates.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from zero3d.distributed.collectives import same_memory
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import update_bucket
from zero3d.precision import Halves, join_master, split_master, to_compute
from zero3d.zero.layout import Piece

REMAINDER = torch.int16


class Masters(Protocol):
    """Owns a unit's masters.

    dtype   of the masters
    stored  what is stored of them beside the weights
    cast    masters and the weights that they are cast to after an update; None where weights follow by themselves
    """

    dtype: torch.dtype
    stored: Tensor | None
    cast: tuple[Tensor, Tensor] | None

    def parts(self, piece: Piece) -> Iterator[tuple[Piece, Tensor]]:
        """Cut a piece into what is updated at once; yield each part with the tensor that an optimizer gets for it."""

    def read(self, start: int, stop: int) -> Tensor | Halves:
        """Return a view of a range, as it is stored."""

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite a range, and use `values` up; weights follow at the next `Weights.refresh`."""

    def whole(self, arena: Arena) -> AbstractContextManager[Tensor | None]:
        """Have all that is stored beside the weights inside, to be changed; None where that is nothing."""

    def hold(self, arena: Arena) -> None:
        """Prepare for others who may write into the weights themselves, until `absorb`."""

    def absorb(self, weights: Tensor) -> bool:
        """Take over what others wrote into weights, and return whether they did.

        A master changes only where its weight differs from its cast, so that reading costs no bit.
        """


class StoredMasters(Masters):
    """Owns masters that are stored as they are: `values`, the weights themselves where no copy is needed."""

    def __init__(self, weights: Tensor, values: Tensor) -> None:
        self.values, self.dtype, copied = values, values.dtype, values is not weights
        self.stored = values if copied else None
        self.cast = (values, weights) if copied else None

    def parts(self, piece: Piece) -> Iterator[tuple[Piece, Tensor]]:
        yield piece, self.read(piece.offset, piece.offset + piece.stop - piece.start)

    def read(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]

    def write(self, start: int, values: Tensor) -> None:
        target = self.values[start : start + values.numel()]
        if not same_memory(target, values):
            target.copy_(values)

    def whole(self, arena: Arena) -> AbstractContextManager[Tensor | None]:
        return nullcontext(self.stored)

    def hold(self, arena: Arena) -> None:
        pass

    def absorb(self, weights: Tensor) -> bool:
        if self.cast is None:
            return False
        changed = bits(weights) != bits(to_compute(self.values, weights.dtype))
        written = bool(changed.any())
        if written:
            self.values[changed] = weights[changed].to(self.dtype)
        return written


class SplitMasters(Masters):
    """Owns the remainders of masters whose other halves are the weights.

    held  what the weights were, while others may write into them, and the arena that has it on its account
    """

    def __init__(self, weights: Tensor, remainder: Tensor) -> None:
        self.weights, self.stored, self.remainder = weights, remainder, remainder
        self.dtype, self.cast = torch.float32, None
        self._held: tuple[Tensor, Arena] | None = None

    def parts(self, piece: Piece) -> Iterator[tuple[Piece, Tensor]]:
        """Cut a piece at the borders of buckets. The tensor of a part reads as NaN but while its bucket is joined."""
        end = piece.offset + piece.stop - piece.start
        for start, stop in self.buckets(piece.offset, end):
            low, high = max(start, piece.offset), min(stop, end)
            part = Piece(piece.slot, piece.start + low - piece.offset, piece.start + high - piece.offset, low)
            yield part, self.weights.new_full((), float("nan"), dtype=self.dtype).expand(high - low)

    def buckets(self, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Yield the buckets that a range is in: of one size, but for a unit's last one."""
        size = update_bucket(self.weights.device.type)
        for start in range(low // size * size, high, size):
            yield start, min(start + size, self.weights.numel())

    def read(self, start: int, stop: int) -> Halves:
        weights = self.weights if self._held is None else self._held[0]
        return Halves(weights[start:stop], self.remainder[start:stop])

    def join(self, start: int, out: Tensor) -> None:
        """Write a range into a scratch, as it is in fp32."""
        there = slice(start, start + out.numel())
        join_master(self.weights[there], self.remainder[there], out)

    def write(self, start: int, values: Tensor) -> None:
        there = slice(start, start + values.numel())
        split_master(values, self.weights[there], self.remainder[there], scratch=values)

    def whole(self, arena: Arena) -> AbstractContextManager[Tensor | None]:
        return nullcontext(self.stored)

    def hold(self, arena: Arena) -> None:
        self._held = arena.borrow("gathered", self.weights.numel(), self.weights.dtype).copy_(self.weights), arena

    def absorb(self, weights: Tensor) -> bool:
        before, arena = self._held or (self.weights, None)
        changed = bits(weights) != bits(before)
        written = bool(changed.any())
        if written:
            self.remainder.masked_fill_(changed, 0)
        if arena is not None:
            arena.give_back("gathered", before)
        self._held = None
        return written


def bits(values: Tensor) -> Tensor:
    """Return the raw bits, so that NaNs and signed zeros compare as what they are."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])
