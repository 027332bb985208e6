"""Adam's update on the host, in chunks that stay inside a core's cache: ZeRO-Offload, section 5 of arXiv:2101.06840.

A bucket of states is updated in one pass over memory, since every cast is done inside a chunk:

    gradient       cast to fp32, multiplied by factors; only read
    split master   joined to fp32, updated, split again: the weights and their remainders
    fp32 master    updated where it is, then cast to the weights
    fp32 moments   updated where they are
    bf16 moments   cast to fp32, updated, rounded at random (rounding.py)

The update itself is torch's own fused kernel on pieces of parameters (Adam: arXiv:1412.6980; AdamW: arXiv:1711.05101).
It gives the bits of whole parameters: chunks are cut at multiples of 16 elements, where the kernel's vectors end.

    pieces [ 0 |     1     |2|        3        ]      of one bucket
    chunks [    0    |    1    |    2    | 3   ]      each: casts, one call of the kernel for all that is in it, casts

One Python thread per core takes chunk after chunk. Torch's kernels release Python's lock, and run on their own thread
alone: threads inside a chunk would wait for each other once for every operation. Where nothing is cast or multiplied a
chunk needs no scratch, and is as long as `SHARES` for each thread allow: hardly any of the time is Python's. Where the
gradient alone is multiplied, all of a thread's scratch is its, for chunks `WIDE` times as long.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, repeat
from operator import itemgetter
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.memory.threads import Threads
from zero3d.offload.rounding import TILE, Draw, noise_table, round_to_bf16
from zero3d.precision import join_master, least_halves, raise_ties, rounds_away, split_master
from zero3d.zero.streams import run_alone

VECTOR = 16  # elements of the longest vector of torch's kernels on CPUs, at whose ends chunks may be cut
CHUNK = 1 << 18  # a few arrays of it fit a core's caches, and Python's share, some 25 us, is small beside it
LEAST = 1 << 14  # elements that are worth a thread: waking it takes as long as updating them
SHARES = 4  # chunks of a thread where they need no scratch: the wait for a delayed thread is no longer than one of them
HELD = {torch.float32, torch.bfloat16, torch.float16, torch.int16}
WIDE = 4  # fp32 values of scratch an element: master, gradient and two moments


@dataclass(frozen=True)
class AdamRule:
    """Hyperparameters of a group of parameters, as torch's Adam and AdamW have them."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    maximize: bool = False
    decoupled: bool = True

    @classmethod
    def of(cls, optimizer: Optimizer, group: Mapping[str, Any]) -> AdamRule:
        """Return what a group of a torch optimizer says now. Raises ConfigError for what the host cannot update."""
        kind = type(optimizer)
        if kind not in (torch.optim.Adam, torch.optim.AdamW) or group["amsgrad"]:
            asked = f"{kind.__name__}(amsgrad=True)" if group.get("amsgrad") else kind.__name__
            raise ConfigError(
                f"{asked} cannot be updated on the host, which has Adam and AdamW without amsgrad: use one of them, "
                "or pass offload.executor=device."
            )
        lr, eps, weight_decay = (float(group[name]) for name in ("lr", "eps", "weight_decay"))
        beta1, beta2 = map(float, group["betas"])
        return cls(lr, beta1, beta2, eps, weight_decay, group["maximize"], group["decoupled_weight_decay"])

    def update(self, step: Tensor, tensors: Sequence[list[Tensor]]) -> None:
        """Update pieces; `step` counts this one.

        tensors  [4] masters, gradients, first and second moments of all pieces
        """
        kernel = torch._fused_adamw_ if self.decoupled else torch._fused_adam_
        masters, grads, exp_avgs, exp_avg_sqs = tensors
        kernel(
            masters,
            grads,
            exp_avgs,
            exp_avg_sqs,
            [],
            [step] * len(masters),
            lr=self.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=self.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=self.maximize,
        )


class BucketPiece(NamedTuple):
    """A piece of a parameter in a bucket, as elements of it; it starts at a multiple of VECTOR."""

    start: int
    stop: int
    rule: AdamRule


