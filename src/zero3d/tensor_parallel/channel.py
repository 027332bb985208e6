"""Collectives of activations over the tensor-parallel axis: synchronous, recorded in the ledger.

    all_reduce       [..]           -> the sum              moves 2 (N-1)/N n elements per rank
    all_gather       [.., d, ..]    -> [.., N d, ..]        moves (N-1)/N of the result
    reduce_scatter   [.., N d, ..]  -> [.., d, ..]          moves (N-1)/N of the argument
    broadcast        rank 0's values, at construction

The rule on (backend, N) is the core's: pairwise messages on gloo up to 8 ranks, torch's own collectives
elsewhere. Pairwise sums are taken in rank order, so every rank gets the same bits.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from zero3d.distributed.axis import Axis, swap
from zero3d.distributed.collectives import choose_algorithm, gather_into, reduce_scatter_into
from zero3d.distributed.ledger import Ledger


class Channel:
    """The tensor-parallel axis as modules use it. `name` is the module that communicates; degree 1 moves nothing."""

    def __init__(self, axis: Axis, ledger: Ledger) -> None:
        self.axis, self.rank, self.size = axis, axis.rank, axis.size
        self._ledger = ledger
        self._pairwise = choose_algorithm(axis.backend, axis.size) == "pairwise"

    def all_reduce(self, t: Tensor, name: str) -> Tensor:
        """Return the sum over ranks, a new tensor."""
        if self.size == 1:
            return t
        if not self._pairwise:
            self._record("all_reduce", name, t, 2 * t.numel() * (self.size - 1) // self.size)
            out = t.clone(memory_format=torch.contiguous_format)
            self.axis.call("all_reduce", name, partial(dist.all_reduce, out, group=self.axis.reductions))
            return out
        if self.size == 2:  # whole tensors are as many elements as halves twice, and one round less
            self._record("all_reduce", name, t, t.numel())
            return _sum(self._swap("all_reduce", name, [t.contiguous()] * 2))
        rows = F.pad(t.reshape(-1), (0, -t.numel() % self.size)).view(self.size, -1)
        self._record("all_reduce", name, t, 2 * (rows.numel() - rows.shape[1]))
        mine = _sum(self._swap("all_reduce", name, list(rows)))
        everyone = self._swap("all_reduced", name, [mine] * self.size)
        return torch.cat(everyone)[: t.numel()].view(t.shape)

    def all_gather(self, t: Tensor, dim: int, name: str) -> Tensor:
        """Return the ranks' tensors, one behind the other along `dim`."""
        if self.size == 1:
            return t
        self._record("all_gather", name, t, t.numel() * (self.size - 1))
        t = t.contiguous()
        if self._pairwise:
            return torch.cat(self._swap("all_gather", name, [t] * self.size), dim)
        full = t.new_empty(self.size * t.numel())
        self.axis.call("all_gather", name, partial(gather_into, full, t.view(-1), self.axis.reductions))
        return torch.cat(list(full.view(self.size, *t.shape)), dim)

    def reduce_scatter(self, t: Tensor, dim: int, name: str) -> Tensor:
        """Return this rank's slice along `dim` of the sum over ranks."""
        if self.size == 1:
            return t
        self._record("reduce_scatter", name, t, t.numel() // self.size * (self.size - 1))
        slices = [part.contiguous() for part in t.chunk(self.size, dim)]
        if self._pairwise:
            return _sum(self._swap("reduce_scatter", name, slices))
        out, full = torch.empty_like(slices[0]), torch.cat([part.view(-1) for part in slices])
        start = partial(reduce_scatter_into, out.view(-1), full, self.axis.reductions)
        self.axis.call("reduce_scatter", name, start().wait)
        return out

    def slice_of(self, t: Tensor, dim: int) -> Tensor:
        """Return this rank's slice along `dim`; moves nothing."""
        return t.chunk(self.size, dim)[self.rank].contiguous()

    def broadcast(self, t: Tensor, name: str) -> None:
        """Overwrite `t` with rank 0's."""
        if self.size == 1:
            return
        self._record("broadcast", name, t, t.numel())
        raw = t.view(torch.uint8) if t.dtype == torch.bool else t
        on_device = "nccl" in self.axis.backend and raw.device.type == "cpu"  # it sends device memory only
        sent = raw.to(torch.accelerator.current_accelerator()) if on_device else raw.contiguous()
        self.axis.call("broadcast", name, partial(dist.broadcast, sent, group=self.axis.reductions, group_src=0))
        if sent is not raw:
            raw.copy_(sent)

    def _record(self, op: str, name: str, t: Tensor, elements: int) -> None:
        self._ledger.record(op, self.axis.name, name, elements, t.dtype.itemsize)

    def _swap(self, op: str, name: str, sends: list[Tensor]) -> list[Tensor]:
        """Send the i-th tensor to rank i. Return what the ranks sent to this one, in rank order."""
        received = [part if peer == self.rank else torch.empty_like(part) for peer, part in enumerate(sends)]
        swap(self.axis, self.axis.reductions, op, name, list(sends), received)()
        return received


def _sum(parts: list[Tensor]) -> Tensor:
    """Return ((p0 + p1) + p2) + ..., a new tensor."""
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
