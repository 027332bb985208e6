"""What the ranks that hold one copy of the model together must agree on in a step.

    weight   targets are counted where the loss is, on the last pipeline stage, once for all its tp ranks
    order    a dp group that ran other units than its peers stops all ranks
    norms    one per parameter, in model order over all pipeline stages: the vector, and so the bits, that one
             rank with the whole model has. Of a parameter cut over tp one per slice; of any other tp rank 0's,
             and the others' must be alike: else the plan forgot that its gradients are terms of a sum
    ties     a parameter that two pipeline stages hold, each its copy: the gradients are summed, on both alike,
             and the copy's norm is left out; what is written into one is carried to the other
    partial  a parameter that all tp ranks hold, and whose gradient on each is a term of a sum: they are summed

Every dp rank has such a group of its own; where the group is one rank all of this is the identity and sends nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm
from zero3d.precision import joined
from zero3d.zero.unit import Unit

APART = 0.01  # of a norm: more than an accelerator's order of sums can change
NONE = -1  # in the place of a parameter's place: there is none
_PLACES = 1 << 32  # more than parameters of a model


class Tied(NamedTuple):
    """A unit of one parameter that another pipeline stage holds, too.

    peer        the other unit's rank on the pp axis
    local_twin  the other unit where that rank is this one (a V-shaped schedule)
    copy        the other one is the owner
    """

    unit: Unit
    peer: int
    local_twin: Unit | None
    copy: bool


class TensorCuts(NamedTuple):
    """What the tp axis does to parameters, by name: `cut` ones are other on every rank, the rest is the same.

    partial  of the rest, those whose gradients on the tp ranks are terms of a sum
    """

    tp: Comm
    cut: Collection[str] = ()
    partial: Collection[str] = ()


class PieceNorm(NamedTuple):
    """The norm of one piece of a gradient: in a cell of the grid (0 without one), of the parameter at a place."""

    cell: int
    place: int
    name: str
    norm: Tensor


class NormKey(NamedTuple):
    """What the other ranks must know of a norm. Integers of keys sort as keys do.

    cell, place  as in `PieceNorm`
    cut          whether tp cuts the parameter
    """

    cell: int
    place: int
    cut: bool

    def to_int(self) -> int:
        """Return the key as one integer, 8 bytes on the way to the other ranks."""
        return (self.cell * _PLACES + self.place) * 2 + self.cut

    @classmethod
    def of_int(cls, number: int) -> NormKey:
        """Return the key that `to_int` made a number of."""
        rest, cut = divmod(number, 2)
        return cls(*divmod(rest, _PLACES), bool(cut))


class NormTable(NamedTuple):
    """Where the norms of a group stand in [ranks, longest]; known from the first step on.

    order    of all of them by cell and in model order: indices into [ranks x longest], on the device
    cells    of each of them
    counted  [ranks, longest] 1.0, or 0.0 where another tp rank's norm of the same parameter counts
    common   [stages, longest] the parameter's place in the model; NONE where tp ranks hold slices of it
    """

    order: Tensor
    cells: list[int]
    counted: Tensor
    common: Tensor


class Norms(NamedTuple):
    """The norms of a group's gradients.

    values  [cells]
    uneven  the place of a parameter with unlike norms on tp ranks that should be alike, or NONE. None where this rank
            holds the whole model
    """

    values: Tensor
    uneven: Tensor | None


class Peers:
    """Asks the ranks of a group, in its first step, which norms they have; a dry run replaces it, being alone."""

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def norm_counts(self, count: int) -> list[int]:
        """Return how many norms every rank has, this one `count`; 8 bytes to each other rank."""
        return self._exchange([count])

    def norm_keys(self, keys: list[int]) -> list[int]:
        """Return the keys of every rank, one row after the other; this one's are filled up with NONE to the longest."""
        return self._exchange(keys)

    def _exchange(self, row: list[int]) -> list[int]:
        numbers = torch.tensor(row, dtype=torch.int64)
        return self.comm.read(self.comm.exchange(numbers).view(-1), row * self.comm.size)


