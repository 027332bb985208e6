"""Masters in records: beside the optimizer states of their bucket, on the device, the host or a disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from zero3d.distributed.collectives import same_memory
from zero3d.memory.arena import Arena
from zero3d.precision import Halves, joined, split_master, to_compute
from zero3d.zero.layout import Piece
from zero3d.zero.masters import REMAINDER, Masters, bits
from zero3d.zero.state_records import MASTER, WEIGHTS, Bucket, ShardPlace, UnitRecords


class RecordMasters(Masters):
    """Owns a unit's masters, which are in records: as they are, in halves, or the weights themselves.

    weights  where what this rank updates is, in compute dtype
    """

    cast = None
    stored = None

    def __init__(self, unit: UnitRecords, weights: ShardPlace, dtype: torch.dtype, compute: torch.dtype) -> None:
        self.unit, self._weights, self.dtype, self._compute = unit, weights, dtype, compute
        self._has_master = MASTER in unit.buckets[0].names
        self._held: tuple[Tensor, Arena] | None = None

    def parts(self, piece: Piece) -> Iterator[tuple[Piece, Tensor]]:
        """Cut a piece at the borders of buckets. The tensor of a part reads as NaN but while it is updated."""
        end = piece.offset + piece.stop - piece.start
        for bucket, low, high in self.unit.within(piece.offset, end):
            part = Piece(piece.slot, piece.start + low - piece.offset, piece.start + high - piece.offset, low)
            yield part, absent(torch.empty((), dtype=self.dtype, device=bucket.device).expand(high - low))

    def read(self, start: int, stop: int) -> Tensor | Halves:
        """Return a range as it is stored, to be read; over several buckets a joined copy."""
        found = [self._read(bucket, low, high) for bucket, low, high in self.unit.within(start, stop)]
        if len(found) == 1:
            return found[0]
        whole = [joined(part) for part in found]
        return torch.cat([part.to(whole[0].device) for part in whole])  # some buckets may have stayed on the device

    def _read(self, bucket: Bucket, low: int, high: int) -> Tensor | Halves:
        weights = self._weights.view() if self._held is None else self._held[0]
        if not self._has_master:
            return weights[low:high]
        stored = self.unit.view(bucket, MASTER)[low - bucket.start : high - bucket.start]
        return Halves(weights[low:high], stored) if stored.dtype == REMAINDER else stored

    def write(self, start: int, values: Tensor) -> None:
        """Overwrite a range, and its weights."""
        with self._weights.opened(True) as weights:
            for bucket, low, high in self.unit.within(start, start + values.numel()):
                with self.unit.opened(bucket) as fields:
                    self._write(bucket, low, fields, weights, values[low - start : high - start])

    def _write(self, bucket: Bucket, low: int, fields: dict[str, Tensor], weights: Tensor, values: Tensor) -> None:
        target, within = weights[low : low + len(values)], slice(low - bucket.start, low - bucket.start + len(values))
        if not self._has_master:
            target.copy_(values)
        else:
            master = fields[MASTER][within]
            place = master.device
            near = values.to(place)
            if master.dtype == REMAINDER:
                cast = target if target.device == place else torch.empty_like(target, device=place)
                split_master(near, cast, master)
                if cast is not target:
                    target.copy_(cast)
            else:
                if not same_memory(master, near):
                    master.copy_(near)
                target.copy_(to_compute(near, self._compute))
        if WEIGHTS in fields:
            fields[WEIGHTS][within].copy_(target)

    def revive(self) -> None:
        """Make weights of what is in the records, where these have what it takes."""
        with self._weights.opened(True) as weights:
            for bucket in self.unit.buckets:
                with self.unit.opened(bucket, changed=False) as fields:
                    target, master = weights[bucket.start : bucket.stop], fields.get(MASTER)
                    if WEIGHTS in fields:
                        target.copy_(fields[WEIGHTS])
                    elif master is not None and master.dtype != REMAINDER:
                        target.copy_(to_compute(master, self._compute))

    @contextmanager
    def whole(self, arena: Arena) -> Iterator[Tensor | None]:
        """Have all that is stored beside the weights inside, on the device, and keep what becomes of it."""
        if not self._has_master:
            yield None
            return
        dtype = self.unit.view(self.unit.buckets[0], MASTER).dtype
        whole = arena.borrow("wire", self.unit.buckets[-1].stop, dtype)
        for bucket in self.unit.buckets:
            whole[bucket.start : bucket.stop].copy_(self.unit.view(bucket, MASTER))
        yield whole
        for bucket in self.unit.buckets:
            with self.unit.opened(bucket) as fields:
                fields[MASTER].copy_(whole[bucket.start : bucket.stop])
        arena.give_back("wire", whole)

    def hold(self, arena: Arena) -> None:
        weights = self._weights.view()
        self._held = arena.borrow("gathered", weights.numel(), weights.dtype).copy_(weights), arena

    def absorb(self, weights: Tensor) -> bool:
        """Take over what others wrote into weights, in the buckets that it is in."""
        held = self._held
        before = self._weights.view() if held is None else held[0]
        changed = bits(weights) != bits(before.to(weights.device))
        self._held = None
        if held is not None:
            held[1].give_back("gathered", held[0])
        written = bool(changed.any())
        if written:
            self.unit.records.discard()
            for bucket in self.unit.buckets:
                within = slice(bucket.start, bucket.stop)
                if changed[within].any():
                    with self._weights.opened(True) as own, self.unit.opened(bucket) as fields:
                        self._absorb(fields, own[within], weights[within], changed[within])
        return written

    def _absorb(self, fields: dict[str, Tensor], own: Tensor, weights: Tensor, changed: Tensor) -> None:
        if self._has_master:
            master = fields[MASTER]
            mask = changed.to(master.device)
            if master.dtype == REMAINDER:
                master.masked_fill_(mask, 0)
            else:
                master[mask] = weights.to(master.device)[mask].to(master.dtype)
        if not same_memory(own, weights):
            own.copy_(weights)
        if WEIGHTS in fields:
            fields[WEIGHTS].copy_(weights)


def absent(like: Tensor) -> Tensor:
    """Return what stands for values that are in a record: one NaN, in their shape."""
    return like.new_full((), float("nan")).expand(like.shape)
