"""Cuts of the tp axis: local slices of logical tensors, there and back, as tensors and as boxes."""

import random
from itertools import pairwise

import pytest
import torch

from zero3d.errors import ConfigError
from zero3d.shards.boxes import box_shape, boxes, slices, whole
from zero3d.shards.cuts import Cut, cover


def random_cuts(seed, count=200):
    """(logical tensor of different numbers, the cut of every rank)"""
    rng = random.Random(seed)
    for _ in range(count):
        size, blocks, dims = rng.choice((1, 2, 4)), rng.randint(1, 3), rng.randint(1, 3)
        dim = rng.randrange(dims)
        shape = [rng.randint(1, 4) for _ in range(dims)]
        segments = tuple(rng.randint(1, 3) for _ in range(blocks)) if rng.random() < 0.5 else ()
        shape[dim] *= size * (sum(segments) or blocks)
        logical = torch.arange(torch.Size(shape).numel()).view(shape)
        yield rng, logical, [Cut(dim, size, rank, blocks, segments=segments) for rank in range(size)]


def test_what_all_ranks_take_joins_to_the_logical_tensor():
    for _, logical, cuts in random_cuts(0):
        taken = [cut.extract(logical) for cut in cuts]
        shapes = {cut.local_shape(tuple(logical.shape)) for cut in cuts}
        assert {tuple(local.shape) for local in taken} == shapes
        assert all(local.is_contiguous() for local in taken)
        assert {cut.logical_shape(shape) for cut in cuts for shape in shapes} == {tuple(logical.shape)}
        assert torch.equal(cuts[-1].join(taken), logical)


def test_a_rank_takes_its_chunk_of_every_block():
    gate, up = torch.arange(8), torch.arange(100, 108)
    assert Cut(0, 4, 1, blocks=2).extract(torch.cat([gate, up])).tolist() == [2, 3, 102, 103]
    assert Cut(1, 2, 1).extract(torch.arange(8).view(2, 4)).tolist() == [[2, 3], [6, 7]]


def test_a_rank_takes_its_chunk_of_every_segment_of_unlike_lengths():
    queries, keys, values = torch.arange(2), torch.arange(10, 12), torch.arange(100, 104)
    cut = Cut(0, 2, 1, blocks=3, segments=(1, 1, 2))
    assert cut.extract(torch.cat([queries, keys, values])).tolist() == [1, 11, 102, 103]
    assert cut.even_blocks == 4
    assert Cut(0, 2, 1, blocks=3, segments=(2, 4, 2)).even_blocks == 4


def test_what_is_taken_shares_no_memory_with_the_logical_tensor_and_no_graph():
    weight = torch.nn.Parameter(torch.zeros(4, 2))
    taken = Cut(0, 2, 0).extract(weight)
    taken.fill_(1.0)
    assert float(weight.detach().sum()) == 0
    assert not taken.requires_grad


def test_boxes_of_a_local_box_hold_what_was_taken_once_and_in_order():
    for rng, logical, cuts in random_cuts(1):
        for cut in cuts:
            local = cut.extract(logical)
            shape = tuple(local.shape)
            limits = [sorted(rng.randint(0, size) for _ in range(2)) for size in shape]
            for box in (
                whole(shape),
                tuple((a, max(b, min(a + 1, s))) for (a, b), s in zip(limits, shape, strict=True)),
            ):
                if 0 in box_shape(box):
                    continue
                parts = cut.boxes(box, shape)
                assert 1 <= len(parts) <= cut.blocks
                for there, here in parts:
                    assert torch.equal(logical[slices(there)], local[slices(here)])
                pieces = [local[slices(here)] for _, here in parts]
                assert torch.equal(torch.cat(pieces, cut.dim), local[slices(box)])
                starts = [here[cut.dim][0] for _, here in parts]
                assert all(a < b for a, b in pairwise(starts))


def test_flat_ranges_of_all_ranks_cover_the_logical_tensor_exactly():
    for rng, logical, cuts in random_cuts(2):
        found = torch.zeros_like(logical)
        for cut in cuts:
            local = cut.extract(logical)
            ends = [0, *sorted(rng.randint(0, local.numel()) for _ in range(2)), local.numel()]
            for start, stop in pairwise(ends):
                values = local.reshape(-1)[start:stop]
                seen = 0
                for box, part in cover(tuple(local.shape), start, values, cut):
                    assert torch.equal(part, logical[slices(box)])
                    found[slices(box)] += 1
                    seen += part.numel()
                assert seen == stop - start
        assert bool((found == 1).all())


def test_views_of_a_cover_write_into_the_range():
    values = torch.zeros(8)
    for box, part in cover((2, 4), 0, values, Cut(1, 2, 1, blocks=2)):
        part.copy_(torch.arange(16.0).view(2, 8)[slices(box)])
    assert values.tolist() == [2, 3, 6, 7, 10, 11, 14, 15]


def test_without_a_cut_a_cover_is_the_boxes_of_the_range():
    found = list(cover((3, 4), 2, torch.arange(2, 9)))
    assert [box for box, _ in found] == boxes((3, 4), 2, 9)
    assert [part.flatten().tolist() for _, part in found] == [[2, 3], [4, 5, 6, 7], [8]]
    ((box, part),) = cover((), 0, torch.tensor([5.0]))
    assert (box, part.shape, float(part)) == ((), (), 5.0)


@pytest.mark.parametrize(
    ("cut", "shape", "said"),
    [
        (Cut(0, 8, 0, 3), (12, 5), "12 is not divisible by blocks 3 x tp 8 = 24 .*: pass tp=4, or"),
        (Cut(1, 4, 0), (3, 6), "6 is not divisible by tp 4 .dimension 1 of a tensor of shape .3, 6..: pass tp=3, or"),
        (Cut(0, 2, 0, 3), (16,), "16 is not divisible by blocks 3 .*: give this parameter a style with fewer blocks"),
        (
            Cut(0, 8, 0, 3, segments=(8, 4, 4)),
            (16, 2),
            "tp 8 does not divide each of 8, 4, 4, the segments of .*: pass tp=4",
        ),
        (Cut(1, 2, 0), (16,), "dimension 1 of it should be cut over tp 2: give this parameter another style"),
    ],
)
def test_a_dimension_that_cannot_be_cut_is_refused_with_the_arithmetic(cut, shape, said):
    with pytest.raises(ConfigError, match=said):
        cut.local_shape(shape)
    with pytest.raises(ConfigError, match=said):
        cut.extract(torch.zeros(shape))