class ModelGroup:
    """The ranks that hold one copy of the model together with this one.

    comm    all of them: pipeline stage by pipeline stage, each with its tp ranks
    across  the pp axis, which carries ties
    """

    def __init__(self, comm: Comm, across: Comm, cuts: TensorCuts, ties: Sequence[Tied] = ()) -> None:
        self._comm = comm
        self._across = across
        self._cuts = cuts
        self._ties = ties
        self.peers = Peers(comm)
        self.copies = {tied.unit for tied in ties if tied.copy}
        self.tied = {tied.unit for tied in ties}
        self._table: NormTable | None = None
        self.longest = 0  # the most norms that one rank of the group has; known from the first step on
        self.summed = 0  # elements of partial gradients that a step sums; likewise

    def forget(self) -> None:
        """Ask the ranks of the group anew, in the next step, which norms they have."""
        self._table, self.longest = None, 0

    @property
    def traded(self) -> list[Unit]:
        """Units whose gradients are sent to another rank."""
        return [tied.unit for tied in self._ties if tied.local_twin is None and tied.unit.grads is not None]

    @property
    def has_norms(self) -> bool:
        """Whether a step exchanges norms: false where all shards of this dp rank are padding."""
        return self._table is not None and bool(self._table.cells)

    @property
    def alone(self) -> bool:
        """Whether this rank holds the whole model."""
        return self._comm.size == 1

    def exchange(self, values: Tensor) -> Tensor:
        """Gather [k] of every rank as [ranks, k] float64; 8 k bytes to each other rank."""
        return values[None] if self.alone else self._comm.exchange(values.double())

    def sum(self, values: Tensor) -> Tensor:
        """Sum [k] over pipeline stages in order, as float64; of tp ranks, which agree, the first counts."""
        return values if self.alone else self.count_once(self.exchange(values)).sum(0)

    def count_once(self, rows: Tensor) -> Tensor:
        """Return of [ranks, ...] those of the first tp rank of each pipeline stage."""
        return rows[:: self._cuts.tp.size]

    def untouched(self, units: Iterable[Unit]) -> list[Unit]:
        """Return the trainable units whose reduced gradients are no terms of a sum over this group."""
        partial = self._cuts.partial if self._cuts.tp.size > 1 else ()
        own = (unit for unit in units if unit.grads is not None and unit not in self.tied)
        return [unit for unit in own if not any(slot.name in partial for slot in unit.layout.slots)]

    def sum_partial(self, grads: Iterable[tuple[str, Tensor]]) -> None:
        """Add up the reduced gradients of partial parameters, by name; their shards to every other tp rank."""
        if self._cuts.tp.size == 1:
            return
        terms = [grad for name, grad in grads if name in self._cuts.partial]
        if not terms:
            return
        flat = torch.cat([term.to(self._comm.device) for term in terms])
        self.summed = flat.numel()
        total = self._cuts.tp.exchange(flat).sum(0)
        for term, values in zip(terms, torch.split(total, [term.numel() for term in terms]), strict=True):
            term.copy_(values)

    def sum_ties(self) -> None:
        """Add up the reduced gradients of tied parameters; Psi/N elements to the peer for each."""
        for tied in self._ties:
            if tied.unit.grads is None:
                continue
            shard = tied.unit.gradients.shard
            if tied.local_twin is None:
                of_peer = self._across.trade(shard.to(self._across.device), tied.peer, tied.unit.name)
                shard.add_(of_peer.to(shard.device))
            elif not tied.copy:
                shard.add_(tied.local_twin.gradients.shard)
                tied.local_twin.gradients.shard.copy_(shard)

    def share_ties(self, written: Collection[Unit]) -> None:
        """Carry a write into one copy of a tied parameter to the other; where both were written, the owner's wins.

        All of `tied` are gathered. One number to the peer for each, and Psi/N elements of a written one.
        """
        for tied in self._ties:
            weights = tied.unit.weights
            numel = weights.elements
            if tied.local_twin is None:
                written_here = tied.unit in written
                flag = torch.tensor([float(written_here)], dtype=torch.float64, device=self._across.device)
                written_by_peer = self._across.read(self._across.trade(flag, tied.peer, tied.unit.name), [0.0])[0] > 0
                if written_here or written_by_peer:
                    own = joined(weights.masters.read(0, numel)).to(self._across.device)
                    values = self._across.trade(own, tied.peer, tied.unit.name)
                    if written_by_peer and (tied.copy or not written_here):
                        _overwrite(tied.unit, values)
            elif tied.unit in written and not (tied.copy and tied.local_twin in written):
                _overwrite(tied.local_twin, joined(weights.masters.read(0, numel)))

    def norms(self, pieces: Sequence[PieceNorm], cells: int, dtype: torch.dtype) -> Norms:
        """Return the norm of the group's gradients in every cell; `pieces`: this rank's, by cell, in model order."""
        device = self._comm.device  # gradients may be on the host
        norms = torch.stack([p.norm for p in pieces] or [torch.zeros((), dtype=dtype, device=device)]).to(device)
        if self._table is None and not self.alone:
            self._table = self._arrange([NormKey(p.cell, p.place, p.name in self._cuts.cut) for p in pieces])
        if self._table is None or not self._table.cells:  # alone, or all of this dp rank's shards are padding
            even = None if self.alone else torch.full((), NONE, dtype=torch.int64, device=self._comm.device)
            return Norms(_norm_by_cell(norms, [piece.cell for piece in pieces], cells), even)
        row = torch.zeros(self.longest, dtype=torch.float64, device=self._comm.device)
        row[: len(pieces)] = norms[: len(pieces)].double()
        rows = self._comm.exchange(row)
        counted = (rows * self._table.counted).take(self._table.order)  # what is not finite stays so
        uneven = find_uneven(rows.view(-1, self._cuts.tp.size, self.longest), self._table.common)
        return Norms(_norm_by_cell(counted.to(dtype), self._table.cells, cells), uneven)

    def _arrange(self, keys: Sequence[NormKey]) -> NormTable:
        """Learn from all ranks which norms they have, which never changes."""
        tp, device = self._cuts.tp.size, self._comm.device
        self.longest = max(*self.peers.norm_counts(len(keys)), 1)
        numbers = self.peers.norm_keys([key.to_int() for key in keys] + [NONE] * (self.longest - len(keys)))
        places = enumerate(numbers)
        norms = sorted((NormKey.of_int(number), *divmod(i, self.longest)) for i, number in places if number != NONE)
        counted = [[1.0] * self.longest for _ in range(self._comm.size)]
        common = [[NONE] * self.longest for _ in range(self._comm.size // tp)]
        for key, rank, column in norms:
            if not key.cut:
                counted[rank][column] = float(rank % tp == 0)
                common[rank // tp][column] = key.place
        order = torch.tensor(
            [rank * self.longest + column for _, rank, column in norms], dtype=torch.int64, device=device
        )
        cells, counts = [key.cell for key, *_ in norms], torch.tensor(counted, dtype=torch.float64, device=device)
        return NormTable(order, cells, counts, torch.tensor(common, dtype=torch.int64, device=device))


def find_uneven(norms: Tensor, common: Tensor) -> Tensor:
    """Return the last parameter with unlike norms on a stage's tp ranks, or NONE; norms not finite are ignored.

    norms   [stages, tp, longest]
    common  [stages, longest], see `NormTable`
    """
    low, high = norms.aminmax(dim=1)
    return common.where(high - low > APART * high, NONE).amax()


def _norm_by_cell(norms: Tensor, cells: Sequence[int], count: int) -> Tensor:
    """Return [count], the norm in each cell, of what has these norms [k] in these cells, ascending."""
    if not cells:
        return norms.new_zeros(count)
    if count == 1:
        norm: Tensor = torch.linalg.vector_norm(norms)
        return norm.view(1)
    sizes = Counter(cells)
    by_cell = torch.split(norms, [sizes[cell] for cell in range(count)])
    return torch.stack([torch.linalg.vector_norm(norms) for norms in by_cell])


def _overwrite(unit: Unit, masters: Tensor) -> None:
    """Give a gathered unit other values, and use them up; (N-1)/N Psi elements over the dp axis above stage 0."""
    if unit.weights.records is not None:
        unit.weights.records.records.discard()
    unit.weights.masters.write(0, masters)
    unit.weights.refresh().wait()
    if unit.weights.sharded:
        unit.weights.share().wait()
