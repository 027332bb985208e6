"""All communication of the core, over one axis, with a ledger. The only reduce-scatter call site.

    all_gather       shard -> full, in place when the shard is its slot of the full buffer
    reduce_scatter   full -> shard, summed in rank order
    all_to_all       full -> everybody's shards, not summed (zero/exact)
    exchange         a few numbers per rank, all-gathered
    broadcast        rank 0's buffer, at construction

Two algorithms, chosen by a rule on (backend, N) alone, because a timing probe could choose
otherwise on resume: *pairwise* sends and receives on gloo up to 8 ranks (gloo's own
reduce-scatter is a clone and an all-reduce), *native* collectives elsewhere. Pairwise messages
carry a tag made of (operation, unit), so ranks that disagree time out instead of swapping
weights; for native ones a running hash of (operation, unit) is compared at the norm exchange.
Gathers and reductions have a process group each, so that a rank whose reductions come later
(unused parameters) cannot interleave them with another rank's gathers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.distributed.axis import Axis, messages, swap
from zero3d.distributed.ledger import Ledger
from zero3d.errors import OrderError
from zero3d.memory.arena import Arena, host_value

PAIRWISE_MAX_RANKS = 8
_HASH_MODULUS = (1 << 52) - 1  # an exact float64

# torch 2.13 renames these; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gather_into(full: Tensor, shard: Tensor, group: dist.ProcessGroup | None, async_op: bool = False) -> Any:
    """torch's all-gather of `shard` [n] into `full` [N n]."""
    return _all_gather(full, shard, group=group, async_op=async_op)


def reduce_scatter_into(shard: Tensor, full: Tensor, group: dist.ProcessGroup | None) -> Any:
    """torch's reduce-scatter of `full` [N n] into `shard` [n], started."""
    return _reduce_scatter(shard, full, dist.ReduceOp.SUM, group=group, async_op=True)


