"""One replica as one: what the ranks that share a model must agree on in a step.

    weight   targets are counted where the loss is, on the last pipeline stage, once for all its tp ranks
    order    a dp group that ran other units than its peers stops all
    norms    one per parameter, in model order over all pipeline stages: the vector, and so the bits, that one
             rank with the whole model has. Of a parameter cut over tp one per part; of any other tp rank 0's
    ties     a parameter that two pipeline stages hold, each its copy: the gradients are summed, on both alike,
             and the copy's norm is left out; what is written into one is carried to the other
    partial  a parameter that all tp ranks hold, and whose gradient on each is a part: the parts are summed

Every dp rank has its own replica; of one rank all of this is the identity and sends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.zero.arena import host_value
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


class Slices(NamedTuple):
    """What the tp axis does to parameters, by name: `cut` ones are other on every rank, the rest is the same.

    partial  of the rest, those whose gradients are parts of a sum over the tp ranks
    """

    tp: Comm
    cut: Collection[str] = ()
    partial: Collection[str] = ()


class Replica:
    """The ranks that train one replica with this one.

    comm    all of them: pipeline stage by pipeline stage, each with its tp ranks
    across  the pp axis, which carries ties
    """

    def __init__(self, comm: Comm, across: Comm, slices: Slices, ties: Sequence[Tied] = ()) -> None:
        self._comm, self._across, self._slices, self._ties = comm, across, slices, ties
        self.copies = {tied.unit for tied in ties if tied.copy}
        self.tied = {tied.unit for tied in ties}
        self._places: list[tuple[int, int]] | None = None
        self.longest = 0  # the most norms that one rank of the replica has; known from the first step on
        self.summed = 0  # elements of partial gradients that a step sums; likewise

    @property
    def traded(self) -> list[Unit]:
        """Units whose gradients are sent to another rank."""
        return [tied.unit for tied in self._ties if tied.there is None and tied.unit.grads is not None]

    @property
    def has_norms(self) -> bool:
        """Whether a step exchanges norms: false where all shards of this dp rank are padding."""
        return bool(self._places)

    @property
    def alone(self) -> bool:
        """This rank is the whole replica."""
        return self._comm.size == 1

    def exchange(self, values: Tensor) -> Tensor:
        """[k] -> [ranks, k] float64; 8 k bytes to each other rank."""
        return values[None] if self.alone else self._comm.exchange(values.double())

    def sum(self, values: Tensor) -> Tensor:
        """[k] -> [k] float64, summed over pipeline stages in order; of tp ranks, which agree, the first counts."""
        return values if self.alone else self.count_once(self.exchange(values)).sum(0)

    def count_once(self, rows: Tensor) -> Tensor:
        """Of [ranks, ...] those of the first tp rank of each pipeline stage."""
        return rows[:: self._slices.tp.size]

    def counted(self, name: str, norm: Tensor) -> Tensor:
        """A parameter's norm as this rank counts it: 0 where another tp rank does, unless it is not finite."""
        counts = name in self._slices.cut or self._slices.tp.rank == 0
        return norm if counts else norm * 0.0

    def sum_partial(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Add up the reduced gradients of partial parameters, by name; their shards to every other tp rank."""
        if self._slices.tp.size == 1:
            return
        parts = [grad for name, grad in grads if name in self._slices.partial]
        if not parts:
            return
        mine = torch.cat(parts)
        self.summed = mine.numel()
        total = self._slices.tp.exchange(mine).sum(0)
        for part, values in zip(parts, torch.split(total, [part.numel() for part in parts]), strict=True):
            part.copy_(values)

    def sum_ties(self) -> None:
        """Add up the reduced gradients of tied parameters; Psi/N elements to the peer for each."""
        for tied in self._ties:
            if tied.unit.grads is None:
                continue
            shard = tied.unit.gradients.shard
            if tied.there is None:
                shard.add_(self._across.trade(shard, tied.peer, tied.unit.name))
            elif not tied.copy:
                shard.add_(tied.there.gradients.shard)
                tied.there.gradients.shard.copy_(shard)

    def share_ties(self, written: Collection[Unit]) -> None:
        """Carry what was written into one copy of a tied parameter to the other; where both were, the owner's.

        All of `tied` are gathered. One number to the peer for each, and Psi/N elements of a written one.
        """
        for tied in self._ties:
            master = tied.unit.weights.master
            if tied.there is None:
                mine = torch.tensor([float(tied.unit in written)], dtype=torch.float64, device=self._across.device)
                theirs = self._across.trade(mine, tied.peer, tied.unit.name)
                own, other = float(mine) > 0, float(theirs) > 0
                if own or other:
                    values = self._across.trade(master, tied.peer, tied.unit.name)
                    if other and (tied.copy or not own):
                        _overwrite(tied.unit, values)
            elif tied.unit in written and not (tied.copy and tied.there in written):
                _overwrite(tied.there, master)

    def stack(self, parts: Sequence[tuple[int, Tensor]], dtype: torch.dtype) -> Tensor:
        """All norms of the replica in model order; `parts`: (place in the model, norm) of this rank's, in order."""
        norms = [norm for _, norm in parts] or [torch.zeros((), dtype=dtype, device=self._comm.device)]
        if self.alone:
            return torch.stack(norms)
        if self._places is None:
            self._places = self._arrange([order for order, _ in parts])
        if not self._places:  # all of this dp rank's shards are padding
            return torch.stack(norms)
        mine = torch.zeros(self.longest, dtype=torch.float64, device=self._comm.device)
        mine[: len(norms)] = torch.stack(norms).double()
        seen = self._comm.exchange(mine)
        rows, columns = [rank for rank, _ in self._places], [i for _, i in self._places]
        return seen[rows, columns].to(dtype)

    def _arrange(self, orders: Sequence[int]) -> list[tuple[int, int]]:
        """(rank, position there) of every norm, in model order; they never change."""
        device = self._comm.device
        count = torch.tensor([float(len(orders))], dtype=torch.float64, device=device)
        counts = host_value(self._comm.exchange(count).view(-1), [float(len(orders))])
        self.longest = max(int(max(counts)), 1)
        mine = torch.full((self.longest,), -1.0, dtype=torch.float64, device=device)
        mine[: len(orders)] = torch.tensor(orders, dtype=torch.float64, device=device)
        assumed = [float(order) for order in orders] + [-1.0] * (self.longest - len(orders))
        table = host_value(self._comm.exchange(mine).view(-1), assumed * self._comm.size)
        found = [(int(order), *divmod(i, self.longest)) for i, order in enumerate(table) if order >= 0]
        return [(rank, i) for _, rank, i in sorted(found)]


def _overwrite(unit: Unit, master: Tensor) -> None:
    """Give a gathered unit other values; (N-1)/N Psi elements over the dp axis above stage 0."""
    unit.weights.master.copy_(master)
    unit.weights.refresh().wait()
    if unit.weights.sharded:
        unit.weights.share()