class BucketStates(NamedTuple):
    """The inputs and outputs of an update: 1-D views of one length.

    master      fp32, or int16: the remainders of a split master; its upper halves are `weights`
    weights     bf16 or fp16; None where the master is the weight
    exp_avg     fp32 or bf16, and `exp_avg_sq` alike
    grad        fp32 or bf16, only read
    first       global index of the first element, for the rounding of bf16 moments; a multiple of VECTOR
    """

    master: Tensor
    weights: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor
    grad: Tensor
    first: int = 0

    @property
    def halves(self) -> tuple[Tensor, Tensor] | None:
        """Weights and remainders of a split master."""
        return (self.weights, self.master) if self.weights is not None and self.master.dtype == torch.int16 else None

    @property
    def is_plain(self) -> bool:
        """Whether all of it is updated where it is: nothing is cast."""
        held = {self.master.dtype, self.exp_avg.dtype, self.exp_avg_sq.dtype, self.grad.dtype}
        return self.weights is None and held == {torch.float32}

    def cut(self, start: int, stop: int) -> BucketStates:
        """Return a part of it."""
        cut = slice(start, stop)
        weights = None if self.weights is None else self.weights[cut]
        exp_avg, exp_avg_sq = self.exp_avg[cut], self.exp_avg_sq[cut]
        return BucketStates(self.master[cut], weights, exp_avg, exp_avg_sq, self.grad[cut], self.first + start)

    def split(self, size: int) -> Iterator[BucketStates]:
        """Yield all of it in parts of a size, but for the last."""
        tensors = (self.master, self.exp_avg, self.exp_avg_sq, self.grad)
        weights = repeat(None) if self.weights is None else torch.split(self.weights, size)
        columns = (torch.split(each, size) for each in tensors)
        for number, (weight, master, exp_avg, exp_avg_sq, grad) in enumerate(zip(weights, *columns, strict=False)):
            yield BucketStates(master, weight, exp_avg, exp_avg_sq, grad, self.first + number * size)


class PieceCuts:
    """Finds what of a bucket's pieces lies in a chunk."""

    def __init__(self, pieces: Sequence[BucketPiece]) -> None:
        self._pieces = pieces
        self._starts, self._stops = [piece.start for piece in pieces], [piece.stop for piece in pieces]

    def within(self, start: int, stop: int) -> Iterator[tuple[AdamRule, list[slice]]]:
        """Yield slices of the chunk [start, stop) by rule; neighbouring slices with the same rule come together."""
        first, last = bisect_right(self._stops, start), bisect_left(self._starts, stop)
        for rule, alike in groupby(self._pieces[first:last], key=itemgetter(2)):
            yield rule, [slice(max(piece[0], start) - start, min(piece[1], stop) - start) for piece in alike]


def _check(bucket: BucketStates) -> None:
    """Assert what torch's kernel does not look at: it would read beyond a shorter tensor."""
    tensors = [each for each in bucket if isinstance(each, Tensor)]
    lengths, dtypes = {len(each) for each in tensors}, {each.dtype for each in tensors}
    assert len(lengths) == 1, f"tensors of one bucket have {lengths} elements"
    assert dtypes <= HELD, f"tensors of a bucket are {dtypes}, beside {HELD}"


def scratch_bytes(threads: int, chunk: int = CHUNK) -> int:
    """Return the bytes that an executor of so many threads takes beside the updated tensors."""
    return 4 * (threads * WIDE * chunk + TILE + chunk)


