"""Degrees of the axes, and where each rank stands. Pure integers.

    rank = (pp * DP + dp) * TP + tp              tp innermost: its messages are the most frequent

    8 ranks = pp 2 x dp 2 x tp 2
            dp 0    dp 1
    pp 0    0-1     2-3
    pp 1    4-5     6-7

A column is a model-parallel group: its ranks hold one copy of the model together and train on the same part of the
batch, 1/DP of it. A row holds the same layers; a cell holds the same parameters of them, split over tp.

Other axes fold dp, each for itself: dp = degree x complement. Such an axis is neighbours on dp, and its complement the
ranks that have the same place among their neighbours. For experts, the ep neighbours share a layer's experts out, and
the ranks of edp (expert data parallel) hold the same ones.

    dp 4 = ep 2 x edp 2
            ep 0    ep 1
    edp 0   dp 0    dp 1
    edp 1   dp 2    dp 3

For long sequences, the sp neighbours are handed the same micro-batch and have a part of each sequence; so dp is
sp x rows, and a batch is micro_batch x accumulate x rows.

For hosts with slow links between them, states are cut over the shard neighbours alone, and repeated over replicate
(HSDP, MiCS): dp is shard x replicate, and shard is all of dp where it is left out. Neighbours of other axes lie inside:
ep divides shard, and its experts are cut over eshard = shard / ep; of sp and shard one divides the other.

    dp 8 = shard 4 x replicate 2                  with ep 2: eshard 2
            shard 0-3
    replicate 0   dp 0 1 2 3                      experts of place 0: dp 0 2 and, again, 4 6
    replicate 1   dp 4 5 6 7                                place 1: dp 1 3 and, again, 5 7

A further one is a row of FOLDS, a degree here, a keyword of Mesh and a key of the section mesh. What opens groups,
counts messages, shrinks, simulates, saves or resumes a run reads the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm, prod
from typing import Any, NamedTuple

from zero3d.errors import MeshError
from zero3d.spec.zero import NODE


class Fold(NamedTuple):
    """Describes an axis that folds dp.

    name        of its degree, in Degrees, as a keyword of Mesh and as a key of the section mesh
    complement  the axis of the ranks with the same place among their neighbours; dp itself where the degree is 1
    what        its name in messages
    cuts        whether it cuts parameters; a checkpoint joins their parts
    bits        why another degree changes the bits of a run that is not exact
    usual       the degree where it is left out: 1, or None, which is all of dp
    exact       whether runs in exact mode have the same bits at every degree
    """

    name: str
    complement: str
    what: str
    cuts: bool
    bits: str
    usual: int | None = 1
    exact: bool = True


AXES = ("pp", "dp", "tp")  # whose degrees make the world
FOLDS = (
    Fold("ep", "edp", "axis of experts", cuts=True, bits="experts' gradients are summed in other groups"),
    Fold(
        "sp",
        "rows",
        "axis of sequences",
        cuts=False,
        bits="gradients are summed over other parts of sequences",
        exact=False,
    ),
    Fold("shard", "replicate", "axis of shards", cuts=False, bits="gradients are summed in other groups", usual=None),
)
COMPLEMENTS = {fold.complement: fold.name for fold in FOLDS}
ROWS = "rows"  # the complement over which micro-batches travel, in a replay alone
EXPERT_SHARD = "eshard"  # the axis of a shard group's ranks that have the same experts
DATA = ("dp", *COMPLEMENTS, "shard", EXPERT_SHARD)  # axes over which states of units are cut, or repeated
FEW_NUMBERS = ("world", "replica")  # axes that carry nothing else
SLOT = "ZERO3D_SLOT"  # set by our launcher: the number of a rank's device, where it is not LOCAL_RANK


class Place(NamedTuple):
    """A rank's coordinates."""

    pp: int
    dp: int
    tp: int


