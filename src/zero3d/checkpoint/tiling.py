"""Checking that boxes are all of a tensor exactly once.

`TilingSums` answers yes or no for the boxes of all states as they pass by, one number for each state, and keeps none of
them: there are some for every tensor and rank. `tiling_fault` says where the fault is, from all boxes of one state.

In one dimension element i stands for x^i modulo a prime, and a box [a, b) for the sum of its elements, which is
(x^b - x^a) / (x - 1); in several dimensions, each with an x of its own, a box stands for the product. Boxes add up to
the whole tensor if they are all of it once. If they are not, the difference is a polynomial that is not zero, of a
degree below the tensor's sizes, and a random x is one of its few roots with a chance of less than sizes / 2^89: for a
tensor of 10^12 elements 2^-49. The x are drawn anew each time, so that no file can be made to fit them.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from itertools import pairwise
from random import SystemRandom

from zero3d.shards.boxes import Box, Shape, whole

_PRIME = (1 << 89) - 1


class TilingSums:
    """Owns a number for each state of which boxes were added: whether they are all of its tensor exactly once."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._sums: dict[Hashable, int] = {}
        self._power = lru_cache(1 << 14)(lambda dim, i: pow(self._bases[dim], i, _PRIME))

    def add(self, state: Hashable, box: Box) -> None:
        """Count a box of one state."""
        self._sums[state] = (self._sums.get(state, 0) + self._value(box)) % _PRIME

    def whole(self, state: Hashable, shape: Shape) -> bool:
        """Say whether the boxes of a state are all of its tensor exactly once."""
        return self._sums.get(state, 0) == self._value(whole(shape))

    def _value(self, box: Box) -> int:
        value = 1
        for dim, (start, stop) in enumerate(box):
            if dim == len(self._bases):
                self._bases.append(SystemRandom().randrange(2, _PRIME))
            value = value * (self._power(dim, stop) - self._power(dim, start)) % _PRIME
        return value


def tiling_fault(shape: Shape, boxes: Sequence[Box]) -> str | None:
    """Return how boxes fail to be all of a tensor exactly once: "nothing at (0, 3:5)", "2 boxes at (1, 0:4)", or None.

    The first dimension is cut at all edges of boxes; each slab of it is a tensor of one dimension less. Every box
    is looked at once for each slab that it reaches through.
    """
    if not shape:
        return None if len(boxes) == 1 else f"{len(boxes) or 'nothing'}{' boxes' if boxes else ''} at ()"
    edges = sorted({0, shape[0], *(edge for box in boxes for edge in box[0])})
    index = {edge: i for i, edge in enumerate(edges)}
    slabs: list[list[Box]] = [[] for _ in edges[1:]]
    for box in boxes:
        for slab in slabs[index[box[0][0]] : index[box[0][1]]]:
            slab.append(box[1:])
    for (start, stop), slab in zip(pairwise(edges), slabs, strict=True):
        fault = tiling_fault(shape[1:], slab)
        if fault is not None:
            count, _, inner = fault.partition(" at (")
            outer = f"{start}" if stop == start + 1 else f"{start}:{stop}"
            return f"{count} at ({outer}{', ' if inner != ')' else ''}{inner}"
    return None
