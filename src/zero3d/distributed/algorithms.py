"""How collectives are done: natively, or by messages between every two ranks.

A message carries a tag made of (operation, unit). Ranks that disagree on the next message then time out; without tags,
messages of equal size would be taken for each other.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.distributed.axis import Axis, Call, Pending, Take
from zero3d.distributed.choice import ALL_TO_ALL, FAKE, NATIVE, PAIRWISE
from zero3d.memory.arena import Arena

# torch 2.13 renames these; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Native:
    """Calls torch.distributed once for each operation; the order of a sum is the backend's."""

    name = NATIVE

    def __init__(self, axis: Axis, arena: Arena | None) -> None:
        self._rank = axis.rank
        self._size = axis.size
        self._arena = arena

    def travels(self, kept: torch.dtype, made: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """Return `wire`: sums are rounded on the way."""
        return wire

    def all_gather(self, call: Call, full: Tensor, shard: Tensor | None = None) -> Pending:
        """Fill `full` from this rank's shard, or its slot, and those of the others."""
        mine = full.view(self._size, -1)[self._rank] if shard is None else shard
        return self._start(call, partial(_all_gather, full, mine, group=call.group, async_op=True), lambda: None)

    def reduce_scatter(
        self, call: Call, full: Tensor, wire: torch.dtype, take: Take, out: Tensor | None = None
    ) -> Pending:
        """Give `take` one term, which is the sum; buffers for it where `out` is not, and for a cast of `full`."""
        sends = full if full.dtype == wire else self._borrow(full, full.numel(), wire).copy_(full)
        lands = out is not None and out.dtype == wire
        term = out if out is not None and lands else self._borrow(full, full.numel() // self._size, wire)

        def finish() -> None:
            take([term])
            self._give_back(([] if lands else [term]) + ([] if sends is full else [sends]))

        work = partial(_reduce_scatter, term, sends, dist.ReduceOp.SUM, group=call.group, async_op=True)
        return self._start(call, work, finish)

    def all_to_all(self, call: Call, full: Tensor, take: Take) -> Pending:
        """Give `take` what came from every rank, this one included; a buffer for all of it."""
        received = self._borrow(full, full.numel(), full.dtype)

        def finish() -> None:
            take(list(received.view(self._size, -1).unbind()))
            self._give_back([received])

        raw = received.view(torch.uint8), full.view(torch.uint8)
        return self._start(call, partial(dist.all_to_all_single, *raw, group=call.group, async_op=True), finish)

    def pass_rows(
        self, call: Call, rows: Tensor, sends: Sequence[int], out: Tensor, receives: Sequence[int]
    ) -> Pending:
        """Send so many rows to every rank, and fill `out` with those that come, by rank."""
        counts = list(receives), list(sends)
        work = partial(dist.all_to_all_single, out, rows, *counts, group=call.group, async_op=True)
        return self._start(call, work, lambda: None)

    def all_reduce(self, call: Call, t: Tensor) -> tuple[Tensor, int]:
        """Return the sum over ranks as a new tensor, and the elements that a ring moves for it."""
        out = t.clone(memory_format=torch.contiguous_format)
        call.wait(partial(dist.all_reduce, out, group=call.group))
        return out, 2 * t.numel() * (self._size - 1) // self._size

    def exchange(self, call: Call, values: Tensor) -> Tensor:
        """Gather a small vector [k] of every rank into [N k]."""
        out = torch.empty(self._size * values.numel(), dtype=values.dtype, device=values.device)
        call.wait(partial(_all_gather, out, values, group=call.group))
        return out

    def _start(self, call: Call, start: Callable[[], Any], finish: Callable[[], None]) -> Pending:
        work = call.run(start)

        def wait() -> None:
            call.wait(work.wait)
            finish()

        return Pending(wait)

    def _borrow(self, like: Tensor, elements: int, dtype: torch.dtype) -> Tensor:
        """Return a buffer for what travels, on the arena's account if there is one."""
        if self._arena is None:
            return like.new_empty(elements, dtype=dtype)
        return self._arena.borrow("wire", elements, dtype)

    def _give_back(self, buffers: list[Tensor]) -> None:
        if self._arena is not None:
            for buffer in buffers:
                self._arena.give_back("wire", buffer)


class AllToAll(Native):
    """Reduces what travels in 16 bits by an all-to-all of terms: half the bytes of fp32 sums, added in rank order.

    Wide terms are left to the backend's reduce-scatter. An all-to-all of them would save no byte, fix only one more
    order, and hold N shards instead of one. Between hosts it would move the bytes times the ranks of a host, for
    nothing is added up on the way. exact=True fixes that order, too.
    """

    name = ALL_TO_ALL

    def travels(self, kept: torch.dtype, made: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """Return the narrower of `made` and `wire`: terms are not rounded on the way, however wide they are kept."""
        return made if made.itemsize < wire.itemsize else wire

    def reduce_scatter(
        self, call: Call, full: Tensor, wire: torch.dtype, take: Take, out: Tensor | None = None
    ) -> Pending:
        """Give `take` the ranks' terms in rank order if they are narrow; buffers for them and, if cast, for `full`."""
        if wire.itemsize >= torch.float32.itemsize:
            return super().reduce_scatter(call, full, wire, take, out)
        sends = full if full.dtype == wire else self._borrow(full, full.numel(), wire).copy_(full)

        def arrived(terms: list[Tensor]) -> None:
            take(terms)
            self._give_back([] if sends is full else [sends])

        return self.all_to_all(call, sends, arrived)


class Fake(Native):
    """Calls a process group without peers, in a dry run: this rank's data stands for the others' messages."""

    name = FAKE

    def exchange(self, call: Call, values: Tensor) -> Tensor:
        """Gather a small vector, which all ranks have alike."""
        super().exchange(call, values)
        return values.repeat(self._size)


class Pairwise(Native):
    """Sends and receives; small vectors are gathered natively. What travels are terms of a sum, never sums."""

    name = PAIRWISE

    def travels(self, kept: torch.dtype, made: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """Return the narrower of `kept` and `wire`: terms are not rounded on the way."""
        return kept if kept.itemsize < wire.itemsize else wire

    def all_gather(self, call: Call, full: Tensor, shard: Tensor | None = None) -> Pending:
        """Send this rank's slot to all others and receive theirs in place."""
        slots = list(full.view(self._size, -1).unbind())
        if shard is not None:
            slots[self._rank].copy_(shard)
        return Pending(self._swap(call, [slots[self._rank]] * self._size, slots))

    def reduce_scatter(
        self, call: Call, full: Tensor, wire: torch.dtype, take: Take, out: Tensor | None = None
    ) -> Pending:
        """Give `take` the ranks' terms in rank order; buffers for the others' and, if they are cast, for those sent."""
        sends, staged = self._cast(full, wire)
        slot = full.view(self._size, -1)[self._rank]
        received = self._borrow(full, full.numel() - slot.numel(), wire)
        terms = list(received.view(self._size - 1, -1).unbind())
        terms.insert(self._rank, slot if wire.itemsize >= slot.dtype.itemsize else slot.to(wire))
        arrived = self._swap(call, sends, terms)

        def finish() -> None:
            arrived()
            take(terms)
            self._give_back([received, *staged])

        return Pending(finish)

    def all_to_all(self, call: Call, full: Tensor, take: Take) -> Pending:
        """Give `take` what came from every rank, this one included; a buffer for the others'."""
        return self.reduce_scatter(call, full, full.dtype, take)

    def pass_rows(
        self, call: Call, rows: Tensor, sends: Sequence[int], out: Tensor, receives: Sequence[int]
    ) -> Pending:
        """Send so many rows to every rank, and fill `out` with those that come, by rank.

        gloo's own is the faster one for what a layer sends, and takes host memory only.
        """
        if rows.device.type == "cpu":
            return super().pass_rows(call, rows, sends, out, receives)
        parts, places = list(torch.split(rows, list(sends))), list(torch.split(out, list(receives)))
        places[self._rank].copy_(parts[self._rank])
        return Pending(self._swap(call, parts, places))

    def all_reduce(self, call: Call, t: Tensor) -> tuple[Tensor, int]:
        """Return the sum over ranks as a new tensor, and the elements moved, padding included."""
        if self._size == 2:  # whole tensors are as many elements as halves twice, and one round less
            term = t.contiguous()
            terms = [term if rank == self._rank else torch.empty_like(term) for rank in range(2)]
            self._swap(call, [term] * 2, terms)()
            return add_up(terms), t.numel()
        full = t.new_zeros(t.numel() + -t.numel() % self._size)  # written to below: never `t` itself
        full[: t.numel()] = t.reshape(-1)
        slot = full.view(self._size, -1)[self._rank]
        self.reduce_scatter(call, full, t.dtype, lambda terms: slot.copy_(add_up(terms))).wait()
        self.all_gather(call._replace(op="all_reduced"), full).wait()
        return full[: t.numel()].view(t.shape), 2 * (full.numel() - slot.numel())

    def _cast(self, full: Tensor, wire: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Return the slots as they travel, and the buffer that holds them if they had to be cast."""
        slots = list(full.view(self._size, -1).unbind())
        if full.dtype == wire:
            return slots, []
        buffer = self._borrow(full, full.numel() - slots[0].numel(), wire)
        rows = iter(buffer.view(self._size - 1, -1))
        return [s if peer == self._rank else next(rows).copy_(s) for peer, s in enumerate(slots)], [buffer]

    def _swap(self, call: Call, sends: list[Tensor], receives: list[Tensor]) -> Callable[[], None]:
        """Send slot i of `sends` to rank i and receive slot i of `receives` from it; the result waits for all.

        Both ranks know which slots are empty: nothing is sent of them.
        """
        tag = zlib.crc32(f"{call.op} {call.unit}".encode()) & 0x3FFFFFFF
        targets = receives
        if receives[0].device.type != "cpu":  # gloo's point-to-point operations take host memory only
            sends = [part.cpu() for part in sends]
            targets = [torch.empty_like(part, device="cpu") for part in receives]
        works = []
        for step in range(1, self._size):  # start with the next rank, so that no rank is everyone's first
            source, peer = (self._rank - step) % self._size, (self._rank + step) % self._size
            receive = partial(dist.irecv, targets[source], group=call.group, group_src=source, tag=tag)
            send = partial(dist.isend, sends[peer], group=call.group, group_dst=peer, tag=tag)
            works += [(call.run(receive), source)] if targets[source].numel() else []
            works += [(call.run(send), peer)] if sends[peer].numel() else []

        def wait() -> None:
            for work, rank in works:
                call.wait(work.wait, rank)
            for peer, (part, host) in enumerate(zip(receives, targets, strict=True)):
                if host is not part and peer != self._rank:
                    part.copy_(host)
            sends.clear()  # what travels must live until here

        return wait


def add_up(terms: list[Tensor]) -> Tensor:
    """Return ((t0 + t1) + t2) + ... as a new tensor; one term as it is."""
    total = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    for term in terms[2:]:
        total += term
    return total
