"""Collectives of activations over the tensor-parallel axis: synchronous, recorded in the ledger.

    all_reduce       [..]           -> the sum              moves 2 (N-1)/N n elements per rank
    all_gather       [.., d, ..]    -> [.., N d, ..]        moves (N-1)/N of the result
    reduce_scatter   [.., N d, ..]  -> [.., d, ..]          moves (N-1)/N of the argument
    broadcast        rank 0's values, at construction

How they are done is chosen as for the core (distributed/choice.py). Pairwise sums are taken in rank order, so
every rank gets the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from zero3d.distributed.algorithms import add_up
from zero3d.distributed.axis import Axis, Call
from zero3d.distributed.collectives import open_algorithm
from zero3d.distributed.ledger import Ledger


class Channel:
    """The tensor-parallel axis as modules use it. `name` is the module that communicates; degree 1 moves nothing."""

    def __init__(self, axis: Axis, ledger: Ledger) -> None:
        self.axis = axis
        self.rank = axis.rank
        self.size = axis.size
        self._ledger = ledger
        self._algorithm = open_algorithm(axis)

    def all_reduce(self, t: Tensor, name: str) -> Tensor:
        """Return the sum over ranks, a new tensor."""
        if self.size == 1:
            return t
        total, moved = self._algorithm.all_reduce(self._call("all_reduce", name), t)
        self._record("all_reduce", name, t, moved)
        return total

    def all_gather(self, t: Tensor, dim: int, name: str) -> Tensor:
        """Return the ranks' tensors, one behind the other along `dim`."""
        if self.size == 1:
            return t
        self._record("all_gather", name, t, t.numel() * (self.size - 1))
        full = t.new_empty(self.size, *t.shape)
        self._algorithm.all_gather(self._call("all_gather", name), full.view(-1), t.reshape(-1)).wait()
        return full.flatten(0, 1) if dim == 0 else torch.cat(list(full), dim)

    def reduce_scatter(self, t: Tensor, dim: int, name: str) -> Tensor:
        """Return this rank's slice along `dim` of the sum over ranks."""
        if self.size == 1:
            return t
        self._record("reduce_scatter", name, t, t.numel() // self.size * (self.size - 1))
        dim %= t.dim()
        slices = t.reshape(*t.shape[:dim], self.size, -1, *t.shape[dim + 1 :]).movedim(dim, 0).contiguous()
        sums: list[Tensor] = []
        self._algorithm.reduce_scatter(
            self._call("reduce_scatter", name), slices.view(-1), t.dtype, lambda terms: sums.append(add_up(terms))
        ).wait()
        return sums[0].view(slices.shape[1:])

    def slice_of(self, t: Tensor, dim: int) -> Tensor:
        """Return this rank's slice along `dim`; moves nothing."""
        return t.chunk(self.size, dim)[self.rank].contiguous()

    def broadcast(self, t: Tensor, name: str) -> None:
        """Overwrite `t` with rank 0's."""
        if self.size == 1:
            return
        self._record("broadcast", name, t, t.numel())
        self.axis.broadcast(t, name)

    def _record(self, op: str, name: str, t: Tensor, elements: int) -> None:
        self._ledger.record(op, self.axis.name, name, elements, t.dtype.itemsize)

    def _call(self, op: str, name: str) -> Call:
        return Call(self.axis, self.axis.reductions, op, name)
