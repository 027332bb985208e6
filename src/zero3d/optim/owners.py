"""Which rank makes which matrix orthogonal, and what is sent for it (Muon). Pure integers, no torch.

    shards of a unit    |   rank 0    |   rank 1    |   rank 2    |   rank 3    |
    its matrices           |  q  |  k  |  v  |    o   |   gate   |    up    |  down  |
    owners                    1     2     3      2         0          1         3

The pieces of a matrix travel to its owner, who has all of it for a moment, and come back; states stay where they are.
Owners are balanced by operations: the costliest matrix first, each to the rank that has least so far, the lowest of
equals. All ranks find the same by this rule. An owner takes its matrices in rounds, those of one shape together; while
one round is computed the next one travels.

At stage 0 every rank has whole matrices: an owner computes, and its results are gathered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from heapq import heapreplace
from itertools import zip_longest
from math import prod
from operator import add
from typing import NamedTuple

from zero3d.account.traffic import Moved, Sent
from zero3d.blueprint.layout import UnitLayout
from zero3d.optim.matrices import STEPS, Form, made_besides, operations

ROUND = 1 << 22  # elements that an owner takes at once, or one matrix
WIRE = 2  # bytes of an element that travels: bf16, to which Newton-Schulz rounds its input anyhow


class Matrix(NamedTuple):
    """One matrix of a unit: what this rank's tp slice has of it.

    unit, slot  their numbers
    start       of it in the unit's storage, where it is [A, B] one row after the other
    shape       [A, B] of it here
    cut         whether tp cuts it
    cost        operations of the whole
    besides     elements that making the whole orthogonal takes beside it
    """

    unit: int
    slot: int
    start: int
    shape: tuple[int, int]
    cut: bool
    cost: int
    besides: int

    @property
    def numel(self) -> int:
        """Return its elements."""
        return prod(self.shape)

    def within(self, start: int, stop: int) -> tuple[int, int]:
        """Return which of its elements are in a range of the unit's storage; an empty range where none is."""
        low = min(max(start - self.start, 0), self.numel)
        return low, max(low, min(stop - self.start, self.numel))


def matrices_of(
    unit: int, layout: UnitLayout, forms: Mapping[int, Form], degrees: Mapping[int, int], steps: int = STEPS
) -> Iterator[Matrix]:
    """Yield the matrices of a unit, in the order of their storage.

    forms    how parameters are seen, by the number of the slot
    degrees  by the same, over how many tp ranks a parameter is cut, where it is
    """
    for number, form in forms.items():
        slot, degree = layout.slots[number], degrees.get(number, 1)
        shape = form.shape_of(slot.shape)
        # Which side is cut changes no count by much, and all tp ranks must find the same.
        parts = form.parts(slot.shape)
        cost = degree * sum(operations(*part, steps) for part in parts)
        besides = degree * (sum(made_besides(*part) for part in parts) + (len(parts) > 1) * prod(shape))
        for index in range(form.matrices(slot.shape)):
            run, inside = divmod(index * prod(shape), slot.run)
            yield Matrix(unit, number, slot.start + run * slot.stride + inside, shape, degree > 1, cost, besides)


