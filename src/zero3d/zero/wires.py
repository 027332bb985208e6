"""How a unit's weights reach its ranks: what travels, and over which of them.

    zero.gather_wire    what travels of a shard [n]          arrives in
    same                its weights                          the unit's storage, in place
    int8                a message of blocks (block_codec)    a buffer, decoded into the storage when the unit is used

A message is made of the shard at every gather: the codes follow from the weights alone, so that no rank keeps any, and
nothing can be out of date. Who owns a shard decodes its own message, too, and all ranks have the same bits. A block of
256 elements is of one shard and one slot on every number of ranks that divides 64.

    zero.second_shard   an update after which a unit is gathered from
    not given           all ranks of dp
    RANKS, node         all ranks of dp once: each keeps 1 / RANKS of what arrived; then from RANKS neighbours alone

        arrived, of 8 ranks     | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 |      what travels, whatever it is
        kept by 4 neighbours    |   0   |   1   |   2   |   3   |      1/4 of it each

A second shard is a copy, and is of the last update or not used: `Second.drop` is called wherever shards change
(`Weights.changed`), on all ranks alike, since ranks that disagree would wait for each other.

Source of both: Wang et al., "ZeRO++: extremely efficient collective communication" (2023), sections 3.1 and 3.2.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from zero3d.blueprint.layout import UnitLayout
from zero3d.distributed.axis import Pending
from zero3d.distributed.block_bytes import coding_scratch
from zero3d.distributed.collectives import Comm
from zero3d.zero.buckets import ShardPlace
from zero3d.zero.unit_parts import UnitParts


class Second:
    """A second shard of what travels of a unit: one of `comm.size` equal parts, each of a neighbour.

    shard    [elements, or bytes, / RANKS]  this rank's part
    kept     it is of the weights as they are now
    updates  how often weights have changed
    """

    def __init__(self, comm: Comm, shard: Tensor) -> None:
        self.comm = comm
        self.shard = shard
        self.kept = False
        self.updates = 0

    def drop(self) -> None:
        """Say that weights have changed: the next gather is over all ranks."""
        self.kept = False
        self.updates += 1

    def keep(self, arrived: Tensor, updates: int) -> None:
        """Keep this rank's part of what was sent after so many updates, unless there were more since."""
        if updates == self.updates:
            self.shard.copy_(arrived.view(self.comm.size, -1)[self.comm.rank])
            self.kept = True


class Wire:
    """Gathers a unit's weights from its ranks, each of which has its shard at a place.

    place   where this rank's shard is
    codec   of messages; None: weights travel as they are
    second  the second shard, if there is one
    """

    def __init__(self, name: str, layout: UnitLayout, dtype: torch.dtype, parts: UnitParts, place: ShardPlace) -> None:
        self._name, self.place = name, place
        self._parts = parts
        self.codec = parts.codec
        self._travels = layout.shard if self.codec is None else self.codec.message_bytes(layout.shard)
        self.second: Second | None = None
        if parts.node is not None:
            elements = self._travels * parts.comm.size // parts.node.size
            kind = dtype if self.codec is None else torch.uint8
            used = Fraction(elements * layout.numel, layout.total)
            self.second = Second(parts.node, parts.arena.allocate("parameters", elements, used, kind))

    def gather(self, full: Tensor, fill: bool) -> Pending:
        """Start to fill `full` [total] from all shards, or second ones; moves (N-1)/N of it per rank as it travels.

        fill  allocate `full`: when the message has arrived, or now where the weights arrive in `full` itself
        """
        if self.codec is None:
            return self.gather_weights(full, fill)
        message = self._parts.arena.borrow("wire", self._travels * self._parts.comm.size, torch.uint8)
        try:
            pending = self._start(message, self._encode)
        except BaseException:
            self._parts.arena.give_back("wire", message)
            raise
        return Pending(partial(self._decode, pending, message, full, fill))

    def gather_weights(self, full: Tensor, fill: bool) -> Pending:
        """Start to fill `full` with weights as they are."""
        arena, poison = self._parts.arena, self._parts.plan.policy.poison
        if fill:
            arena.fill("gathered", full)
        try:
            if self.codec is None:
                return self._start(full, self.bring)
            return self._parts.comm.all_gather(full, self.bring(full), self._name)
        except BaseException:
            if fill:
                arena.drain("gathered", full, poison)
            raise

    def gather_to_first(self) -> Tensor | None:
        """Return the weights as they are [total] on the first rank, which all others give their shards; None there."""
        with self.place.opened(False) as shard:
            return self._parts.comm.gather_to_first(shard, self._name)

    def _start(self, travels: Tensor, bring: Callable[[Tensor], Tensor]) -> Pending:
        """Start to gather what travels, and keep a second shard of it when it has arrived."""
        second = self.second
        if second is None:
            return self._parts.comm.all_gather(travels, bring(travels), self._name)
        if second.kept:
            return second.comm.all_gather(travels, second.shard, self._name)
        pending = self._parts.comm.all_gather(travels, bring(travels), self._name)
        return Pending(partial(_arrive, pending, second, travels, second.updates))

    def bring(self, full: Tensor) -> Tensor:
        """Return this rank's shard on the device: one that is elsewhere is written to its slot of `full`."""
        return self.place.bring(self._parts.slot(full), self._parts.spare(full))

    def _encode(self, message: Tensor) -> Tensor:
        """Write this rank's part of a message, and return it."""
        codec, arena, own = self.codec, self._parts.arena, self._parts.slot(message)
        assert codec is not None
        with self.place.opened(False) as shard:
            near = shard
            if shard.device != message.device:
                near = arena.borrow("wire", shard.numel(), shard.dtype).copy_(shard, non_blocking=True)
            scratch = self._scratch(shard.numel())
            codec.encode(near, own, scratch)
            arena.give_back("wire", scratch)
            if near is not shard:
                arena.give_back("wire", near)
        return own

    def _decode(self, pending: Pending, message: Tensor, full: Tensor, fill: bool) -> None:
        arena, ranks = self._parts.arena, self._parts.comm.size
        assert self.codec is not None
        if fill:
            arena.fill("gathered", full)
        try:
            pending.wait()
            scratch = self._scratch(full.numel())
            self.codec.decode(message.view(ranks, -1), full.view(ranks, -1), scratch)
            arena.give_back("wire", scratch)
        finally:
            arena.give_back("wire", message)

    def _scratch(self, elements: int) -> Tensor:
        arena = self._parts.arena
        return arena.borrow("wire", coding_scratch(elements, arena.device.type), torch.float32)


def _arrive(pending: Pending, second: Second, travels: Tensor, updates: int) -> None:
    pending.wait()
    second.keep(travels, updates)
