"""Where each parameter lives in its unit. Pure integers, no torch.

    unit storage [total]
    |<- slot 0 ->|..|<---- slot 1 ---->|.|<- slot 2 ->|.......|
    ^ every slot starts at a multiple of 256 elements (..: padding)
    |      shard of rank 0      |      shard of rank 1        |
                                ^ cut at total / N, N shards of one size

Slots are packed by optimizer parameter group, then in model order. Every cut is at a multiple of 16 elements. The
total is a multiple of 16,384: for every N that divides 64 the layout, the vector tails of kernels, norms and
checkpoints are the same. Where N does not divide 1,024 a multiple of 16 N has to do, since one of both would be up to
N x 16,384: at N = 1,000 more than most adapters of a block have.

A shard's part of a slot is a *piece*: a flat range. Where dp ranks have copies of shards, N is the number of ranks that
shards are cut over, and the total is rounded for all of dp: a shard has an equal part for each of its copies, and each
copy's rank saves its part.

Experts of a mixture are parameters [experts, ...], and are laid out expert by expert:

    |<------ expert 0 ------>|..|<------ expert 1 ------>|..|      every expert starts at a multiple of 256
    | gate_up[0] | down[0] |     | gate_up[1] | down[1] |           P elements each, padding (..) included

A rank with some of the experts has that part of the whole unit, so that cells of the grid are the same at every ep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cached_property
from math import gcd, prod
from typing import NamedTuple

ALIGN = 256
CANONICAL = 64
GROUP = 16  # elements: no shard has a part of such a group

Shape = tuple[int, ...]


class Slot(NamedTuple):
    """A parameter's place in its unit: [start, start + numel) elements of the storage.

    runs, stride  of experts: `numel` is so many equal runs, whose starts are `stride` elements apart
    """

    name: str
    shape: Shape
    group: int
    start: int
    numel: int
    runs: int = 1
    stride: int = 0

    @property
    def run(self) -> int:
        """Elements that follow one another."""
        return self.numel // self.runs


class Piece(NamedTuple):
    """The part of a slot inside one shard.

    start, stop  flat range inside the parameter
    offset       of its first element inside the shard
    """

    slot: int
    start: int
    stop: int
    offset: int


class UnitLayout:
    """Slots of one unit and their cut into N equal shards.

    Invariants: slots are disjoint, in order and aligned; total = N * shard; shard % (copies * block) == 0.
    copies number of dp ranks with the same shard
    ep     neighbours on dp that have other experts, of one that is laid out expert by expert
    block  elements that are never divided among shards: 16, or 256 for an optimizer with states of so many together
    tail   elements behind the last slot, which N asks for
    cells  of the grid that the unit covers
    of_experts  whether it is laid out expert by expert
    """

    of_experts = False
    ep = 1

    def __init__(
        self, parameters: Sequence[tuple[str, Shape, int]], dp: int, block: int = GROUP, copies: int = 1
    ) -> None:
        """Pack `parameters`, (name, shape, optimizer group) in model order, for dp data-parallel ranks."""
        self.n, self.copies = dp // copies, copies
        slots: list[Slot] = []
        cursor = 0
        for name, shape, group in sorted(parameters, key=lambda entry: entry[2]):
            numel = prod(shape)
            slots.append(Slot(name, shape, group, cursor, numel))
            cursor += -(-numel // ALIGN) * ALIGN
        quantum = _quantum(dp, block)
        self.slots = tuple(slots)
        self.cells = grid(dp)
        self.total = -(-max(cursor, 1) // quantum) * quantum
        self.tail = self.total - cursor
        self._cut(block)

    @classmethod
    def for_experts(
        cls, parameters: Sequence[tuple[str, Shape, int]], dp: int, ep: int, block: int = GROUP, copies: int = 1
    ) -> UnitLayout:
        """Pack this rank's [experts / ep, ...] of a layer's experts, for the dp / ep ranks that have the same ones."""
        local, slots, cursor = parameters[0][1][0], [], 0
        for name, shape, group in sorted(parameters, key=lambda entry: entry[2]):
            slots.append(Slot(name, shape, group, cursor, prod(shape), local))
            cursor += -(-slots[-1].run // ALIGN) * ALIGN
        quantum = _quantum(dp, block)
        quantum //= gcd(quantum, local * ep)  # of one expert, where all of them together need the other
        quantum *= ALIGN // gcd(quantum, ALIGN)
        stride = -(-max(cursor, 1) // quantum) * quantum
        layout = cls.__new__(cls)
        layout.of_experts = True
        layout.ep, layout.copies = ep, copies
        layout.n, layout.cells = dp // ep // copies, grid(dp) // ep
        layout.slots = tuple(slot._replace(stride=stride) for slot in slots)
        layout.total, layout.tail = local * stride, local * (stride - cursor)
        layout._cut(block)
        return layout

    def _cut(self, block: int) -> None:
        self.shard = self.total // self.n
        assert self.total % (self.n * self.copies * block) == 0

    @cached_property
    def shape(self) -> tuple[int, tuple[tuple[int, ...], ...], int]:
        """Ranks, places of slots and elements: equal in layouts that differ in names alone."""
        return self.n, tuple((slot.start, slot.numel, slot.runs, slot.stride) for slot in self.slots), self.total

    @cached_property
    def numel(self) -> int:
        """Parameters in the unit, padding apart."""
        return sum(slot.numel for slot in self.slots)

    @property
    def padding(self) -> int:
        """Elements of the storage that belong to no parameter."""
        return self.total - self.numel

    @property
    def used_per_shard(self) -> Fraction:
        """Parameters a shard stands for in the formulas: numel / N."""
        return Fraction(self.numel, self.n)

    def pieces(self, rank: int) -> list[Piece]:
        """Return the pieces in a rank's shard, in slot order; empty intersections are left out."""
        return self._pieces_in(rank * self.shard, (rank + 1) * self.shard)

    def pieces_of_copy(self, rank: int, copy: int) -> list[Piece]:
        """Return the pieces in the part of a rank's shard that one of its copies saves; offsets are in the shard."""
        part = self.shard // self.copies
        start = rank * self.shard + copy * part
        return [piece._replace(offset=piece.offset + copy * part) for piece in self._pieces_in(start, start + part)]

    def gaps(self, rank: int) -> list[tuple[int, int]]:
        """Return the ranges of a rank's shard that belong to no parameter."""
        ends = [(piece.offset, piece.offset + piece.stop - piece.start) for piece in self.pieces(rank)]
        starts = [0, *(stop for _, stop in ends)]
        stops = [*(start for start, _ in ends), self.shard]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def rank_of(self, dp_rank: int) -> int:
        """Return the number of a dp rank's shard, among the N ranks that the unit is cut over."""
        return dp_rank // self.ep % self.n

    def whole_pieces(self) -> list[Piece]:
        """Return every parameter as pieces of the storage: one, of experts one each."""
        return self._pieces_in(0, self.total)

    def _pieces_in(self, low: int, high: int) -> list[Piece]:
        pieces = []
        for index, slot in enumerate(self.slots):
            for number in range(slot.runs):
                begin, first = slot.start + number * slot.stride, number * slot.run
                start, stop = max(begin, low), min(begin + slot.run, high)
                if start < stop:
                    pieces.append(Piece(index, first + start - begin, first + stop - begin, start - low))
        return pieces

    def grid_cells(self, start: int, numel: int) -> Iterator[tuple[int, int, int]]:
        """Cut a flat range at the grid of equal cells: yield (cell, first, stop), counted from the range's start."""
        length = self.total // self.cells
        for cell in range(start // length, -(-(start + numel) // length)):
            yield cell, max(cell * length - start, 0), min((cell + 1) * length - start, numel)


def _quantum(n: int, block: int) -> int:
    """Return what the elements of a whole unit are a multiple of, on n ranks."""
    return CANONICAL * ALIGN if CANONICAL * ALIGN % (block * n) == 0 else block * n


def grid(n: int) -> int:
    """Return the number of equal cells of a unit on n ranks: the same for every n that divides it, else one a rank."""
    return CANONICAL if CANONICAL % n == 0 else n


def padding_warning(layouts: Sequence[UnitLayout]) -> str | None:
    """Return a warning if N shards of equal size pad units by more than a tenth; None otherwise, and up to N = 64.

    Up to there no unit has more padding than on one rank.
    """
    n, tail, numel = (
        layouts[0].n * layouts[0].copies,
        sum(unit.tail for unit in layouts),
        sum(unit.numel for unit in layouts),
    )
    if n <= CANONICAL or not numel or 10 * tail <= numel:
        return None
    return (
        f"padding: {tail:,} elements for {numel:,} parameters ({tail / numel:.0%}); dp={n} cuts {len(layouts)} units "
        f"into equal shards of whole groups of {GROUP}, {GROUP * n:,} elements or more each. Memory and traffic grow "
        "by that. Pass units= with fewer, larger modules, or a smaller dp (more tp or pp)."
    )
