"""All communication of the core, over one axis, with a ledger. The only reduce-scatter call site.

    all_gather       shard -> full, in place when the shard is its slot of the full buffer
    reduce_scatter   full -> shard, summed in rank order
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

import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.errors import OrderError, Zero3dError
from zero3d.zero.arena import Arena, host_value

PAIRWISE_MAX_RANKS = 8
_HASH_MODULUS = (1 << 52) - 1  # an exact float64

# torch 2.13 renames these; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Entry(NamedTuple):
    """Traffic of one operation on one unit: what this rank sends, which is what it receives."""

    op: str
    axis: str
    unit: str
    calls: int
    elements: int
    bytes: int


class Ledger:
    """Traffic by (operation, axis, unit); iterate to read it."""

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], list[int]] = {}

    def record(self, op: str, axis: str, unit: str, elements: int, width: int) -> None:
        """Add one call that moves `elements` of `width` bytes."""
        row = self._rows.setdefault((op, axis, unit), [0, 0, 0])
        for i, change in enumerate((1, elements, elements * width)):
            row[i] += change

    def reset(self) -> None:
        """Forget all traffic so far."""
        self._rows.clear()

    def __iter__(self) -> Iterator[Entry]:
        for (op, axis, unit), (calls, elements, nbytes) in sorted(self._rows.items()):
            yield Entry(op, axis, unit, calls, elements, nbytes)


@dataclass(frozen=True)
class Axis:
    """One mesh axis as this rank sees it: two groups over the same ranks, or none for degree 1."""

    name: str
    rank: int
    size: int
    gathers: dist.ProcessGroup | None = None
    reductions: dist.ProcessGroup | None = None


class Pending:
    """A collective under way. `wait()` completes it once; later calls do nothing."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


