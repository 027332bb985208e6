"""Slots, shards, pieces and boxes: exact covers, independent of the number of ranks."""

import random

import pytest
import torch

from zero3d.blueprint.layout import ALIGN, Piece, UnitLayout, grid, padding_warning
from zero3d.shards.boxes import box_shape, boxes, intersect

SHAPES = [("a", (3, 5), 0), ("b", (1,), 1), ("c", (), 0), ("d", (997,), 0), ("e", (70, 300), 1), ("f", (0, 4), 0)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 8, 64, 96, 1000, 1024])
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


@pytest.mark.parametrize(("n", "multiple"), [
    *((1 << i, 16_384) for i in range(11)), (2048, 32_768), (3, 48), (6, 96), (12, 192), (24, 384), (96, 1536), (1000, 16_000),
])  # fmt: skip
@pytest.mark.parametrize("numel", [1, 107_789, 2_048_000])
def test_a_unit_has_the_fewest_elements_of_which_every_shard_has_whole_groups_and_one_total_where_n_is_a_power_of_two(
    n, multiple, numel
):
    layout = UnitLayout([("a", (numel,), 0)], n)
    aligned = -(-numel // ALIGN) * ALIGN
    assert layout.total == -(-aligned // multiple) * multiple
    assert layout.tail == layout.total - aligned < multiple
    assert layout.total % grid(n) == 0
    assert grid(n) % n == 0
    if n <= 1024:
        assert layout.tail < 16_384, "no more than on one rank"


def test_a_copy_saves_its_part_of_a_shard_by_its_place_there():
    layout = UnitLayout([("a", (16_384,), 0)], 4, copies=2)
    assert (layout.n, layout.shard) == (2, 8192)
    assert layout.pieces_of_copy(1, 0) == [Piece(0, 8192, 12_288, 0)]
    assert layout.pieces_of_copy(1, 1) == [Piece(0, 12_288, 16_384, 4096)]


def test_gaps_are_between_parameters_and_behind_the_last_one():
    assert UnitLayout([("a", (300,), 0), ("b", (100,), 0)], 1).gaps(0) == [(300, 512), (612, 16_384)]
    assert UnitLayout([("a", (10,), 0)], 2).gaps(1) == [(0, 8192)]


def test_padding_above_a_tenth_is_told_with_the_arithmetic_and_what_to_type():
    def units(n, numel, count=2):
        return [UnitLayout([("a", (numel,), 0)], n) for _ in range(count)]

    text = padding_warning([*units(4096, 65_536, 3), *units(4096, 32_768, 1)])
    assert text == (
        "padding: 32,768 elements for 229,376 parameters (14%); dp=4096 cuts 4 units into equal shards of whole groups "
        "of 16, 65,536 elements or more each. Memory and traffic grow by that. Pass units= with fewer, larger modules, or "
        "a smaller dp (more tp or pp)."
    )
    assert padding_warning(units(1000, 160)) is not None
    assert padding_warning(units(1000, 145_664)) is None  # filled up with 14,336, a tenth would be 14,566
    assert padding_warning(units(1000, 144_128)) is not None
    assert padding_warning(units(1000, 0)) is None, "no parameters, of which a share could be said"
    assert padding_warning(units(64, 160)) is None, "nothing that another dp would change"
    assert padding_warning(units(1000, 0)) is None, "nothing to compare with"


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