class HostExecutor:
    """Owns the threads that update buckets on the host, and their scratch.

    It is 16 bytes for an element of a chunk, for each thread; once, 4 more, and the table of noise, 1 MiB.

    threads  one per core that it may use
    seed     of the rounding of bf16 moments
    chunk    elements, a multiple of VECTOR; changes no bit
    """

    def __init__(self, threads: int, arena: Arena, seed: int = 0, chunk: int = CHUNK) -> None:
        assert chunk % VECTOR == 0, f"chunks of {chunk} elements would end inside a vector of {VECTOR}"
        self._count = threads
        self._arena = arena
        self._seed = seed
        self._chunk = chunk
        self._scratch = arena.borrow("wire", threads * WIDE * chunk, torch.float32)
        self._table = arena.borrow("wire", TILE, torch.int32).copy_(noise_table(arena.device))
        self._least = least_halves(arena.borrow("wire", chunk, torch.float32))
        self._own = threading.local()
        self._threads = Threads(threads, "host-update")
        run_alone(self._threads, threads, self._take_scratch)

    def _take_scratch(self, number: int) -> None:
        self._own.scratch = self._scratch.view(self._count, WIDE, self._chunk)[number]
        self._own.rooms = None

    def close(self) -> None:
        """End the threads, which have nothing to do, and give the scratch back."""
        self._threads.close()
        for buffer in (self._scratch, self._table, self._least):
            self._arena.give_back("wire", buffer)

    def update(
        self, bucket: BucketStates, pieces: Sequence[BucketPiece], step: int, factors: Sequence[float] = ()
    ) -> None:
        """Update a bucket, and return when it is done. What lies between pieces is padding, all zeros.

        pieces   in order
        step     steps applied, this one included
        factors  multiply the gradient, one after the other (`optimizer.multiply`)
        """
        _check(bucket)
        factors = [factor for factor in factors if factor != 1.0]
        size = self._size(bucket, factors)
        parts: SimpleQueue[tuple[int, BucketStates] | None] = SimpleQueue()
        for number, part in enumerate(bucket.split(size)):
            parts.put((number * size, part))
        count = min(self._count, parts.qsize())
        for _ in range(count):
            parts.put(None)
        work = partial(self._update, PieceCuts(pieces), step, factors, parts)
        if not self._threads.are_there:  # the process ends
            self._take_scratch(0)
        for each in [self._threads.submit(work) for _ in range(count)]:
            each.result()

    def _size(self, bucket: BucketStates, factors: Sequence[float]) -> int:
        """Return the elements of a chunk: all threads have some of a bucket, unless it is too small to be shared."""
        total = bucket.grad.numel()
        size = min(self._chunk, max(LEAST, _whole(-(-total // self._count))))
        if bucket.is_plain:
            size = max(size, _whole(total // (SHARES * self._count)))
            size = min(size, WIDE * self._chunk) if factors else size
        return size

    def _update(
        self, cuts: PieceCuts, step: int, factors: Sequence[float], parts: SimpleQueue[tuple[int, BucketStates] | None]
    ) -> None:
        """Update the parts that are left of a bucket, each with its first element there, until there is none."""
        count = torch.tensor(float(step))
        for start, part in iter(parts.get, None):
            wide, size = self._cast_in(part, factors), part.grad.numel()
            for rule, slices in cuts.within(start, start + size):
                whole = slices == [slice(0, size)]  # as most are: views of them take as long as the kernel's launch
                rule.update(count, [[each] if whole else [each[cut] for cut in slices] for each in wide])
            if not part.is_plain:
                self._cast_out(part, wide, step)

    def _cast_in(self, part: BucketStates, factors: Sequence[float]) -> list[Tensor]:
        """Return master, gradient and moments in fp32: where they are, or in this thread's scratch."""
        if part.is_plain:
            room = self._own.scratch.view(-1)[: part.grad.numel()] if factors else part.grad
            return [part.master, _multiplied(part.grad, factors, room), part.exp_avg, part.exp_avg_sq]
        master, grad, *moments = self._rooms(part.grad.numel())
        master = join_master(*part.halves, master) if part.halves else part.master
        held = zip((part.exp_avg, part.exp_avg_sq), moments, strict=True)
        moments = [own if own.dtype == torch.float32 else room.copy_(own) for own, room in held]
        return [master, _multiplied(part.grad, factors, grad), *moments]

    def _rooms(self, elements: int) -> list[Tensor]:
        """Return this thread's scratch for so many elements: master, gradient, moments."""
        own = self._own
        if own.rooms is None or len(own.rooms[0]) != elements:
            own.rooms = list(own.scratch[:, :elements])
        return list(own.rooms)

    def _cast_out(self, part: BucketStates, wide: Sequence[Tensor], step: int) -> None:
        """Write what is not updated in place; the gradient's scratch is free by now."""
        master, _, *moments = wide
        scratch = self._own.scratch[1]
        for moment, (own, room) in enumerate(zip((part.exp_avg, part.exp_avg_sq), moments, strict=True)):
            if own is not room:
                round_to_bf16(room, own, Draw(self._seed, step, moment), part.first, self._table, scratch)
        if part.halves:
            split_master(master, *part.halves, scratch=master)
        elif part.weights is not None and rounds_away(master.dtype, part.weights.dtype):
            part.weights.copy_(raise_ties(master, self._least, scratch[: len(master)]))
        elif part.weights is not None:
            part.weights.copy_(master)


def _whole(elements: int) -> int:
    """Return the elements of the vectors that so many begin."""
    return -(-elements // VECTOR) * VECTOR


def _multiplied(grad: Tensor, factors: Sequence[float], scratch: Tensor) -> Tensor:
    """Return the gradient in fp32, times each factor; itself where nothing is to be done."""
    if grad.dtype != scratch.dtype:
        grad = scratch.copy_(grad)
    for factor in factors:
        grad = torch.mul(grad, factor, out=scratch)
    return grad
