"""Degrees of the three axes, and where each rank stands. Pure integers.

    rank = (pp * DP + dp) * TP + tp              tp innermost: its messages are the most frequent

    8 ranks = pp 2 x dp 2 x tp 2
            dp 0    dp 1
    pp 0    0-1     2-3
    pp 1    4-5     6-7

A column is a replica of the model: all its ranks train on the same part of the batch, 1/DP of it. A
row holds the same layers; a cell holds the same parameters of them, split over tp.
"""

from __future__ import annotations

from typing import NamedTuple

from zero3d.errors import MeshError

AXES = ("pp", "dp", "tp")


class Place(NamedTuple):
    """A rank's coordinates."""

    pp: int
    dp: int
    tp: int


class Degrees(NamedTuple):
    """Sizes of the axes; their product is the world."""

    pp: int
    dp: int
    tp: int

    @classmethod
    def resolve(cls, world: int, dp: int | None = None, tp: int | None = None, pp: int | None = None) -> Degrees:
        """Complete the degrees of a world: one left out is computed; of two left out dp is, and the other is 1.

        Raises MeshError with the arithmetic.
        """
        given = {"pp": pp, "dp": dp, "tp": tp}
        for name, degree in given.items():
            if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
                raise MeshError(f"{name}={degree!r} is no degree: pass a whole number from 1.")
        missing = [name for name, degree in given.items() if degree is None]
        computed = "dp" if dp is None else missing[0] if len(missing) == 1 else None
        known = {name: degree or 1 for name, degree in given.items() if name != computed}
        product = 1
        for degree in known.values():
            product *= degree
        if computed is not None and world % product == 0:
            known[computed] = world // product
        degrees = cls(**{name: known.get(name, 0) for name in AXES})
        if degrees.world != world:
            raise MeshError(_does_not_multiply(world, degrees, computed))
        return degrees

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    def place(self, rank: int) -> Place:
        """Where a rank stands."""
        return Place(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def rank(self, place: Place) -> int:
        """Who stands there."""
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def along(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from `rank` on this axis only, itself included, in the axis' order."""
        here = self.place(rank)
        size = self[AXES.index(axis)]
        return [self.rank(here._replace(**{axis: position})) for position in range(size)]

    def replica(self, rank: int) -> list[int]:
        """The ranks that train on the same part of the batch as `rank`, in their order."""
        here = self.place(rank)
        return [other for other in range(self.world) if self.place(other).dp == here.dp]

    def table(self) -> str:
        """The rank map, as in this module's head."""
        cells = [[f"pp {p}"] + [self._cell(p, d) for d in range(self.dp)] for p in range(self.pp)]
        rows = [["", *(f"dp {d}" for d in range(self.dp))], *cells]
        widths = [max(len(row[i]) for row in rows) for i in range(self.dp + 1)]
        lines = ["    ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"{self.world} ranks = {self}", *(line.rstrip() for line in lines)])

    def _cell(self, pp: int, dp: int) -> str:
        first = self.rank(Place(pp, dp, 0))
        return str(first) if self.tp == 1 else f"{first}-{first + self.tp - 1}"

    def __str__(self) -> str:
        return f"pp {self.pp} x dp {self.dp} x tp {self.tp}"


def _does_not_multiply(world: int, degrees: Degrees, computed: str | None) -> str:
    others = [(name, degree) for name, degree in zip(AXES, degrees, strict=True) if name != computed]
    asked = " x ".join(f"{name}={degree}" for name, degree in others)
    product = 1
    for _, degree in others:
        product *= degree
    if computed is not None:
        return (
            f"{world} ranks cannot form {asked}: {computed} would be {world} / {product} = {world / product:g}, no "
            f"whole number. Start a multiple of {product} ranks, or pass degrees that divide {world}."
        )
    return (
        f"{world} ranks cannot form {asked} (= {product} ranks): leave dp out and it is computed "
        f"(dp = {world} / (pp x tp)), or start {product} ranks."
    )
