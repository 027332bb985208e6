"""One replica as one: what the pipeline stages of a model must agree on in a step.

    weight   targets are counted where the loss is, on the last pipeline stage
    order    a dp group that ran other units than its peers stops all
    norms    one per parameter, in model order over all pipeline stages: the vector, and so the bits, that one
             rank with the whole model has
    ties     a parameter that two pipeline stages hold, each its copy: the gradients are summed, on both alike,
             and the copy's norm is left out

Every dp rank has its own replica; without pipeline all of this is the identity and sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.zero.collectives import Comm
from zero3d.zero.unit import Unit


class Tied(NamedTuple):
    """A unit of one parameter that another pipeline stage holds, too.

    peer   its rank on the pp axis
    there  the unit itself where that is this rank (a V-shaped schedule)
    copy   the other one is the owner
    """

    unit: Unit
    peer: int
    there: Unit | None
    copy: bool


class Replica:
    """The pp axis of this rank's replica."""

    def __init__(self, comm: Comm, ties: Sequence[Tied] = ()) -> None:
        self._comm, self._ties = comm, ties
        self.copies = {tied.unit for tied in ties if tied.copy}
        self._places: list[tuple[int, int]] = []
        self._longest = 0

    @property
    def alone(self) -> bool:
        """This rank is the whole replica."""
        return self._comm.size == 1

    def sum(self, values: Tensor) -> Tensor:
        """[k] -> [k] float64, summed over pipeline stages in their order; 8 k bytes to each other rank."""
        return values if self.alone else self._comm.exchange(values.double()).sum(0)

    def sum_ties(self) -> None:
        """Add up the reduced gradients of tied parameters; Psi/N elements to the peer for each."""
        for tied in self._ties:
            shard = tied.unit.gradients.shard
            if tied.there is None:
                shard.add_(self._comm.trade(shard, tied.peer, tied.unit.name))
            elif not tied.copy:
                shard.add_(tied.there.gradients.shard)
                tied.there.gradients.shard.copy_(shard)

    def stack(self, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
        """All norms of the replica in model order; `parts`: (place in the model, norm) of this rank's, in order."""
        norms = [norm for _, norm in parts] or [torch.zeros((), dtype=dtype, device=self._comm.device)]
        if self.alone:
            return torch.stack(norms)
        if not self._longest:
            self._arrange([order for order, _ in parts])
        mine = torch.zeros(self._longest, dtype=torch.float64, device=self._comm.device)
        mine[: len(norms)] = torch.stack(norms).double()
        seen = self._comm.exchange(mine)
        if not self._places:  # small units lie on the first dp ranks, all of this replica's on others
            return mine.to(dtype)
        rows, columns = zip(*self._places, strict=True)
        return seen[list(rows), list(columns)].to(dtype)

    def _arrange(self, orders: Sequence[int]) -> None:
        """(rank, position there) of every norm, in model order; they never change."""
        device = self._comm.device
        count = torch.tensor([float(len(orders))], dtype=torch.float64, device=device)
        self._longest = max(int(self._comm.exchange(count).max()), 1)
        mine = torch.full((self._longest,), -1.0, dtype=torch.float64, device=device)
        mine[: len(orders)] = torch.tensor(orders, dtype=torch.float64, device=device)
        table = self._comm.exchange(mine).tolist()
        found = [(int(order), rank, i) for rank, row in enumerate(table) for i, order in enumerate(row) if order >= 0]
        self._places = [(rank, i) for _, rank, i in sorted(found)]