def share_out(costs: Sequence[int], n: int) -> list[int]:
    """Return the owner of each matrix.

    >>> share_out([3, 9, 4, 4], 2)
    [1, 0, 1, 1]
    """
    loads = [(0, rank) for rank in range(n)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, rank = loads[0]
        owners[index] = rank
        heapreplace(loads, (load + costs[index], rank))
    return owners


class Owners:
    """Knows who owns which matrices of the units that one axis cuts, and what every round moves.

    matrices  of these units, in model order
    layouts   of the units, by number
    n         ranks of the axis
    whole     every rank has whole matrices (stage 0)
    """

    def __init__(self, matrices: Sequence[Matrix], layouts: Mapping[int, UnitLayout], n: int, whole: bool) -> None:
        self.matrices = matrices
        self.n = n
        self.whole = whole
        self._shards = {unit: layout.shard for unit, layout in layouts.items()}
        self.owners = share_out([matrix.cost for matrix in matrices], n)
        of_rank: list[list[int]] = [[] for _ in range(n)]
        order = sorted(range(len(matrices)), key=lambda index: (matrices[index].shape, matrices[index].cut, index))
        for index in order:
            of_rank[self.owners[index]].append(index)
        turns = zip_longest(*(self._turns(own) for own in of_rank), fillvalue=())
        self.rounds: list[Sequence[Sequence[int]]] = list(turns)  # of every round, by rank

    def _turns(self, own: Sequence[int]) -> list[list[int]]:
        turns: list[list[int]] = []
        for index in own:
            matrix = self.matrices[index]
            last = self.matrices[turns[-1][0]] if turns else matrix
            full = not turns or (len(turns[-1]) + 1) * matrix.numel > ROUND
            if full or (last.shape, last.cut) != (matrix.shape, matrix.cut):
                turns.append([])
            turns[-1].append(index)
        return turns

    def part(self, index: int, rank: int) -> tuple[int, int]:
        """Return which elements of a matrix a rank has and updates: its shard's, at stage 0 all."""
        matrix = self.matrices[index]
        if self.whole:
            return 0, matrix.numel
        shard = self._shards[matrix.unit]
        return matrix.within(rank * shard, (rank + 1) * shard)

    def sends(self, turn: Sequence[Sequence[int]], rank: int) -> list[int]:
        """Return how many elements a rank sends to every owner of a round, itself included."""
        return [sum(stop - start for start, stop in (self.part(i, rank) for i in own)) for own in turn]

    def receives(self, turn: Sequence[Sequence[int]], rank: int) -> list[int]:
        """Return how many elements an owner gets in a round from every rank, itself included."""
        parts = [[self.part(index, source) for index in turn[rank]] for source in range(self.n)]
        return [sum(stop - start for start, stop in of_source) for of_source in parts]

    def widest(self, turn: Sequence[Sequence[int]]) -> int:
        """Return the elements of the owner that has most in a round: at stage 0 all send as many."""
        return max(sum(self.matrices[index].numel for index in own) for own in turn)

    def moved(self, rank: int) -> tuple[int, int]:
        """Return the calls of a step over this axis, and the elements that a rank sends in them."""
        if self.n == 1:
            return 0, 0
        if self.whole:
            return len(self.rounds), sum((self.n - 1) * self.widest(turn) for turn in self.rounds)
        elements = 0
        for turn in self.rounds:
            sends, receives = self.sends(turn, rank), self.receives(turn, rank)
            elements += sum(sends) - sends[rank] + sum(receives) - receives[rank]  # there, and back as owner
        return 2 * len(self.rounds), elements

    def over_tp(self, turn: Sequence[Sequence[int]], rank: int, tp: int) -> list[list[int]]:
        """Return which of a rank's matrices of a round each tp rank makes orthogonal: places in `turn[rank]`.

        Those that tp does not cut are everybody's own: none.
        """
        own = turn[rank]
        if not own or not self.matrices[own[0]].cut:
            return [[] for _ in range(tp)]
        owners = share_out([self.matrices[index].cost for index in own], tp)
        return [[place for place, owner in enumerate(owners) if owner == each] for each in range(tp)]

    def moved_over_tp(self, rank: int, tp_rank: int, tp: int) -> tuple[int, int]:
        """Return the calls of a step over tp, and the elements that a tp rank sends in them."""
        calls = elements = 0
        for turn in self.rounds:
            shared = self.over_tp(turn, rank, tp)
            sizes = [sum(self.matrices[turn[rank][place]].numel for place in places) for places in shared]
            calls += 2 * any(sizes)
            elements += sum(sizes) - sizes[tp_rank] + (tp - 1) * sizes[tp_rank]  # slices there, results back
        return calls, elements

    def traffic(self, axis: str, rank: int, tp_rank: int, tp: int, unit: str = "-") -> list[Sent]:
        """Return what a step sends, on the axis that cuts the units and over tp; unit: named in the rows."""
        sent = (
            (axis, "all_gather" if self.whole else "pass_rows", *self.moved(rank)),
            ("tp", "pass_rows", *self.moved_over_tp(rank, tp_rank, tp)),
        )
        return [Sent(on, op, unit, Moved(calls, number, WIRE * number)) for on, op, calls, number in sent if calls]

    def held(self, rank: int) -> int:
        """Return the most elements that travel or are together on a rank at once: of a round and its neighbours."""
        return max(self._held(rank), default=0)

    def working(self, rank: int, batches: bool, tp: int = 1, tp_rank: int = 0) -> int:
        """Return the most elements on a rank at once of those and of what is computed of a round.

        batches  matrices of one shape are computed at once
        """
        computing = [self._computing(turn, rank, batches, tp, tp_rank) for turn in self.rounds]
        return max(map(add, self._held(rank), computing), default=0)

    def _computing(self, turn: Sequence[Sequence[int]], rank: int, batches: bool, tp: int, tp_rank: int) -> int:
        """Return the most elements that a rank makes of a round at once beside what has come.

        Slices that tp ranks have are sent, received, joined and cut again.
        """
        own = [self.matrices[index] for index in turn[rank]]
        if not own or not own[0].cut:
            return _besides(own, batches)
        mine = [own[place] for place in self.over_tp(turn, rank, tp)[tp_rank]]
        slices, whole = sum(each.numel for each in own), tp * sum(each.numel for each in mine)
        return slices + max(2 * whole + _besides(mine, batches, tp), 4 * whole)

    def _held(self, rank: int) -> list[int]:
        """Return the elements that travel or are together on a rank at once while each round is computed."""
        buffers, values = [], []
        for turn in self.rounds:
            own = sum(self.matrices[index].numel for index in turn[rank])
            alone = self.whole or self.n == 1
            received = self.n * self.widest(turn) if self.whole else own
            buffers.append(received if alone else received + sum(self.sends(turn, rank)))
            values.append(0 if alone or len(turn[rank]) < 2 else own)
        return [sum(buffers[max(i - 1, 0) : i + 2]) + values[i] for i in range(len(buffers))]

    def costs(self) -> list[int]:
        """Return the operations of every rank."""
        costs = [0] * self.n
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            costs[owner] += matrix.cost
        return costs


def _besides(matrices: Sequence[Matrix], batches: bool, tp: int = 1) -> int:
    """Return the elements that it takes to make matrices of one shape orthogonal: of all at once, or of one.

    Several at once are put together first.
    """
    if not batches:
        return max((matrix.besides for matrix in matrices), default=0)
    return sum(matrix.besides + (len(matrices) > 1) * tp * matrix.numel for matrix in matrices)
