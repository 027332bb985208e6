"""Checking that boxes are all of a tensor exactly once."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from zero3d.shards.boxes import Box, Shape


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
