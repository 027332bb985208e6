"""The masters of what a rank updates of a unit, `Weights.shard_or_full` [numel], in one of three forms.

    copied      an fp32 copy, which is cast to weights after an update, or in every gather (buckets.InMasters)
    split       the bf16 weights and a 16-bit remainder, which together are the fp32 master bit for bit
                (`precision.join_master`): 10 bytes of optimizer states per parameter for 12
    the same    the weights themselves, where these are in the masters' dtype, and of frozen units

Each of them is on the device or in buckets that need not be there (buckets.py). Whoever reads or writes masters does so
by flat ranges, and knows neither form nor place. The torch optimizer has views of masters that are copied or the same
and on the device; others exist in fp32 only while their bucket is updated (updates.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor

from zero3d.blueprint.layout import Piece
from zero3d.distributed.collectives import same_memory
from zero3d.memory.arena import Arena
from zero3d.memory.scratch import update_bucket
from zero3d.precision import Halves, joined, split_master, to_compute
from zero3d.zero.buckets import MASTER, WEIGHTS, Bucket, InMasters, OnDevice, Resident, ShardPlace, UnitBuckets

REMAINDER = torch.int16
MIX = 6364136223846793005  # Knuth's multiplier, odd


class Masters:
    """Owns a unit's masters.

    buckets  of the masters and the optimizer's states
    weights  the place of the weights that this rank updates, in compute dtype
    dtype    of the masters
    stored   the part of the masters beside the weights, where it is on the device
    """

    def __init__(
        self,
        buckets: UnitBuckets,
        weights: ShardPlace,
        dtype: torch.dtype,
        compute: torch.dtype,
        stored: Tensor | None = None,
    ) -> None:
        self.buckets = buckets
        self._weights = weights
        self.dtype = dtype
        self._compute = compute
        self.stored = stored
        self._has_master = MASTER in buckets.buckets[0].names
        self._held: tuple[Tensor, Arena] | None = None  # what weights were, while others may write into them
        self._checksum: Tensor | None = None  # of weights that are masters, meanwhile

    @classmethod
    def on_device(cls, weights: Tensor, dtype: torch.dtype, stored: Tensor | None) -> Masters:
        """Return masters on the device; stored: of `dtype` a copy, int16 the remainders, None for the weights."""
        return cls(_in_ranges(weights, stored), OnDevice(weights), dtype, weights.dtype, stored)

    @classmethod
    def alone(cls, stored: Tensor, weights: InMasters, compute: torch.dtype) -> Masters:
        """Return masters on the device from which weights are cast whenever they are read."""
        return cls(_in_ranges(stored, stored), weights, stored.dtype, compute, stored)

    @property
    def split(self) -> bool:
        """Whether masters on the device are weights and remainders."""
        return self.stored is not None and self.stored.dtype == REMAINDER

    @property
    def copied(self) -> Tensor | None:
        """Masters on the device from which weights are cast; None where there is no such copy."""
        return None if self.split else self.stored

    @property
    def cast(self) -> tuple[Tensor, Tensor] | None:
        """Masters on the device and the weights that they are cast to after an update; None where weights follow."""
        kept = None if isinstance(self._weights, InMasters) else self.copied
        return None if kept is None else (kept, self._weights.view())

    def parts(self, piece: Piece) -> Iterator[tuple[Piece, Tensor]]:
        """Cut a piece into parts, each updated at once; yield each with the tensor that an optimizer gets for it.

        Masters that are split or in records are cut at the borders of buckets. Their tensors read as NaN except while
        they are updated.
        """
        end = piece.offset + piece.stop - piece.start
        if self.buckets.resident and not self.split:
            whole = self.read(piece.offset, end)
            assert isinstance(whole, Tensor)
            yield piece, whole
            return
        for bucket, low, high in self.buckets.within(piece.offset, end):
            part = Piece(piece.slot, piece.start + low - piece.offset, piece.start + high - piece.offset, low)
            yield part, absent(torch.empty((), dtype=self.dtype, device=bucket.device).expand(high - low))

    # --- values ---------------------------------------------------------------------------------

    def read(self, start: int, stop: int) -> Tensor | Halves:
        """Return a range as it is stored, to be read: a view, over several buckets of records a joined copy."""
        if self.buckets.resident:
            return self._as_stored(start, stop, self.stored[start:stop] if self.stored is not None else None)
        found = [
            self._as_stored(low, high, self._in_bucket(bucket, low, high))
            for bucket, low, high in self.buckets.within(start, stop)
        ]
        if len(found) == 1:
            return found[0]
        whole = [joined(part) for part in found]
        return torch.cat([part.to(whole[0].device) for part in whole])  # some buckets may have stayed on the device

    def _in_bucket(self, bucket: Bucket, low: int, high: int) -> Tensor | None:
        return self.buckets.view(bucket, MASTER)[low - bucket.start : high - bucket.start] if self._has_master else None

    def _as_stored(self, start: int, stop: int, master: Tensor | None) -> Tensor | Halves:
        if master is not None and master.dtype != REMAINDER:
            return master
        weights = (self._weights.view() if self._held is None else self._held[0])[start:stop]
        return weights if master is None else Halves(weights, master)

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite a range, and use `values` up. Weights follow, those in `cast` at the next `Weights.refresh`."""
        if self.copied is not None:
            _copy(self.copied[start : start + values.numel()], values)
            return
        with self._weights.opened(True) as weights:
            for bucket, low, high in self.buckets.within(start, start + values.numel()):
                with self.buckets.opened(bucket) as fields:
                    self._write(bucket, low, fields, weights, values[low - start : high - start])

    def _write(self, bucket: Bucket, low: int, fields: dict[str, Tensor], weights: Tensor, values: Tensor) -> None:
        target, within = weights[low : low + len(values)], slice(low - bucket.start, low - bucket.start + len(values))
        if not self._has_master:
            _copy(target, values)
        else:
            master = fields[MASTER][within]
            place = master.device
            near = values.to(place)
            if master.dtype == REMAINDER:
                cast = target if target.device == place else torch.empty_like(target, device=place)
                split_master(near, cast, master, scratch=near)
                if cast is not target:
                    target.copy_(cast)
            else:
                _copy(master, near)
                target.copy_(to_compute(near, self._compute))
        if WEIGHTS in fields:
            fields[WEIGHTS][within].copy_(target)

    def from_weights(self, weights: Tensor) -> None:
        """Make masters on the device of these weights."""
        if self.copied is not None:
            self.copied.copy_(weights)
        elif self.stored is not None:
            self.stored.zero_()

    def revive(self) -> None:
        """Make weights from the buckets' fields, where these are enough for it."""
        with self._weights.opened(True) as weights:
            for bucket in self.buckets.buckets:
                with self.buckets.opened(bucket, changed=False) as fields:
                    target, master = weights[bucket.start : bucket.stop], fields.get(MASTER)
                    if WEIGHTS in fields:
                        target.copy_(fields[WEIGHTS])
                    elif master is not None and master.dtype != REMAINDER:
                        target.copy_(to_compute(master, self._compute))

    def whole(self, arena: Arena) -> AbstractContextManager[Tensor | None]:
        """Give inside the whole part of the masters beside the weights, to be changed; None where there is none."""
        return nullcontext(self.stored) if self.buckets.resident else self._gathered(arena)

    @contextmanager
    def _gathered(self, arena: Arena) -> Iterator[Tensor | None]:
        """Have a copy of all buckets' masters inside, on the device, and keep what becomes of it."""
        if not self._has_master:
            yield None
            return
        buckets = self.buckets
        dtype = buckets.view(buckets.buckets[0], MASTER).dtype
        whole = arena.borrow("wire", buckets.buckets[-1].stop, dtype)
        for bucket in buckets.buckets:
            whole[bucket.start : bucket.stop].copy_(buckets.view(bucket, MASTER))
        yield whole
        for bucket in buckets.buckets:
            with buckets.opened(bucket) as fields:
                fields[MASTER].copy_(whole[bucket.start : bucket.stop])
        arena.give_back("wire", whole)

    # --- what others write into weights -----------------------------------------------------------

    @property
    def copies_weights(self) -> bool:
        """Return whether `hold` keeps a copy of the weights, because masters are computed from them."""
        return self.split or not self.buckets.resident

    def hold(self, arena: Arena) -> None:
        """Prepare for others who may write into the weights themselves, until `absorb`."""
        if self.copies_weights:
            weights = self._weights.view()
            self._held = arena.borrow("gathered", weights.numel(), weights.dtype).copy_(weights), arena
        elif self.stored is None:
            self._checksum = checksum(self._weights.view())

    def go_on_from(self, before: Masters) -> None:
        """Take over the checksum for `absorb` from the masters before these."""
        self._checksum = before._checksum

    def absorb(self, weights: Tensor) -> bool:
        """Take over what others wrote into weights, and return whether they did.

        A master changes only where its weight differs from its cast, so that reading costs no bit.
        """
        written = False
        if self._checksum is not None:
            seen, self._checksum = self._checksum, None
            written = not torch.equal(seen, checksum(weights))
            if self.stored is None:  # there is nothing to take over: they are these
                return written
        if self.copied is not None:
            before = to_compute(self.copied, self._compute)
        else:
            before = self._weights.view() if self._held is None else self._held[0]
        changed = bits(weights) != bits(before.to(weights.device))
        if self._held is not None:
            self._held[1].give_back("gathered", self._held[0])
            self._held = None
        if changed.any():
            written = True
            self.buckets.records.discard()
            for bucket in self.buckets.buckets:
                within = slice(bucket.start, bucket.stop)
                if changed[within].any():
                    with self._kept(weights) as own, self.buckets.opened(bucket) as fields:
                        self._absorb(fields, own[within], weights[within], changed[within])
        return written

    def _kept(self, written: Tensor) -> AbstractContextManager[Tensor]:
        """Give the kept weights inside, to be changed; `written` itself where gathers cast masters."""
        return nullcontext(written) if isinstance(self._weights, InMasters) else self._weights.opened(True)

    def _absorb(self, fields: dict[str, Tensor], own: Tensor, weights: Tensor, changed: Tensor) -> None:
        if self._has_master:
            master = fields[MASTER]
            mask = changed.to(master.device)
            if master.dtype == REMAINDER:
                master.masked_fill_(mask, 0)
            else:
                master[mask] = weights.to(master.device)[mask].to(master.dtype)
        _copy(own, weights)
        if WEIGHTS in fields:
            fields[WEIGHTS].copy_(weights)


