"""Flat ranges of tensors as n-dimensional boxes: what checkpoints store. Pure integers, no torch.

A piece of a parameter is a flat range; it is covered exactly by at most 2 * ndim - 1 boxes of
the logical tensor, each contiguous. Boxes mean the same whatever the dp degree and stage.
"""

from __future__ import annotations

from math import prod

Shape = tuple[int, ...]
Box = tuple[tuple[int, int], ...]


def boxes(shape: Shape, start: int, stop: int) -> list[Box]:
    """Cover the flat range [start, stop) of a row-major tensor by boxes, each contiguous, in order.

    >>> boxes((3, 4), 2, 9)
    [((0, 1), (2, 4)), ((1, 2), (0, 4)), ((2, 3), (0, 1))]
    """
    if start >= stop:
        return []
    if len(shape) == 0:
        return [()]
    if len(shape) == 1:
        return [((start, stop),)]
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows: [first, last)
    if first > last:  # inside one row
        return _row_boxes(shape, last, start - last * row, stop - last * row)
    out: list[Box] = []
    if start < first * row:
        out += _row_boxes(shape, first - 1, start - (first - 1) * row, row)
    if first < last:
        out.append(((first, last), *((0, size) for size in shape[1:])))
    return out + _row_boxes(shape, last, 0, stop - last * row)


def _row_boxes(shape: Shape, row: int, start: int, stop: int) -> list[Box]:
    return [((row, row + 1), *rest) for rest in boxes(shape[1:], start, stop)]


def box_shape(box: Box) -> Shape:
    """Return the sizes of a box."""
    return tuple(stop - start for start, stop in box)


def intersect(a: Box, b: Box) -> Box | None:
    """Return the common box of two, or None."""
    common = tuple((max(p, r), min(q, s)) for (p, q), (r, s) in zip(a, b, strict=True))
    return None if any(start >= stop for start, stop in common) else common


def slices(box: Box, inside: Box | None = None) -> tuple[slice, ...]:
    """Return the index that takes a box out of its tensor, or out of a tensor that holds the box `inside`."""
    origin = [start for start, _ in inside] if inside is not None else [0] * len(box)
    return tuple(slice(start - o, stop - o) for (start, stop), o in zip(box, origin, strict=True))


def whole(shape: Shape) -> Box:
    """Return the box that is all of a tensor."""
    return tuple((0, size) for size in shape)
