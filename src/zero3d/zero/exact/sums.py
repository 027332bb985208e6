"""Sums in a binary tree: over several tensors at once, and over tensors that come one after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from zero3d.distributed.collectives import same_memory
from zero3d.memory.arena import Arena
from zero3d.zero.gradient_memory import GradientMemory


def add_tree(terms: Sequence[Tensor], out: Tensor, arena: Arena) -> Tensor:
    """Set out = (t0 + t1) + (t2 + t3) + ... in halves, in the dtype of `out`; a power of two of terms."""
    if len(terms) == 1:
        return out if same_memory(terms[0], out) else out.copy_(terms[0])
    half = len(terms) // 2
    add_tree(terms[:half], out, arena)
    if half == 1:
        return out.add_(terms[1])
    scratch = arena.borrow("wire", out.numel(), out.dtype)
    out.add_(add_tree(terms[half:], scratch, arena))
    arena.give_back("wire", scratch)
    return out


class Counter:
    """Owns a sum in halves of summands that come one after another, as a binary counter adds one.

        summand         0     1      2         3        4
        sums         0     01     01, 2     0123     0123, 4          older first; 2 buffers at most for 5 summands

    It has as many buffers as `stages.counter_buffers` says of the most summands there have been; each has memory from
    its first use on.

    provide  makes a buffer
    memory   of all buffers
    """

    def __init__(self, arena: Arena, elements: int, dtype: torch.dtype, provide: Callable[[], GradientMemory]) -> None:
        self._arena = arena
        self._elements = elements
        self._dtype = dtype
        self._provide = provide
        self.memory: list[GradientMemory] = []
        self._free: list[GradientMemory] = []
        self._sums: list[Tensor] = []
        self._used: list[GradientMemory] = []  # by sums
        self.count = 0

    def grow(self, buffers: int) -> GradientMemory:
        """Make up to so many buffers, and return the first of all."""
        while len(self.memory) < buffers:
            self.memory.append(self._provide())
            self._free.append(self.memory[-1])
        return self.memory[0]

    def _open_sum(self) -> Tensor:
        self._used.append(self._free.pop())
        self._sums.append(self._used[-1].fill())
        return self._sums[-1]

    def push(self, terms: Sequence[Tensor]) -> None:
        """Add the sum of `terms`, which is the next summand."""
        number, self.count = self.count, self.count + 1
        if not number & 1:
            add_tree(terms, self._open_sum(), self._arena)
            return
        if len(terms) == 1:
            self._sums[-1].add_(terms[0])
        else:
            scratch = self._arena.borrow("wire", self._elements, self._dtype)
            self._sums[-1].add_(add_tree(terms, scratch, self._arena))
            self._arena.give_back("wire", scratch)
        while (number := number >> 1) & 1:
            self._merge()

    def _merge(self) -> None:
        newer = self._sums.pop()
        self._sums[-1].add_(newer)
        self._free.append(self._used.pop())

    def open(self) -> Tensor:
        """Return an empty buffer, which the caller fills with the sum of all summands."""
        self.count = 1
        return self._open_sum()

    def total(self) -> Tensor:
        """Return the sum of all summands, after the last one."""
        while len(self._sums) > 1:
            self._merge()
        return self._sums[0]

    def clear(self) -> None:
        """Forget all sums."""
        self._free = list(self.memory)
        self._sums, self._used = [], []
        self.count = 0
