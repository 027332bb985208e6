"""All communication of the core, over one axis, with a ledger and a hash of its order.

    all_gather       shard -> full, in place when the shard is its slot of the full buffer
    reduce_scatter   full -> shard, summed in rank order
    all_reduce       a shard that several ranks have -> its sum, on all of them
    all_to_all       full -> everybody's shards, not summed (zero/exact)
    gather_to_first  shard -> full, on rank 0 alone; ranks of its host write there (shared_buffer.py)
    exchange         a few numbers per rank, all-gathered, from wherever they are to there
    broadcast        rank 0's buffer, at construction

A host read (`Comm.read`) is where a rank learns that a collective never ends: on an accelerator it begins without
waiting for peers, so the read waits, no longer than the axis' patience.

How it is done is chosen for every axis by a rule (choice.py).

Ranks must run the same operations on the same units in the same order. Pairwise messages carry a tag made of
(operation, unit), so ranks that disagree time out instead of swapping weights; for native ones a running hash of
(operation, unit) is compared at the norm's exchange. Gathers and reductions have a process group each: a rank with a
hole (a parameter without a gradient) begins a reduction later among its gathers than its peers (zero/reductions.py).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.distributed.algorithms import AllToAll, Fake, Native, Pairwise
from zero3d.distributed.axis import DONE, Axis, Call, Pending, Take, messages, start_messages
from zero3d.distributed.block_bytes import sum_of_copies
from zero3d.distributed.choice import choose_algorithm
from zero3d.distributed.coded_sums import CodedSum
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.order_log import Steps
from zero3d.distributed.shared_buffer import NOWHERE, SharedBuffer, attach
from zero3d.errors import OrderError
from zero3d.memory.arena import Arena, Number, device_values
from zero3d.memory.scratch import group_elements

_HASH_MODULUS = (1 << 52) - 1  # an exact float64


class Algorithm(Protocol):
    """How the ranks of an axis exchange tensors. `full` [N n] is contiguous, and slot r of it is rank r's."""

    name: str

    def travels(self, kept: torch.dtype, made: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """Return the dtype in which values that are to be reduced in `wire` reach their owner.

        kept  dtype of the buffer that they are in
        made  dtype that holds each of them without rounding
        """

    def all_gather(self, call: Call, full: Tensor, shard: Tensor | None = None) -> Pending:
        """Fill `full` from all ranks' `shard`, or their slot where that is in place; (N-1) n elements per rank."""

    def reduce_scatter(
        self, call: Call, full: Tensor, wire: torch.dtype, take: Take, out: Tensor | None = None
    ) -> Pending:
        """Give `take` terms [n] whose sum, in rank order, is that of all ranks' slots for this one; (N-1) n elements.

        They travel as `wire`, and live until `take` returns. A single term may be `out`, whose values are not needed.
        """

    def all_to_all(self, call: Call, full: Tensor, take: Take) -> Pending:
        """Give `take` the slots [n] that all ranks have for this one, in rank order; (N-1) n elements."""

    def pass_rows(
        self, call: Call, rows: Tensor, sends: Sequence[int], out: Tensor, receives: Sequence[int]
    ) -> Pending:
        """Send so many rows to every rank, by rank, and fill `out` with so many from each.

        H elements for each row that is for another rank.
        """

    def all_reduce(self, call: Call, t: Tensor) -> tuple[Tensor, int]:
        """Return the sum of all ranks' tensors as a new one, when it is there, and the elements that moved per rank."""

    def exchange(self, call: Call, values: Tensor) -> Tensor:
        """Return a small vector [k] of every rank as [N k], when it is there."""


def open_algorithm(
    axis: Axis, arena: Arena | None = None, reduce_scatter: str = "", on_host: int | None = None
) -> Algorithm:
    """Return the algorithm of an axis (`choose_algorithm`); its buffers are on the account of `arena`, if any."""
    kinds = {kind.name: kind for kind in (Native, Pairwise, AllToAll, Fake)}
    return kinds[choose_algorithm(axis.backend, axis.size, reduce_scatter, on_host)](axis, arena)


class Comm:
    """Owns the collectives over one axis and a running hash of each kind of operation, `_order`.

    reduce_scatter, on_host  arguments of `choose_algorithm`, for an axis over which gradients are reduced
    within  a larger axis that contains its ranks, and hashes the operations on both
    """

    def __init__(
        self,
        axis: Axis,
        arena: Arena,
        ledger: Ledger,
        check_every_gather: bool = False,
        reduce_scatter: str = "",
        on_host: int | None = None,
        within: Comm | None = None,
    ) -> None:
        self.axis = axis.name
        self.rank = axis.rank
        self.size = axis.size
        self.device = arena.device
        self._axis = axis
        self._arena = arena
        self._ledger = ledger
        self._check = check_every_gather
        self._last = "nothing yet"
        kinds = ("all_gather", "reduce_scatter", "all_reduce")
        self._order: dict[str, int] = dict.fromkeys(kinds, 0) if within is None else within._order
        self._algorithm = open_algorithm(axis, arena, reduce_scatter, on_host)
        self.algorithm = self._algorithm.name
        self._first: Tensor | None = None  # rank 0's receive buffer, where this rank can write into it
        self._near: frozenset[int] = frozenset()  # the others that can

    # --- operations -----------------------------------------------------------------------------

    def all_gather(self, full: Tensor, shard: Tensor, unit: str) -> Pending:
        """Fill `full` [total] from every rank's `shard` [total/N]; moves (N-1)/N total per rank."""
        slot = full.view(self.size, -1)[self.rank]
        apart = None if same_memory(slot, shard) else shard
        if self.size == 1:
            if apart is not None:
                slot.copy_(apart)
            return DONE
        self._announce("all_gather", unit, full)
        if self._check:
            self.check_order()
        call = Call(self._axis, self._axis.gathers, "all_gather", unit, self._axis.count("all_gather"))
        return self._algorithm.all_gather(call, full, apart)

    def reduce_scatter(self, full: Tensor, shard: Tensor, unit: str, wire: torch.dtype, add: bool) -> Pending:
        """Sum `full` [total] over ranks into `shard` [total/N], travelling as `wire`.

        `add` adds to the shard instead of overwriting it. The shard may be this rank's slot of
        `full`. Moves (N-1)/N total elements per rank; the sum ((p0 + p1) + p2) + ... is taken in
        the shard's dtype.
        """
        take = partial(self._sum, shard=shard, add=add)
        if self.size == 1:
            return Pending(partial(take, [full]))
        self._announce("reduce_scatter", unit, full, wire)
        out = None if add else shard
        return self._algorithm.reduce_scatter(self._reduction("reduce_scatter", unit), full, wire, take, out)

    def all_reduce(self, shard: Tensor, unit: str, wire: torch.dtype) -> Pending:
        """Sum `shard` [n] over ranks in place, travelling as `wire`; N divides n.

        Each rank sums its part in rank order, and all get what it has then: the same bits everywhere. Moves
        2 (N-1)/N n elements per rank.
        """
        if self.size == 1:
            return DONE
        part = shard.view(self.size, -1)[self.rank]
        call = self._all_reduction(shard, unit, wire)
        take = partial(self._sum, shard=part, add=False)
        return self._then_gather(call, shard, self._algorithm.reduce_scatter(call, shard, wire, take, part))

    def all_reduce_coded(self, shard: Tensor, unit: str, form: str, noise: torch.Generator | None = None) -> Pending:
        """Do so with terms that travel in a narrow form (coded_sums.py), coded once."""
        if self.size == 1:
            return DONE
        coded = CodedSum(form, self.rank, self.size, self._algorithm, self._arena)
        self._last = f"all_reduce of unit {unit!r}"
        self._hash("all_reduce", unit)
        self._axis.begins("all_reduce", unit)
        for number, (elements, width) in enumerate(sum_of_copies(shard.numel(), self.size, shard.element_size(), form)):
            count = self._ledger.record if number == 0 else self._ledger.widen
            count("all_reduce", self.axis, unit, elements, width)
        return coded.start(self._reduction("all_reduce", unit), shard, noise)

    def all_reduce_tree(self, shard: Tensor, unit: str, add_up: Callable[[list[Tensor], Tensor], object]) -> Pending:
        """Do so in the order of `add_up`, which is given all terms of this rank's part and a buffer for their sum."""
        if self.size == 1:
            return DONE
        part = shard.view(self.size, -1)[self.rank]
        call = self._all_reduction(shard, unit, shard.dtype)

        def add_terms(terms: list[Tensor]) -> None:  # one of which is the part
            total = self._arena.borrow("wire", part.numel(), part.dtype)
            add_up(terms, total)
            part.copy_(total)
            self._arena.give_back("wire", total)

        return self._then_gather(call, shard, self._algorithm.all_to_all(call, shard, add_terms))

    def _all_reduction(self, shard: Tensor, unit: str, wire: torch.dtype) -> Call:
        """Announce both halves of an all-reduce as one operation."""
        self._last = f"all_reduce of unit {unit!r}"
        self._hash("all_reduce", unit)
        self._axis.begins("all_reduce", unit)
        half = shard.numel() // self.size * (self.size - 1)
        self._ledger.record("all_reduce", self.axis, unit, half, wire.itemsize)
        self._ledger.widen("all_reduce", self.axis, unit, half, shard.element_size())
        return self._reduction("all_reduce", unit)

    def _then_gather(self, call: Call, shard: Tensor, summed: Pending) -> Pending:
        """Gather the parts of a shard when this rank's has been summed."""

        def finish() -> None:
            summed.wait()
            parts = call._replace(op="all_reduced", number=self._axis.count("all_reduced"))
            self._algorithm.all_gather(parts, shard).wait()

        return Pending(finish)

    def all_to_all(self, full: Tensor, unit: str, take: Take) -> Pending:
        """Send slot r of every rank's `full` [total] to rank r, and give `take` the received slots, by rank.

        Moves (N-1)/N total elements per rank.
        """
        if self.size == 1:
            return Pending(partial(take, [full]))
        self._announce("all_to_all", unit, full)
        return self._algorithm.all_to_all(self._reduction("all_to_all", unit), full, take)

    def pass_rows(self, rows: Tensor, sends: Sequence[int], receives: Sequence[int], unit: str) -> Tensor:
        """Send so many rows [., H] to every rank, by rank, and return the received rows.

        Moves H elements for each row that is for another rank.
        """
        if self.size == 1:
            return rows
        out = rows.new_empty(sum(receives), *rows.shape[1:])
        self.start_rows(rows.contiguous(), sends, out, receives, unit).wait()
        return out

    def start_rows(
        self, rows: Tensor, sends: Sequence[int], out: Tensor, receives: Sequence[int], unit: str
    ) -> Pending:
        """Start what `pass_rows` does, on more than one rank, into `out`; both must live until it is over."""
        elements = (sum(sends) - sends[self.rank]) * rows[:1].numel() if len(rows) else 0
        self._ledger.record("pass_rows", self.axis, unit, elements, rows.dtype.itemsize)
        return self._algorithm.pass_rows(self._reduction("pass_rows", unit), rows, sends, out, receives)

    def travels(self, kept: torch.dtype, made: torch.dtype, wire: torch.dtype) -> torch.dtype:
        """Return the dtype in which gradients that are to be reduced in `wire` reach their owner (see `Algorithm`)."""
        return self._algorithm.travels(kept, made, wire)

    def exchange(self, values: Tensor, recorded: bool = True) -> Tensor:
        """All-gather a vector [k] of numbers into [N, k], where they were; (N-1) k elements per rank."""
        if self.size == 1:
            return values[None]
        if recorded:
            self._ledger.record("exchange", self.axis, "-", (self.size - 1) * values.numel(), values.dtype.itemsize)
        self._axis.begins("exchange", "-")
        call, axis = self._reduction("exchange", "-"), self._axis
        if axis.gathers is None and axis.meet is not None:
            return self._moved(call.run(partial(axis.meet, self._on_host(values))), values.device)
        rows = self._algorithm.exchange(call, self._moved(values, axis.place)).view(self.size, -1)
        return self._moved(rows, values.device)

    @property
    def patient(self) -> Comm:
        """The same ranks for exchanges before which one of them may work for hours, while the others wait."""
        if self._axis.meet is None:
            return self
        return Comm(replace(self._axis, gathers=None, reductions=None), self._arena, self._ledger)

    def read(self, values: Tensor, assumed: list[Number]) -> list[Number]:
        """Read a small device vector on the host; in a dry run, where values do not exist, `assumed` stands for them.

        The only way to wait for the device. Raises OrderError where it does not get there, since a peer never came.
        """
        return assumed if isinstance(values, FakeTensor) else list(self._on_host(values).tolist())

    def trade(self, values: Tensor, peer: int, unit: str) -> Tensor:
        """Send a tensor to one rank and receive its like from it."""
        received = torch.empty_like(values)
        self._ledger.record("trade", self.axis, unit, values.numel(), values.dtype.itemsize)
        messages(self._axis, "trade", unit, {peer: values}, {peer: received})
        return received

    @contextmanager
    def receiving(self, buffer: SharedBuffer | None, nbytes: int) -> Iterator[None]:
        """Let rank 0 gather units of up to so many bytes inside, in a receive buffer that it alone gives.

        Sends 32 bytes to each other rank.
        """
        before = self._first, self._near
        about = NOWHERE if buffer is None else buffer.address
        found = self.exchange(torch.tensor(about, dtype=torch.int64))[0].tolist()
        self._first = attach(found, nbytes) if buffer is None else buffer.memory
        near = self.exchange(torch.tensor([self._first is not None], dtype=torch.int64)).flatten().tolist()
        self._near = frozenset(rank for rank in range(1, self.size) if near[rank])
        try:
            yield
        finally:
            self._first, self._near = before  # an export may be written between two buckets of a stream

    def gather_to_first(self, shard: Tensor, unit: str) -> Tensor | None:
        """Return the full tensor [total] of all ranks' `shard` [total/N] on rank 0, in its buffer; None on others.

        Ranks of its host write into that buffer, and others send: 1/N of total each. Before the next call all ranks
        must have agreed that rank 0 has used the tensor.
        """
        total = shard.numel() * self.size
        full = None if self._first is None else self._first[: total * shard.element_size()].view(shard.dtype)
        self._ledger.record("gather", self.axis, unit, shard.numel() if self.rank else 0, shard.element_size())
        if self.rank == 0:
            assert full is not None, "gather_to_first outside of receiving"
            self._receive(full, shard, unit)
            return full
        if full is None:
            messages(self._axis, "gather", unit, {0: shard}, {})
            return None
        full.view(self.size, -1)[self.rank].copy_(shard)
        messages(self._axis, "gather", unit, {0: torch.ones(1, dtype=torch.uint8)}, {})  # it is written
        return None

    def _receive(self, full: Tensor, shard: Tensor, unit: str) -> None:
        """Fill `full` with the other ranks' messages, and wait for ranks that write into it themselves."""
        slots = full.view(self.size, -1)
        words = torch.empty(self.size, 1, dtype=torch.uint8)
        arriving = {rank: (words if rank in self._near else slots)[rank] for rank in range(1, self.size)}
        gathered = start_messages(self._axis, "gather", unit, {}, arriving)
        slots[0].copy_(shard)
        gathered.wait()

    def send_to_first(self, buffer: Tensor, source: int, unit: str) -> None:
        """Copy one rank's `buffer` into that of rank 0; the other ranks have no part in it."""
        if self.rank not in (0, source) or source == 0:
            return
        sends = self.rank == source
        self._ledger.record("send", self.axis, unit, buffer.numel() if sends else 0, buffer.dtype.itemsize)
        messages(self._axis, "send", unit, {0: buffer} if sends else {}, {} if sends else {source: buffer})

    def leave_under_way(self, pending: Iterable[Pending]) -> None:
        """Leave operations under way when a step returns; this rank does not end before they are complete."""
        self._axis.under_way.update(operation for operation in pending if not operation.over)

    def broadcast(self, buffer: Tensor, unit: str) -> None:
        """Overwrite `buffer` with rank 0's."""
        if self.size == 1:
            return
        self._ledger.record("broadcast", self.axis, unit, buffer.numel(), buffer.dtype.itemsize)
        self._axis.broadcast(buffer, unit)

    def order_values(self) -> list[float]:
        """Return what this rank's operations so far hash to; equal on all ranks or their orders differ.

        Sums over copies begin where reductions end, at another moment on every rank: each kind has a hash of its own.
        """
        gathers, *sums = self._order.values()
        return [float(gathers), float(_joined(*sums))]

    def order_error(self) -> OrderError:
        """Return this rank's error when hashes differ, with every rank's units where ranks can tell each other."""
        if explained := self._axis.explain_order():
            return OrderError(
                f"{explained} (The last operation of rank {self.rank} of axis {self.axis} was {self._last}.)"
            )
        return OrderError(
            f"rank {self.rank} of axis {self.axis} and its peers used units in different orders or numbers, or froze "
            f"other parameters; this rank's last operation was {self._last}. At stage 3 all ranks must run the same "
            "units in the same order: make branches equal on all ranks, or pass stage=2."
        )

    def check_order(self) -> None:
        """Compare the hashes of all ranks now. Raises OrderError."""
        if not self.read(self.in_order()[None], [1.0])[0]:
            raise self.order_error()

    def in_order(self, recorded: bool = True) -> Tensor:
        """Return whether the hashes of all ranks are equal, where it computes; in the ledger or apart from it."""
        hashes = self.exchange(device_values(self.order_values(), self.device), recorded)
        return (hashes == hashes[0]).all()

    @property
    def enqueues(self) -> bool:
        """Return whether a wait holds up a stream alone. On gloo, which moves host memory, it blocks the host."""
        return self._axis.backend != "gloo"

    # --- how ------------------------------------------------------------------------------------

    def _on_host(self, values: Tensor) -> Tensor:
        op, unit = self._ledger.last.get(self.axis, ("nothing yet", "-"))
        try:
            with nullcontext() if values.device.type == "cpu" else self._axis.inside(f"read after {op}", unit):
                return self._arena.on_host(values, self._axis.patience, self._raise_verdict)
        except TimeoutError as error:
            raise self._axis.late(self._ledger.last) from error

    def _raise_verdict(self) -> None:
        """Raise OrderError where ranks are known to wait for each other for ever."""
        if (error := self._axis.out_of_order()) is not None:
            raise error

    def _moved(self, values: Tensor, device: torch.device) -> Tensor:
        if device.type == "cpu":
            return self._on_host(values)
        return values.pin_memory().to(device, non_blocking=True) if values.device.type == "cpu" else values

    def _reduction(self, op: str, unit: str) -> Call:
        return Call(self._axis, self._axis.reductions, op, unit, self._axis.count(op))

    def note_frozen(self, names: Sequence[str]) -> None:
        """Take the parameters that this rank's step leaves out into its hash: they must be alike on all ranks."""
        self._last = f"a step without the frozen {', '.join(names[:3])}{' and others' if len(names) > 3 else ''}"
        self._hash("reduce_scatter", "\0".join(names))

    def note_steps(self, stage: int | None = None, left_out: int = 0) -> None:
        """Note for errors of order the stage of the engine, or a step more that this rank has left out."""
        if (log := self._axis.log) is not None:
            log.steps = Steps(log.steps.stage if stage is None else stage, log.steps.left_out + left_out)

    def note_step(self, decided: Sequence[float]) -> float:
        """Take this rank's decisions about a step into its hash; return a hash of them alone, exact in fp32."""
        code = zlib.crc32(repr(decided).encode()) % (1 << 24)
        self._order["reduce_scatter"] = _joined(self._order["reduce_scatter"], code)
        return float(code)

    def _hash(self, kind: str, text: str) -> None:
        self._order[kind] = _joined(self._order[kind], zlib.crc32(text.encode()))

    def _announce(self, op: str, unit: str, full: Tensor, wire: torch.dtype | None = None) -> None:
        self._last = f"{op} of unit {unit!r}"
        kind = "all_gather" if op == "all_gather" else "reduce_scatter"
        self._hash(kind, unit)
        self._axis.begins(op, unit)
        moved = full.numel() // self.size * (self.size - 1)
        self._ledger.record(op, self.axis, unit, moved, (wire or full.dtype).itemsize)

    def _sum(self, terms: list[Tensor], shard: Tensor, add: bool) -> None:
        """Set shard (+)= ((t0 + t1) + t2) + ...; a term may be the shard itself.

        A part of the shard at a time: on the CPU it stays in a cache from its first term to its last, so that memory
        sees every term and the shard once.
        """
        if len(terms) == 1:  # one operation, which reads nothing again
            if add:
                shard.add_(terms[0])
            elif not same_memory(terms[0], shard):
                shard.copy_(terms[0])
            return
        most, whole = group_elements(shard.device.type), shard.numel()
        scratch = self._arena.borrow("wire", min(most, whole), shard.dtype) if add else None
        for start in range(0, whole, most):
            part = shard if whole <= most else shard[start : start + most]
            of_part = terms if whole <= most else [term[start : start + most] for term in terms]
            if scratch is None:
                _set_sum(part, of_part, min(self.rank, len(terms) - 1))
            else:
                total = scratch[: part.numel()]
                _set_sum(total, of_part, 0)
                part.add_(total)
        if scratch is not None:
            self._arena.give_back("wire", scratch)


def _set_sum(out: Tensor, terms: list[Tensor], here: int) -> None:
    """Set out = ((t0 + t1) + t2) + ...; term number `here` may be `out` itself."""
    if not same_memory(terms[here], out):
        out.copy_(terms[0])
        for term in terms[1:]:
            out.add_(term)
        return
    for term in terms[1:here]:  # what comes before is summed in a received buffer
        terms[0].add_(term)
    for term in (*terms[: min(here, 1)], *terms[here + 1 :]):
        out.add_(term)


def _joined(value: int, after: int) -> int:
    """Return a hash of two numbers in their order."""
    return (value * 1000003 + after) % _HASH_MODULUS


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors start at one element of one storage (true or false for dry-run tensors too)."""
    same_storage = a.untyped_storage()._cdata == b.untyped_storage()._cdata
    return bool(same_storage and a.storage_offset() == b.storage_offset())


def broadcast_ints(comm: Comm, values: list[int]) -> list[int]:
    """Return rank 0's list of integers on every rank; all lists have one length."""
    buffer = torch.tensor(values, dtype=torch.int64, device=comm.device)
    comm.broadcast(buffer, "-")
    return comm.read(buffer, values)
