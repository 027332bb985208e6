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
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.zero.arena import host_value
from zero3d.zero.collectives import Comm
from zero3d.zero.unit import Unit

APART = 0.01  # of a norm: more than an accelerator's order of sums can change


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
        self.uneven: int | None = None  # place in the model of a parameter that tp ranks disagree on
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

    def _counted(self, name: str, norm: Tensor) -> Tensor:
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

    def stack(self, parts: Sequence[tuple[int, str, Tensor]], dtype: torch.dtype) -> Tensor:
        """All norms of the replica in model order; `parts`: (place in the model, name, norm) of this rank's."""
        norms = [self._counted(name, norm) for _, name, norm in parts]
        norms = norms or [torch.zeros((), dtype=dtype, device=self._comm.device)]
        if self.alone:
            return torch.stack(norms)
        if self._places is None:
            self._places = self._arrange(parts)
        if not self._places:  # all of this dp rank's shards are padding
            return torch.stack(norms)
        mine = torch.zeros(self.longest, dtype=torch.float64, device=self._comm.device)
        mine[: len(norms)] = torch.stack(norms).double()
        seen = self._comm.exchange(mine)
        rows, columns = [rank for rank, _ in self._places], [i for _, i in self._places]
        return seen[rows, columns].to(dtype)

    def _arrange(self, parts: Sequence[tuple[int, str, Tensor]]) -> list[tuple[int, int]]:
        """(rank, position there) of every norm, in model order; they never change. Finds what is `uneven`."""
        device = self._comm.device
        count = torch.tensor([float(len(parts))], dtype=torch.float64, device=device)
        counts = host_value(self._comm.exchange(count).view(-1), [float(len(parts))])
        self.longest = max(int(max(counts)), 1)
        places = [float(order) for order, *_ in parts] + [-1.0] * (self.longest - len(parts))
        mine = torch.zeros(2, self.longest, dtype=torch.float64, device=device)  # places, norms that are common
        mine[0] = torch.tensor(places, dtype=torch.float64, device=device)
        for i, (_, name, norm) in enumerate(parts):
            mine[1, i] = float("nan") if name in self._slices.cut else norm.double()
        seen = self._comm.exchange(mine.view(-1)).view(-1)
        flat = host_value(seen, (places + [0.0] * self.longest) * self._comm.size)
        rows = [flat[i : i + self.longest] for i in range(0, len(flat), self.longest)]
        self.uneven = self._compare(rows[::2], rows[1::2])
        table = [(order, rank, i) for rank, row in enumerate(rows[::2]) for i, order in enumerate(row)]
        return [(rank, i) for order, rank, i in sorted(table) if order >= 0]

    def _compare(self, places: Sequence[list[float]], norms: Sequence[list[float]]) -> int | None:
        """Of each rank's places and norms the first place where tp ranks differ on what they should have alike."""
        size, odd = self._slices.tp.size, []
        for start in range(0, len(places), size):
            for place, *each in zip(places[start], *norms[start : start + size], strict=True):
                if all(map(isfinite, each)) and max(each) - min(each) > APART * max(each):
                    odd.append(int(place))
        return min(odd, default=None)


def _overwrite(unit: Unit, master: Tensor) -> None:
    """Give a gathered unit other values; (N-1)/N Psi elements over the dp axis above stage 0."""
    unit.weights.master.copy_(master)
    unit.weights.refresh().wait()
    if unit.weights.sharded:
        unit.weights.share()