def _in_ranges(updated: Tensor, stored: Tensor | None) -> UnitBuckets:
    """Return the buckets, on its device, of what a rank updates: ranges of halves, one of all others."""
    numel, device = updated.numel(), updated.device
    size = update_bucket(device.type) if stored is not None and stored.dtype == REMAINDER else numel
    names = () if stored is None else (MASTER,)
    ranges = [(start, min(start + size, numel)) for start in range(0, numel, size or 1)]
    fields = [[] if stored is None else [stored[start:stop]] for start, stop in ranges]
    buckets = [Bucket(start, stop, number, names, device) for number, (start, stop) in enumerate(ranges)]
    return UnitBuckets(Resident(fields), buckets or [Bucket(0, 0, 0, names, device)])


def _copy(target: Tensor, values: Tensor) -> None:
    if not same_memory(target, values):
        target.copy_(values)


def absent(like: Tensor) -> Tensor:
    """Return a placeholder for values in a bucket: one NaN, in their shape."""
    return like.new_full((), float("nan")).expand(like.shape)


def bits(values: Tensor) -> Tensor:
    """Return the raw bits, by which NaNs and signed zeros compare exactly."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return values.view(integers[values.dtype.itemsize])


def checksum(values: Tensor) -> Tensor:
    """Return 64 bits that follow from all bits of flat values and their places, as one integer on their device.

    A change in 8 bytes alone always changes it: every word is multiplied by an odd number of its own. Takes 16 bytes of
    scratch for each word of a part: 1 MiB on the CPU, 16 MiB on accelerators, where a part is worth its launches.
    """
    words = values.view(torch.int64)
    most = 1 << (16 if values.device.type == "cpu" else 20)
    factors = torch.arange(min(len(words), most), device=words.device).add_(1).mul_(MIX)
    factors = factors.bitwise_xor_(factors >> 32).mul_(MIX).bitwise_or_(1)
    found = words.new_zeros(())
    for part in torch.split(words, most):
        found = found.mul_(MIX).add_((part * factors[: len(part)]).sum())
    return found
