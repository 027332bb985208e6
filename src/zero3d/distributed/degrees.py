"""Degrees of the axes, and where each rank stands. Pure integers.

    rank = (pp * DP + dp) * TP + tp              tp innermost: its messages are the most frequent

    8 ranks = pp 2 x dp 2 x tp 2
            dp 0    dp 1
    pp 0    0-1     2-3
    pp 1    4-5     6-7

A column is a model-parallel group: its ranks hold one copy of the model together and train on the same part of the
batch, 1/DP of it. A row holds the same layers; a cell holds the same parameters of them, split over tp.

Experts fold the dp axis: dp = ep x edp. The ep axis is `ep` neighbours on dp, which share a layer's experts out; the
edp axis (expert data parallel) is those that hold the same experts.

    dp 4 = ep 2 x edp 2
            ep 0    ep 1
    edp 0   dp 0    dp 1
    edp 1   dp 2    dp 3
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from zero3d.errors import MeshError

AXES = ("pp", "dp", "tp")
SLOT = "ZERO3D_SLOT"  # set by our launcher: the number of a rank's device, where it is not LOCAL_RANK


class Place(NamedTuple):
    """A rank's coordinates."""

    pp: int
    dp: int
    tp: int


class Degrees(NamedTuple):
    """Sizes of the axes; the product of the first three is the world, and ep divides dp."""

    pp: int
    dp: int
    tp: int
    ep: int = 1

    @classmethod
    def resolve(
        cls, world: int, dp: int | None = None, tp: int | None = None, pp: int | None = None, ep: int | None = None
    ) -> Degrees:
        """Complete the degrees of a world.

        left out      is
        ------------  ----------------------------------------------------------------------------
        dp            world / (pp x tp), of which those left out are 1
        pp and tp     1
        pp, or tp     world / (the two given), where that is whole
        ep            1

        Raises MeshError with the arithmetic.
        """
        given = {"pp": pp, "dp": dp, "tp": tp}
        for name, degree in {**given, "ep": ep}.items():
            if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
                raise MeshError(f"{name}={degree!r} is no degree: pass a whole number from 1.")
        missing = [name for name, degree in given.items() if degree is None]
        computed = "dp" if dp is None else missing[0] if len(missing) == 1 else None
        known = {name: degree or 1 for name, degree in given.items()}
        if computed is not None:
            known[computed] = max(1, world // prod(known.values()))
        degrees = cls(**known)
        if degrees.world != world:
            raise MeshError(_does_not_multiply(world, {name: n for name, n in given.items() if n is not None}))
        if ep is not None and degrees.dp % ep:
            raise MeshError(_does_not_fold(degrees.dp, ep))
        return degrees._replace(ep=ep or 1)

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def edp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.dp // self.ep

    def place(self, rank: int) -> Place:
        """Return a rank's coordinates."""
        return Place(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def rank(self, place: Place) -> int:
        """Return the rank at these coordinates."""
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` on this axis only, itself included, in the axis' order."""
        here = self.place(rank)
        if axis == "ep":
            positions, axis = range(here.dp - here.dp % self.ep, here.dp - here.dp % self.ep + self.ep), "dp"
        elif axis == "edp":
            positions, axis = range(here.dp % self.ep, self.dp, self.ep), "dp"
        else:
            positions = range(self[AXES.index(axis)])
        return [self.rank(here._replace(**{axis: position})) for position in positions]

    def model_parallel(self, rank: int) -> list[int]:
        """Return the ranks that hold one copy of the model together with `rank`, in their order."""
        here = self.place(rank)
        return [self.rank(Place(pp, here.dp, tp)) for pp in range(self.pp) for tp in range(self.tp)]

    def dp_on_host(self, ranks: int | None) -> int | None:
        """Return the most ranks that a dp axis of several hosts has on one of them, all if none is on several.

        ranks  of the largest host; None where nobody knows: then None
        """
        if ranks is None:
            return None
        together = self.dp == 1 or ranks >= self.world or ranks % (self.dp * self.tp) == 0
        return self.dp if together else min(self.dp - 1, -(-ranks // self.tp))

    def table(self) -> str:
        """Return the rank map as text, as in this module's head."""
        cells = [[f"pp {p}"] + [self._cell(p, d) for d in range(self.dp)] for p in range(self.pp)]
        rows = [["", *(f"dp {d}" for d in range(self.dp))], *cells]
        widths = [max(len(row[i]) for row in rows) for i in range(self.dp + 1)]
        lines = ["    ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join([f"{self.world} ranks = {self}", *(line.rstrip() for line in lines)])

    def _cell(self, pp: int, dp: int) -> str:
        first = self.rank(Place(pp, dp, 0))
        return str(first) if self.tp == 1 else f"{first}-{first + self.tp - 1}"

    def __str__(self) -> str:
        text = f"pp {self.pp} x dp {self.dp} x tp {self.tp}"
        return text if self.ep == 1 else f"{text} (ep {self.ep} x edp {self.edp})"


def _does_not_fold(dp: int, ep: int) -> str:
    """Return why ep does not fold dp, and what does."""
    fits = [str(degree) for degree in range(2, dp + 1) if dp % degree == 0]
    remedy = f"pass ep={' or '.join(fits)}" if fits else "leave ep out, or start more ranks"
    return f"ep={ep} folds the data-parallel axis, and dp={dp}: {dp} / {ep} = {dp / ep:.4g} is not whole; {remedy}."


def _does_not_multiply(world: int, given: Mapping[str, int]) -> str:
    """Return why degrees and ranks do not multiply, in terms of what was given, and of dp."""
    product, group = prod(given.values()), prod(degree for name, degree in given.items() if name != "dp")
    ranks = "1 rank" if world == 1 else f"{world} ranks"
    failure = f"{ranks} cannot form {' x '.join(f'{name}={degree}' for name, degree in given.items())}"
    division = f"{world} / {group} = {world / group:g}" if group > 1 else f"{world}"
    if "dp" not in given:
        return (
            f"{failure}: dp would be {division}, no whole number. Start a multiple of {product} ranks, or pass degrees "
            f"that divide {world}."
        )
    if world % group:
        return f"{failure} (= {product} ranks), nor with another dp, {division}: start {product} ranks."
    return f"{failure} (= {product} ranks): leave dp out and it is {division}, or start {product} ranks."