class Pending:
    """A collective under way. `wait()` completes it once; later calls do nothing."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Comm:
    """Collectives over one axis; `_order` holds a running hash of each kind of operation."""

    def __init__(self, axis: Axis, arena: Arena, ledger: Ledger, check_every_gather: bool = False) -> None:
        self.axis, self.rank, self.size, self.device = axis.name, axis.rank, axis.size, arena.device
        self._axis, self._arena, self._ledger, self._check = axis, arena, ledger, check_every_gather
        self._last = "nothing yet"
        self._order = {"all_gather": 0, "reduce_scatter": 0}
        self.algorithm = choose_algorithm(axis.backend, axis.size)

    # --- operations -----------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Pending:
        """Fill `full` [total] from every rank's `shard` [total/N]; moves (N-1)/N total per rank."""
        own = full.view(self.size, -1)[self.rank]
        if not same_memory(own, shard):
            own.copy_(shard)
        if self.size == 1:
            return Pending(lambda: None)
        self._announce("all_gather", unit, full)
        if self._check:
            self.check_order()
        group = self._axis.gathers
        if self.algorithm == "pairwise":
            slots = list(full.view(self.size, -1))
            return Pending(swap(self._axis, group, "all_gather", unit, [own] * self.size, slots))
        start = partial(gather_into, full, own, group, async_op=True)
        work = self._axis.call("all_gather", unit, start)
        return Pending(lambda: self._axis.call("all_gather", unit, work.wait))

    def reduce_scatter(self, full: Tensor, shard: Tensor, unit: str, wire: torch.dtype, add: bool) -> Pending:
        """Sum `full` [total] over ranks into `shard` [total/N], travelling as `wire`.

        `add` adds to the shard instead of overwriting it. The shard may be this rank's slot of
        `full`. Moves (N-1)/N total elements per rank; the sum ((p0 + p1) + p2) + ... is taken in
        the shard's dtype.
        """
        slots = list(full.view(self.size, -1))
        if self.size == 1:
            self._sum([slots[0]], shard, add)
            return Pending(lambda: None)
        self._announce("reduce_scatter", unit, full, wire)
        if self.algorithm != "pairwise":
            return self._native_reduce_scatter(full, shard, unit, wire, add)
        sends, staged = self._cast(full, wire)
        received = self._arena.borrow("wire", full.numel() - shard.numel(), wire)
        parts = list(received.view(self.size - 1, -1))
        own = slots[self.rank]
        parts.insert(self.rank, own if wire.itemsize >= own.dtype.itemsize else own.to(wire))
        arrived = swap(self._axis, self._axis.reductions, "reduce_scatter", unit, sends, parts)

        def finish() -> None:
            arrived()
            self._sum(parts, shard, add)
            for buffer in [received, *staged]:
                self._arena.give_back("wire", buffer)

        return Pending(finish)

    def all_to_all(self, full: Tensor, unit: str, take: Callable[[list[Tensor]], None]) -> Pending:
        """Slot r of every rank's `full` [total] to rank r, where `take` is given what came, by rank.

        Moves (N-1)/N total elements per rank.
        """
        own = list(full.view(self.size, -1))
        if self.size == 1:
            return Pending(partial(take, own))
        self._announce("all_to_all", unit, full)
        if self.algorithm == "pairwise":
            received = self._arena.borrow("wire", full.numel() - own[0].numel(), full.dtype)
            parts = list(received.view(self.size - 1, -1))
            parts.insert(self.rank, own[self.rank])
            arrived = swap(self._axis, self._axis.reductions, "all_to_all", unit, own, parts)
        else:
            received = self._arena.borrow("wire", full.numel(), full.dtype)
            parts = list(received.view(self.size, -1))
            raw = received.view(torch.uint8), full.view(torch.uint8)
            start = partial(dist.all_to_all_single, *raw, group=self._axis.reductions, async_op=True)
            arrived = partial(self._axis.call, "all_to_all", unit, self._axis.call("all_to_all", unit, start).wait)

        def finish() -> None:
            arrived()
            take(parts)
            self._arena.give_back("wire", received)

        return Pending(finish)

    def travels(self, local: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """The dtype on the way. Pairwise messages carry unsummed values: a narrower local dtype loses nothing."""
        return local if self.algorithm == "pairwise" and local.itemsize < wire.itemsize else wire

    def exchange(self, values: Tensor) -> Tensor:
        """All-gather a vector [k] of numbers into [N, k]; (N-1) k elements per rank."""
        if self.size == 1:
            return values[None]
        device = values.device
        values = values.cpu() if self._axis.backend == "gloo" else values  # gloo gathers host memory only
        out = torch.empty(self.size * values.numel(), dtype=values.dtype, device=values.device)
        self._ledger.record("exchange", self.axis, "-", (self.size - 1) * values.numel(), values.dtype.itemsize)
        self._axis.call("exchange", "-", partial(gather_into, out, values, self._axis.reductions))
        everyone = values.repeat(self.size) if self.algorithm == "fake" else out
        return everyone.view(self.size, -1).to(device)

    def trade(self, mine: Tensor, peer: int, unit: str) -> Tensor:
        """Send a tensor to one rank and receive its like from it."""
        theirs = torch.empty_like(mine)
        self._ledger.record("trade", self.axis, unit, mine.numel(), mine.dtype.itemsize)
        messages(self._axis, "trade", unit, {peer: mine}, {peer: theirs})
        return theirs

    def broadcast(self, buffer: Tensor, unit: str) -> None:
        """Overwrite `buffer` with rank 0's."""
        if self.size == 1:
            return
        self._ledger.record("broadcast", self.axis, unit, buffer.numel(), buffer.dtype.itemsize)
        raw = buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
        self._axis.call("broadcast", unit, partial(dist.broadcast, raw, group=self._axis.reductions, group_src=0))

    def order_values(self) -> list[float]:
        """What this rank's operations so far hash to; equal on all ranks or their orders differ."""
        return [float(value) for value in self._order.values()]

    def order_error(self) -> OrderError:
        """The error of this rank when hashes differ."""
        return OrderError(
            f"rank {self.rank} of axis {self.axis} and its peers used units in different orders or numbers; "
            f"this rank's last operation was {self._last}. At stage 3 all ranks must run the same units in the "
            "same order: make branches equal on all ranks, or pass stage=2."
        )

    def check_order(self) -> None:
        """Compare the hashes now. Raises OrderError."""
        mine = torch.tensor(self.order_values(), dtype=torch.float64, device=self.device)
        seen = self.exchange(mine)
        if host_value((seen != seen[0]).any()[None], [0.0])[0]:
            raise self.order_error()

    # --- how ------------------------------------------------------------------------------------

    def _announce(self, op: str, unit: str, full: Tensor, wire: torch.dtype | None = None) -> None:
        self._last = f"{op} of unit {unit!r}"
        kind = "all_gather" if op == "all_gather" else "reduce_scatter"
        self._order[kind] = (self._order[kind] * 1000003 + zlib.crc32(unit.encode())) % _HASH_MODULUS
        moved = full.numel() // self.size * (self.size - 1)
        self._ledger.record(op, self.axis, unit, moved, (wire or full.dtype).itemsize)

    def _cast(self, full: Tensor, wire: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        """Slots as they travel, and the buffer that holds them if they had to be cast."""
        slots = list(full.view(self.size, -1))
        if full.dtype == wire:
            return slots, []
        buffer = self._arena.borrow("wire", full.numel() - slots[0].numel(), wire)
        rows = iter(buffer.view(self.size - 1, -1))
        return [s if peer == self.rank else next(rows).copy_(s) for peer, s in enumerate(slots)], [buffer]

    def _sum(self, parts: list[Tensor], shard: Tensor, add: bool) -> None:
        """shard (+)= ((p0 + p1) + p2) + ...; a part may be the shard itself."""
        own = min(self.rank, len(parts) - 1)
        if add:
            target = self._arena.borrow("wire", shard.numel(), shard.dtype)
            self._sum(parts, target, add=False)
            shard.add_(target)
            self._arena.give_back("wire", target)
        elif same_memory(parts[own], shard):  # what comes before is summed in a received buffer
            for part in parts[1:own]:
                parts[0].add_(part)
            for part in (*parts[: min(own, 1)], *parts[own + 1 :]):
                shard.add_(part)
        else:
            shard.copy_(parts[0])
            for part in parts[1:]:
                shard.add_(part)

    def _native_reduce_scatter(self, full: Tensor, shard: Tensor, unit: str, wire: torch.dtype, add: bool) -> Pending:
        sends = full if full.dtype == wire else self._arena.borrow("wire", full.numel(), wire).copy_(full)
        out = self._arena.borrow("wire", shard.numel(), wire)
        start = partial(reduce_scatter_into, out, sends, self._axis.reductions)
        work = self._axis.call("reduce_scatter", unit, start)

        def finish() -> None:
            self._axis.call("reduce_scatter", unit, work.wait)
            self._sum([out], shard, add)
            for buffer in [out] if sends is full else [out, sends]:
                self._arena.give_back("wire", buffer)

        return Pending(finish)


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors start at one element of one storage (true or false for dry-run tensors too)."""
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return bool(same_storage and a.storage_offset() == b.storage_offset())


def choose_algorithm(backend: str, size: int) -> str:
    """The rule on (backend, N): "pairwise", "native", or "fake" for a dry run."""
    if backend == "fake":
        return "fake"
    return "pairwise" if backend == "gloo" and size <= PAIRWISE_MAX_RANKS else "native"


def broadcast_ints(comm: Comm, values: list[int]) -> list[int]:
    """Rank 0's list of small integers on every rank (all lists have one length)."""
    buffer = torch.tensor(values, dtype=torch.int64, device=comm.device)
    comm.broadcast(buffer, "-")
    return host_value(buffer, values)
