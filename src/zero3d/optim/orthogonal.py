"""Make the momentum of matrices orthogonal, each matrix on its owner (Muon), between a step's norm and its update.

    gradients   --average-->   what is to be orthogonal, in their place (optim/muon_optimizer.py)
    pieces  --bf16-->  owner   --Newton-Schulz-->   owner  --bf16-->  pieces, in the gradients' place
                       over tp  whole matrices

Who owns what is in owners.py. The update is element-wise again: at any stage, from records, of masters in halves.
A round sends about 2/N of a reduce-scatter's elements a rank, in 2 bytes: torch's Muon rounds to bf16 before anything
else, so that no bit is lost on the way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.account.traffic import Sent
from zero3d.distributed.axis import DONE
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import Arena
from zero3d.optim.matrices import Form, Split
from zero3d.optim.muon_optimizer import MuonWithAdamW
from zero3d.optim.owners import Owners
from zero3d.shards.cuts import Cut
from zero3d.zero.unit import Unit

NAME, OF_EXPERTS = "matrices", "matrices of experts"  # in the ledger
HALF = torch.bfloat16


class Seen(NamedTuple):
    """How parameters are seen as matrices, by name, and how tp cuts them."""

    forms: Mapping[str, Form]
    cuts: Mapping[str, Cut]

    def of(self, unit: Unit) -> dict[int, Form]:
        """Return those of a unit, by the number of the slot."""
        slots = enumerate(unit.layout.slots)
        return {number: self.forms[slot.name] for number, slot in slots if slot.name in self.forms}

    def cut(self, name: str) -> Cut | None:
        """Return how tp cuts each matrix of a parameter."""
        cut = self.cuts.get(name)
        if cut is None or cut.axis != "tp":
            return None
        return cut._replace(dim=cut.dim - 1) if self.forms[name].stacked else cut


class Orthogonal:
    """Makes the matrices of the units that one axis cuts orthogonal.

    units   by number, as `owners` has them
    tp      the axis that cuts parameters
    batches whether matrices of one shape are computed at once; their bits may then depend on how many they are
    """

    def __init__(
        self,
        optimizer: MuonWithAdamW,
        units: Mapping[int, Unit],
        owners: Owners,
        seen: Seen,
        comm: Comm,
        tp: Comm,
        arena: Arena,
        batches: bool,
    ) -> None:
        self._optimizer = optimizer
        self._units = units
        self.owners = owners
        self._seen = seen
        self._comm = comm
        self._tp = tp
        self._arena = arena
        self._batches = batches
        self.name = OF_EXPERTS if any(unit.layout.of_experts for unit in units.values()) else NAME

    @torch.no_grad()
    def apply(self) -> None:
        """Make what is in the gradients' place orthogonal."""
        rounds = [Round(self, turn) for turn in self.owners.rounds]
        for number, turn in enumerate(rounds):
            if number == 0:
                turn.start()
            if number + 1 < len(rounds):
                rounds[number + 1].start()
            turn.compute()
            if number:
                rounds[number - 1].end()
        if rounds:
            rounds[-1].end()

    def traffic(self) -> list[Sent]:
        """Return what a step sends."""
        return self.owners.traffic(self._comm.axis, self._comm.rank, self._tp.rank, self._tp.size, self.name)

    # --- what rounds ask -------------------------------------------------------------------------

    @property
    def comm(self) -> Comm:
        """The axis."""
        return self._comm

    def borrow(self, elements: int) -> Tensor:
        """Lend memory for so many elements that travel."""
        return self._arena.borrow("wire", elements, HALF)

    def give_back(self, *buffers: Tensor) -> None:
        """Take it back."""
        for buffer in buffers:
            self._arena.give_back("wire", buffer)

    def piece(self, index: int) -> Tensor:
        """Return this rank's elements of a matrix, in the gradients' place."""
        matrix = self.owners.matrices[index]
        unit = self._units[matrix.unit]
        start, stop = self.owners.part(index, self._comm.rank)
        first = 0 if self.owners.whole else self._comm.rank * unit.layout.shard
        at = matrix.start + start - first
        return unit.gradients.owned[at : at + stop - start]

    def compute(self, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        """Make this rank's matrices of a round orthogonal, each [A, B] in bf16, in place."""
        if not indices:
            return
        if not self.owners.matrices[indices[0]].cut:
            self._compute(indices, values)
            return
        self._over_tp(indices, values)

    def _over_tp(self, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        """Join slices that tp ranks have: matrices of this owner are shared out once more, over tp."""
        tp, turn = self._tp, [(), indices]
        of_rank = self.owners.over_tp(turn, 1, tp.size)
        sends = [sum(values[n].numel() for n in of) for of in of_rank]
        mine = of_rank[tp.rank]
        receives = [sends[tp.rank]] * tp.size
        rows = torch.cat([values[n].reshape(-1) for of in of_rank for n in of])
        came = tp.pass_rows(rows, sends, receives, self.name).view(tp.size, -1)
        starts = list(accumulate((values[n].numel() for n in mine), initial=0))
        whole = []
        for n, at in zip(mine, starts, strict=False):
            slices = [came[rank, at : at + values[n].numel()].view(values[n].shape) for rank in range(tp.size)]
            whole.append(self._cut(indices[n]).join(slices))
        self._compute([indices[n] for n in mine], whole)
        back = [
            self._cut(indices[n])._replace(rank=rank).extract(matrix).view(-1)
            for rank in range(tp.size)
            for n, matrix in zip(mine, whole, strict=True)
        ]
        rows = torch.cat(back) if back else came.new_empty(0)
        came = tp.pass_rows(rows, receives, sends, self.name)
        order = [n for of in of_rank for n in of]
        for n, part in zip(order, torch.split(came, [values[n].numel() for n in order]), strict=True):
            values[n].copy_(part.view(values[n].shape))

    def _cut(self, index: int) -> Cut:
        cut = self._seen.cut(self._slot(index))
        assert cut is not None
        return cut

    def _slot(self, index: int) -> str:
        matrix = self.owners.matrices[index]
        return self._units[matrix.unit].layout.slots[matrix.slot].name

    def _group(self, index: int) -> int:
        matrix = self.owners.matrices[index]
        return self._units[matrix.unit].layout.slots[matrix.slot].group

    def _compute(self, indices: Sequence[int], values: Sequence[Tensor]) -> None:
        """Make whole matrices orthogonal, in place: those of one shape and group at once, if that is asked for."""
        alike: dict[tuple[Any, ...], list[tuple[Tensor, tuple[int, int]]]] = {}
        for index, matrix in zip(indices, values, strict=True):
            group, split = self._group(index), self._seen.forms[self._slot(index)].split
            for number, (view, shape) in enumerate(fused(matrix, split)):
                key = (group, shape) if self._batches else (group, shape, index, number)
                alike.setdefault(key, []).append((view, shape))
        for (group, *_), same in alike.items():
            self._compute_alike(group, same)

    def _compute_alike(self, group: int, same: Sequence[tuple[Tensor, tuple[int, int]]]) -> None:
        """Make matrices of one shape orthogonal, in place; what that takes is dropped before others are computed."""
        options = self._optimizer.param_groups[group]
        inputs = [view.reshape(shape) for view, shape in same]
        if len(inputs) == 1:
            results: Sequence[Tensor] | Tensor = [self._optimizer.orthogonal(inputs[0], options)]
        else:
            results = self._optimizer.orthogonal(torch.stack(inputs), options)
        for (view, _), result in zip(same, results, strict=True):
            view.copy_(result.reshape(view.shape))


def fused(matrix: Tensor, split: Split | None) -> list[tuple[Tensor, tuple[int, int]]]:
    """Return what a matrix is fused of: views, and the shapes of the matrices that they are, reshaped."""
    shape = (matrix.size(0), matrix.size(1))
    if split is None:
        return [(matrix, shape)]
    runs = matrix.view(*shape[: split.dim], -1, sum(split.sizes), *shape[split.dim + 1 :])
    return list(zip(torch.split(runs, list(split.sizes), split.dim + 1), split.parts(shape), strict=True))


class Round:
    """What this rank has of every owner's matrices of one round, and the matrices of its own, on their way.

    pieces  of matrices, by owner, in `mine`; of this rank's matrices by source in `came`, matrix by matrix in `values`
    """

    def __init__(self, of: Orthogonal, turn: Sequence[Sequence[int]]) -> None:
        self._of = of
        self._turn = turn
        self._comm = of.comm
        self._own = list(turn[self._comm.rank])
        self._numels = [of.owners.matrices[index].numel for index in self._own]
        self._pending = DONE

    def start(self) -> None:
        """Send this rank's pieces to their owners."""
        of, rank = self._of, self._comm.rank
        if of.owners.whole:
            self._mine = of.borrow(self._comm.size * of.owners.widest(self._turn))
            self._came = self._mine.view(self._comm.size, -1)[rank, : sum(self._numels)]
            self._fill(self._came, self._own)
            return
        self._sends, self._receives = of.owners.sends(self._turn, rank), of.owners.receives(self._turn, rank)
        self._mine = of.borrow(sum(self._sends))
        self._fill(self._mine, [index for own in self._turn for index in own])
        self._came = self._mine
        if self._comm.size > 1:
            self._came = of.borrow(sum(self._receives))
            self._pending = self._comm.start_rows(self._mine, self._sends, self._came, self._receives, of.name)

    def compute(self) -> None:
        """Make the matrices that came orthogonal, and send them back."""
        of = self._of
        self._pending.wait()
        apart = len(self._own) > 1 and not of.owners.whole and self._comm.size > 1
        values = of.borrow(len(self._came)) if apart else self._came
        places = list(self._places(values)) if apart else []
        if apart:
            torch._foreach_copy_([place for place, _ in places], [part for _, part in places])
        shapes = [of.owners.matrices[index].shape for index in self._own]
        of.compute(
            self._own, [m.view(shape) for m, shape in zip(torch.split(values, self._numels), shapes, strict=True)]
        )
        if apart:
            torch._foreach_copy_([part for _, part in places], [place for place, _ in places])
            of.give_back(values)
        if of.owners.whole:
            slot = self._mine.view(self._comm.size, -1)[self._comm.rank]
            self._pending = self._comm.all_gather(self._mine, slot, of.name)
        elif self._comm.size > 1:
            self._pending = self._comm.start_rows(self._came, self._receives, self._mine, self._sends, of.name)

    def end(self) -> None:
        """Take what came back into the gradients' place."""
        self._pending.wait()
        of, indices = self._of, [index for own in self._turn for index in own]
        if of.owners.whole:
            slots = self._mine.view(self._comm.size, -1)
            for own, slot in zip(self._turn, slots, strict=True):
                self._take(slot, own)
        else:
            self._take(self._mine, indices)
        of.give_back(self._mine, *([] if self._came is self._mine or of.owners.whole else [self._came]))
        self._pending = DONE
        del self._mine, self._came  # or they would be there until the last round has ended

    def _fill(self, buffer: Tensor, indices: Sequence[int]) -> None:
        """Copy this rank's pieces of matrices into a buffer, one behind the other."""
        pieces = [self._of.piece(index) for index in indices]
        parts = torch.split(buffer, [piece.numel() for piece in pieces]) if pieces else ()
        if pieces:
            torch._foreach_copy_(list(parts), pieces)

    def _take(self, buffer: Tensor, indices: Sequence[int]) -> None:
        """Copy them back."""
        pieces = [self._of.piece(index) for index in indices]
        if pieces:
            used = sum(piece.numel() for piece in pieces)
            torch._foreach_copy_(pieces, list(torch.split(buffer[:used], [piece.numel() for piece in pieces])))

    def _places(self, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the places of matrices, one behind the other, each with the part of what came that belongs there."""
        owners, starts = self._of.owners, list(accumulate(self._numels, initial=0))
        at = 0
        for source in range(self._comm.size):
            for index, begin in zip(self._own, starts, strict=False):
                start, stop = owners.part(index, source)
                yield values[begin + start : begin + stop], self._came[at : at + stop - start]
                at += stop - start