class Comm:
    """Collectives over one axis; `order` holds the running hash of each kind of operation."""

    def __init__(self, axis: Axis, arena: Arena, ledger: Ledger, check_every_gather: bool = False) -> None:
        self.axis, self.rank, self.size = axis.name, axis.rank, axis.size
        self._axis = axis
        self._arena = arena
        self._ledger = ledger
        self._check = check_every_gather
        self._last = "nothing yet"
        self.order = {"all_gather": 0, "reduce_scatter": 0}
        backend = "none" if axis.gathers is None else str(dist.get_backend(axis.gathers))
        self.algorithm = choose_algorithm(backend, axis.size)
        self._host_wire = self.algorithm == "pairwise" and arena.device.type != "cpu"

    @property
    def device(self) -> torch.device:
        """Where its buffers live."""
        return self._arena.device

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
        if self.algorithm != "pairwise":
            group = self._axis.gathers
            work = self._call("all_gather", unit, lambda: _all_gather(full, own, group=group, async_op=True))
            return Pending(lambda: self._wait(work, "all_gather", unit))
        slots = list(full.view(self.size, -1))
        return self._pairwise("all_gather", unit, [own] * self.size, slots, self._axis.gathers, lambda _: None)

    def reduce_scatter(self, full: Tensor, shard: Tensor, unit: str, wire: torch.dtype, add: bool) -> Pending:
        """Sum `full` [total] over ranks into `shard` [total/N], travelling as `wire`.

        `add` adds to the shard instead of overwriting it. The shard may be this rank's slot of
        `full`. Moves (N-1)/N total elements per rank. Each part is cast to `wire` first, the sum
        ((p0 + p1) + p2) + ... is taken in the shard's dtype.
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

        def finish(parts: list[Tensor]) -> None:
            self._sum(parts, shard, add)
            self._arena.give_back("wire", received)
            if staged is not None:
                self._arena.give_back("wire", staged)

        return self._pairwise("reduce_scatter", unit, sends, parts, self._axis.reductions, finish)

    def exchange(self, values: Tensor) -> Tensor:
        """All-gather a float64 vector [k] into [N, k]; (N-1) k elements per rank."""
        if self.size == 1:
            return values[None]
        out = torch.empty(self.size * values.numel(), dtype=values.dtype, device=values.device)
        self._ledger.record("exchange", self.axis, "-", (self.size - 1) * values.numel(), values.dtype.itemsize)
        group = self._axis.reductions
        self._call("exchange", "-", lambda: _all_gather(out, values, group=group))
        if self.algorithm == "fake":
            out = values.repeat(self.size)
        return out.view(self.size, -1)

    def broadcast(self, buffer: Tensor, unit: str) -> None:
        """Overwrite `buffer` with rank 0's."""
        if self.size == 1:
            return
        self._ledger.record("broadcast", self.axis, unit, buffer.numel(), buffer.dtype.itemsize)
        group = self._axis.reductions
        raw = buffer.view(torch.uint8) if buffer.dtype == torch.bool else buffer
        self._call("broadcast", unit, lambda: dist.broadcast(raw, group=group, group_src=0))

    def order_values(self) -> list[float]:
        """What this rank's operations so far hash to; equal on all ranks or their orders differ."""
        return [float(self.order["all_gather"]), float(self.order["reduce_scatter"])]

    def order_error(self) -> OrderError:
        """The error of this rank when hashes differ."""
        return OrderError(
            f"rank {self.rank} of axis {self.axis} and its peers used units in different orders or numbers; "
            f"this rank's last operation was {self._last}. At stage 3 all ranks must run the same units in the "
            "same order: make branches equal on all ranks, or pass stage=2."
        )

    def check_order(self) -> None:
        """Compare the hashes now. Raises OrderError."""
        mine = torch.tensor(self.order_values(), dtype=torch.float64, device=self._arena.device)
        seen = self.exchange(mine)
        if host_value((seen != seen[0]).any()[None], [0.0])[0]:
            raise self.order_error()

    # --- how ------------------------------------------------------------------------------------

    def _announce(self, op: str, unit: str, full: Tensor, wire: torch.dtype | None = None) -> None:
        self._last = f"{op} of unit {unit!r}"
        self.order[op] = (self.order[op] * 1000003 + zlib.crc32(unit.encode())) % _HASH_MODULUS
        moved = full.numel() // self.size * (self.size - 1)
        self._ledger.record(op, self.axis, unit, moved, (wire or full.dtype).itemsize)

    def _cast(self, full: Tensor, wire: torch.dtype) -> tuple[list[Tensor], Tensor | None]:
        """Slots as they travel, and the buffer that holds them if they had to be cast."""
        slots = list(full.view(self.size, -1))
        if full.dtype == wire:
            return slots, None
        buffer = self._arena.borrow("wire", full.numel() - slots[0].numel(), wire)
        out, rows = list(slots), iter(buffer.view(self.size - 1, -1))
        for peer in range(self.size):
            if peer != self.rank:
                out[peer] = next(rows).copy_(slots[peer])
        return out, buffer

    def _sum(self, parts: list[Tensor], shard: Tensor, add: bool) -> None:
        """shard (+)= ((p0 + p1) + p2) + ...; a part may be the shard itself, read before the last write."""
        if len(parts) == 1:
            if add:
                shard.add_(parts[0])
            elif not same_memory(shard, parts[0]):
                shard.copy_(parts[0])
            return
        total = parts[0].to(shard.dtype)
        for part in parts[1:-1]:
            total = total + part
        target = self._arena.borrow("wire", shard.numel(), shard.dtype) if add else shard
        torch.add(total, parts[-1], out=target)
        if add:
            shard.add_(target)
            self._arena.give_back("wire", target)

    def _native_reduce_scatter(self, full: Tensor, shard: Tensor, unit: str, wire: torch.dtype, add: bool) -> Pending:
        sends = full if full.dtype == wire else self._arena.borrow("wire", full.numel(), wire).copy_(full)
        out = self._arena.borrow("wire", shard.numel(), wire)
        group = self._axis.reductions
        work = self._call(
            "reduce_scatter", unit, lambda: _reduce_scatter(out, sends, dist.ReduceOp.SUM, group=group, async_op=True)
        )

        def finish() -> None:
            self._wait(work, "reduce_scatter", unit)
            self._sum([out], shard, add)
            self._arena.give_back("wire", out)
            if sends is not full:
                self._arena.give_back("wire", sends)

        return Pending(finish)

    def _pairwise(
        self,
        op: str,
        unit: str,
        sends: list[Tensor],
        receives: list[Tensor],
        group: dist.ProcessGroup | None,
        finish: Callable[[list[Tensor]], None],
    ) -> Pending:
        """Exchange slot by slot with every peer; `finish` gets the receives once they are there."""
        tag = zlib.crc32(f"{op} {unit}".encode()) & 0x3FFFFFFF
        targets = receives
        if self._host_wire:  # gloo's point-to-point operations take host memory only
            sends = [part.cpu() for part in sends]
            targets = [torch.empty_like(part, device="cpu") for part in receives]
        works = []
        for step in range(1, self.size):  # start with the next rank, so that no rank is everyone's first
            source, peer = (self.rank - step) % self.size, (self.rank + step) % self.size
            receive = partial(dist.irecv, targets[source], group=group, group_src=source, tag=tag)
            send = partial(dist.isend, sends[peer], group=group, group_dst=peer, tag=tag)
            works += [self._call(op, unit, receive), self._call(op, unit, send)]

        def complete() -> None:
            for work in works:
                self._wait(work, op, unit)
            if self._host_wire:
                for peer, (part, host) in enumerate(zip(receives, targets, strict=True)):
                    if peer != self.rank:
                        part.copy_(host)
            finish(receives)
            sends.clear()  # keeps what travels alive until here

        return Pending(complete)

    def _wait(self, work: Any, op: str, unit: str) -> None:
        self._call(op, unit, work.wait)

    def _call(self, op: str, unit: str, call: Callable[[], Any]) -> Any:
        """Run a torch.distributed call; a timeout or a lost peer becomes an error that says where."""
        begun = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            waited = time.monotonic() - begun
            where = f"rank {self.rank} of axis {self.axis} waited {waited:.1f} s in {op} of unit {unit!r}"
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise OrderError(
                    f"{where} and no peer came: ranks used units in different orders or numbers, or a peer is stuck. "
                    "At stage 3 all ranks must run the same units in the same order; look at what the other ranks say."
                ) from error
            if any(word in str(error).lower() for word in ("connection", "closed", "peer", "reset")):
                message = f"{where} when a peer went away: look at the first rank that failed. ({error})"
                raise Zero3dError(message) from error
            raise


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
    return [int(value) for value in host_value(buffer, [float(value) for value in values])]
