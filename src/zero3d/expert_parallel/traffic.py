"""What an ep rank sends, by formula: the counts of rows for every expert, rows, results, and the gradients of both.

How many rows there are only the router knows: `Passed` counts them, and every one of them costs its width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zero3d.account.traffic import Moved

COUNT = 8  # bytes


class Passed(NamedTuple):
    """Counts what a layer has sent to other ranks: rows for their experts and results of their rows, there and back.

    calls     of the layer's forward, those of recomputation included
    rows      in them
    returns   of gradients, for rows and for results
    returned  rows of these
    """

    calls: int = 0
    rows: int = 0
    returns: int = 0
    returned: int = 0

    def plus(self, other: Passed, sign: int = 1) -> Passed:
        """Return the sum, or with sign -1 the difference."""
        return Passed(*(a + sign * b for a, b in zip(self, other, strict=True)))

    def times(self, count: int) -> Passed:
        """Return what so many alike ones sum up to."""
        return Passed(*(figure * count for figure in self))


class Busiest(NamedTuple):
    """The layer whose tokens are the least even. ratio: of its busiest expert's to the mean's."""

    layer: str
    tokens: int
    mean: float

    @property
    def ratio(self) -> float:
        return self.tokens / self.mean

    @classmethod
    def of(cls, load: Mapping[str, Sequence[int]]) -> Busiest | None:
        """Find it in the tokens of each expert, by layer; None where no token went to any."""
        layers = [cls(name, max(counts), sum(counts) / len(counts)) for name, counts in load.items() if sum(counts)]
        return max(layers, key=lambda layer: layer.ratio, default=None)


def even_rows(rows: int, experts: int) -> list[int]:
    """Deal rows out to experts, as a dry run does, which has no router: as many to each as to any other."""
    whole, rest = divmod(rows, experts)
    return [whole + (expert < rest) for expert in range(experts)]


def expert_traffic(passed: Passed, hidden: int, width: int, experts: int, ep: int) -> dict[str, Moved]:
    """Return by operation what a layer has sent; `width`: bytes of an element of a row [hidden]."""
    elements = (passed.rows + passed.returned) * hidden
    counts = passed.calls * experts * (ep - 1)
    return {
        "pass_rows": Moved(2 * passed.calls + passed.returns, elements, elements * width),
        "exchange": Moved(passed.calls, counts, counts * COUNT),
    }