class Degrees(NamedTuple):
    """Degrees of the axes; the product of AXES is the world, and each of FOLDS divides dp.

    shard  None where states are cut over all of dp
    """

    pp: int
    dp: int
    tp: int
    ep: int = 1
    sp: int = 1
    shard: int | None = None

    @classmethod
    def resolve(
        cls,
        world: int,
        dp: int | None = None,
        tp: int | None = None,
        pp: int | None = None,
        ep: int | None = None,
        sp: int | None = None,
        shard: int | None = None,
    ) -> Degrees:
        """Complete the degrees of a world.

        left out      is
        ------------  ----------------------------------------------------------------------------
        dp            world / (pp x tp), of which those left out are 1
        pp and tp     1
        pp, or tp     world / (the two given), where that is whole
        one of FOLDS  1, and shard all of dp

        Raises MeshError with the arithmetic.
        """
        given, folds = {"pp": pp, "dp": dp, "tp": tp}, {"ep": ep, "sp": sp, "shard": shard}
        for name, degree in {**given, **folds}.items():
            if degree is not None and (isinstance(degree, bool) or not isinstance(degree, int) or degree < 1):
                raise MeshError(f"{name}={degree!r} is not a degree: pass a whole number from 1.")
        missing = [name for name, degree in given.items() if degree is None]
        computed = "dp" if dp is None else missing[0] if len(missing) == 1 else None
        known = {name: degree or 1 for name, degree in given.items()}
        if computed is not None:
            known[computed] = max(1, world // prod(known.values()))
        degrees = cls(**known)
        if degrees.world != world:
            raise MeshError(_does_not_multiply(world, {name: n for name, n in given.items() if n is not None}))
        for name, degree in folds.items():
            if degree is not None and degrees.dp % degree:
                raise MeshError(_does_not_fold(degrees.dp, name, degree))
        usual = {fold.name: fold.usual for fold in FOLDS}
        folded: dict[str, Any] = {name: usual[name] if n is None else n for name, n in folds.items()}
        resolved = degrees._replace(**folded)
        if resolved.shard == resolved.dp:
            resolved = resolved._replace(shard=None)
        resolved._check_nesting()
        return resolved

    def _check_nesting(self) -> None:
        """Raise MeshError where groups of neighbours on dp do not lie inside each other."""
        shard = self.size("shard")
        if shard % self.ep:
            raise MeshError(
                f"shard={shard} cuts states inside of groups that share experts out, and ep={self.ep}: {shard} / "
                f"{self.ep} = {shard / self.ep:.4g} is not whole; pass a shard that ep divides, or leave it out."
            )
        if shard % self.sp and self.sp % shard:
            raise MeshError(
                f"shard={shard} and sp={self.sp} are neighbours on the data-parallel axis, and neither divides the "
                "other: pass a shard that sp divides, or that divides sp."
            )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.pp * self.dp * self.tp

    @property
    def edp(self) -> int:
        """Return how many ranks hold the same experts."""
        return self.size("edp")

    @property
    def rows(self) -> int:
        """Return how many ranks of dp have other sequences: those of an sp group are handed the same ones."""
        return self.size("rows")

    @property
    def replicate(self) -> int:
        """Return how many groups of ranks have all states of a data-parallel axis, each for itself."""
        return self.size("replicate")

    @property
    def cuts_model(self) -> bool:
        """Return whether an axis other than dp cuts parameters, so that the ranks of a dp axis have no whole model."""
        return self.pp * self.tp > 1 or any(fold.cuts and self.size(fold.name) > 1 for fold in FOLDS)

    def size(self, axis: str) -> int:
        """Return the number of ranks on an axis."""
        if axis == EXPERT_SHARD:
            return self.size("shard") // self.ep
        degree: int | None = getattr(self, COMPLEMENTS.get(axis, axis))
        degree = self.dp if degree is None else degree
        return self.dp // degree if axis in COMPLEMENTS else degree

    def group(self, axis: str) -> str:
        """Return the axis whose groups this axis uses: another one's if both have the same ranks, else its own.

        A complement of a degree of 1 is dp, and so are shards of all of dp; a rank's experts are cut over edp where
        shards are, and over shard where all ranks have all experts.
        """
        if axis == EXPERT_SHARD:
            return self.group("edp" if self.shard is None else "shard") if self.shard is None or self.ep == 1 else axis
        if axis == "shard":
            return "dp" if self.shard is None else axis
        return "dp" if axis in COMPLEMENTS and self.size(COMPLEMENTS[axis]) == 1 else axis

    def process_groups(self, per_axis: int = 2, node: int = 1, replay: bool = False) -> dict[str, int]:
        """Return the axes of several ranks that an engine opens, in its order, and the process groups of each.

        Those over which states are cut have `per_axis`: gathers of weights and reductions of gradients, which overlap
        where there are two. On every other axis one operation follows the other.

        node    ranks that keep a second shard together, as an axis "node"
        replay  whether micro-batches travel between rows, to be computed twice
        """
        everyone = "dp" if self.dp == self.world else "world"
        together = "pp" if self.tp == 1 else "tp" if self.pp == 1 else "replica"
        folds = [name for fold in FOLDS for name in (fold.name, fold.complement) if name != ROWS or replay]
        opened = ("pp", "tp", "dp", everyone, together, *folds, EXPERT_SHARD)
        names = [self.group(name) for name in opened] + ["node"] * (node > 1)
        cut = {self.group(name) for name in ("shard", EXPERT_SHARD)}
        sizes = {"world": self.world, "replica": self.pp * self.tp, "node": node}
        return {
            name: per_axis if name in cut else 1
            for name in dict.fromkeys(names)
            if (sizes[name] if name in sizes else self.size(name)) > 1
        }

    def place(self, rank: int) -> Place:
        """Return a rank's coordinates."""
        return Place(rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp)

    def rank(self, place: Place) -> int:
        """Return the rank at these coordinates."""
        return (place.pp * self.dp + place.dp) * self.tp + place.tp

    def along(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that differ from `rank` on this axis only, itself included, in the axis' order."""
        here = self.place(rank)
        if axis == EXPERT_SHARD:
            return self.along("shard", rank)[here.dp % self.ep :: self.ep]
        for fold in FOLDS:
            degree = self.size(fold.name)
            if axis == fold.name:
                return self.neighbours(rank, degree)
            if axis == fold.complement:
                return [self.rank(here._replace(dp=dp)) for dp in range(here.dp % degree, self.dp, degree)]
        return [self.rank(here._replace(**{axis: position})) for position in range(self.size(axis))]

    def neighbours(self, rank: int, count: int) -> list[int]:
        """Return the `count` neighbours on dp that `rank` is one of, in their order."""
        here = self.place(rank)
        first = here.dp - here.dp % count
        return [self.rank(here._replace(dp=dp)) for dp in range(first, first + count)]

    def model_parallel(self, rank: int) -> list[int]:
        """Return the ranks that hold one copy of the model together with `rank`, in their order."""
        here = self.place(rank)
        return [self.rank(Place(pp, here.dp, tp)) for pp in range(self.pp) for tp in range(self.tp)]

    def on_host(self, axis: str, dp_ranks: int | None) -> int | None:
        """Return the most ranks of an axis that cuts states, or repeats them, on a host of so many ranks of dp."""
        if dp_ranks is None or axis == "dp":
            return dp_ranks
        if axis == EXPERT_SHARD:
            inside = self.on_host("shard", dp_ranks)
            return None if inside is None else max(1, inside // self.ep)
        if axis in COMPLEMENTS:
            return max(1, dp_ranks // self.size(COMPLEMENTS[axis]))
        size = self.size(axis)
        return size if dp_ranks % size == 0 else min(size - 1, dp_ranks)

    def dp_on_host(self, ranks: int | None) -> int | None:
        """Return the most ranks that a dp axis of several hosts has on one of them, all if none is on several.

        ranks  of the largest host; None where nobody knows: then None
        """
        if ranks is None:
            return None
        together = self.dp == 1 or ranks >= self.world or ranks % (self.dp * self.tp) == 0
        return self.dp if together else min(self.dp - 1, -(-ranks // self.tp))

    def second_shard(self, asked: int | str | None, per_host: int | None) -> int:
        """Return how many neighbours on dp keep a second shard together: 1, none, where all that have shards would.

        asked     a number, "node" for the ranks of a host, or None
        per_host  ranks of the largest host; None where nobody knows

        Raises MeshError with the arithmetic.
        """
        axis, size = self.group("shard"), self.size("shard")
        if asked is None or size == 1:
            return 1
        ranks = self._dp_of_host(per_host) if asked == NODE else int(asked)
        if ranks >= size:
            return 1
        if size % ranks:
            quotient = f"{size} / {ranks} = {size / ranks:.4g}"
            raise MeshError(
                f"second_shard={asked} cuts {axis}={size} into groups of {ranks}: {quotient} is not whole. Pass a "
                f"number of ranks that divides {axis}, or None."
            )
        return ranks

    def _dp_of_host(self, per_host: int | None) -> int:
        """Return how many neighbours on dp each host has. Raises MeshError where hosts differ, or nobody knows."""
        if per_host is None:
            raise MeshError(
                "second_shard='node' means the ranks of a host, and no launcher says how many there are: pass a number."
            )
        if per_host >= self.world or per_host % (self.dp * self.tp) == 0:
            return self.dp
        if per_host % self.tp or self.dp * self.tp % per_host:
            raise MeshError(
                f"second_shard='node': hosts of {per_host} ranks do not have equally many whole neighbours on "
                f"dp={self.dp} (tp={self.tp}): pass a number of ranks, or None."
            )
        return per_host // self.tp

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
        folds = [
            f"{fold.name} {self.size(fold.name)} x {fold.complement} {self.size(fold.complement)}"
            for fold in FOLDS
            if getattr(self, fold.name) != fold.usual
        ]
        return f"{text} ({', '.join(folds)})" if folds else text


def least_dp(asked: Mapping[str, int | None]) -> int:
    """Return the smallest dp that every folding degree divides; any other such dp is a multiple of it."""
    return lcm(*(asked[fold.name] or 1 for fold in FOLDS))


def least_ranks(asked: Mapping[str, int | None]) -> int:
    """Return how many ranks these degrees need: with the smallest dp, where that is left out."""
    return (asked["dp"] or least_dp(asked)) * (asked["tp"] or 1) * (asked["pp"] or 1)


def _does_not_fold(dp: int, name: str, degree: int) -> str:
    """Return why a degree does not fold dp, and what does."""
    fits = [str(divisor) for divisor in range(2, dp + 1) if dp % divisor == 0]
    remedy = f"pass {name}={' or '.join(fits)}" if fits else f"leave {name} out, or start more ranks"
    quotient = f"{dp} / {degree} = {dp / degree:.4g}"
    return f"{name}={degree} folds the data-parallel axis, and dp={dp}: {quotient} is not whole; {remedy}."


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
