"""Slots, shards, pieces and boxes: exact covers, independent of the number of ranks."""

import random

import pytest
import torch

from zero3d.shards.boxes import box_shape, boxes, intersect
from zero3d.zero.layout import ALIGN, UnitLayout

SHAPES = [("a", (3, 5), 0), ("b", (1,), 1), ("c", (), 0), ("d", (997,), 0), ("e", (70, 300), 1), ("f", (0, 4), 0)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 64, 96])
def test_pieces_cover_every_parameter_once(n):
    layout = UnitLayout(SHAPES, n)
    assert layout.total == n * layout.shard
    assert layout.shard % 16 == 0
    covered = {slot.name: [] for slot in layout.slots}
    for rank in range(n):
        for piece in layout.pieces(rank):
            slot = layout.slots[piece.slot]
            covered[slot.name] += range(piece.start, piece.stop)
            assert rank * layout.shard + piece.offset == slot.start + piece.start
    assert all(covered[slot.name] == list(range(slot.numel)) for slot in layout.slots)


def test_slots_are_packed_by_group_aligned_and_independent_of_n_up_to_64():
    layouts = [UnitLayout(SHAPES, n) for n in (1, 2, 4, 8, 16, 32, 64)]
    assert len({layout.slots for layout in layouts}) == 1
    assert len({layout.total for layout in layouts}) == 1
    groups = [slot.group for slot in layouts[0].slots]
    assert groups == sorted(groups)
    assert all(slot.start % ALIGN == 0 for slot in layouts[0].slots)
    assert layouts[0].padding == layouts[0].total - layouts[0].numel


def test_boxes_of_random_ranges_are_tight_contiguous_covers():
    rng = random.Random(0)
    for _ in range(300):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        flat = torch.arange(int(torch.Size(shape).numel())).view(shape)
        start, stop = sorted(rng.randint(0, flat.numel()) for _ in range(2))
        found = [flat[tuple(slice(a, b) for a, b in box)] for box in boxes(shape, start, stop)]
        assert [int(v) for part in found for v in part.flatten()] == list(range(start, stop))
        assert len(found) <= max(1, 2 * len(shape) - 1)
        assert all(
            box_shape(box) == tuple(part.shape) for box, part in zip(boxes(shape, start, stop), found, strict=True)
        )


def test_intersections():
    assert intersect(((0, 4), (2, 6)), ((3, 9), (0, 3))) == ((3, 4), (2, 3))
    assert intersect(((0, 4),), ((4, 9),)) is None
    assert intersect((), ()) == ()
