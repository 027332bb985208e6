"""The hash of states: a sum over elements that no cut changes, and that every bit and place does."""

from itertools import pairwise

import pytest
import torch

from zero3d.checkpoint.fingerprint import _of_box
from zero3d.shards.boxes import box_shape, boxes, slices

SHAPES = [(7,), (4, 6), (3, 4, 5), (2, 1, 3, 2)]


def hashed(seed, whole, cuts):
    """The sum over the boxes of flat ranges."""
    shape = tuple(whole.shape)
    parts = [box for start, stop in pairwise(cuts) for box in boxes(shape, start, stop)]
    return sum(int(_of_box(seed, shape, box, whole[slices(box)].reshape(box_shape(box)))) for box in parts) % (1 << 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_no_cut_changes_it(shape, dtype):
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    n = whole.numel()
    expected = hashed(5, whole, [0, n])
    for cuts in ([0, 1, n], [0, n // 2, n], [0, 2, 3, n - 1, n], list(range(n + 1))):
        assert hashed(5, whole, cuts) == expected
    for dim in range(len(shape)):  # as tp and ep cut
        if shape[dim] > 1:
            low, high = ((0, 1), (1, shape[dim]))
            both = [tuple(edges if d == dim else (0, size) for d, size in enumerate(shape)) for edges in (low, high)]
            assert sum(int(_of_box(5, shape, box, whole[slices(box)])) for box in both) % (1 << 64) == expected


def test_every_bit_and_place_and_name_changes_it():
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    seen = {hashed(5, whole, [0, 24]), hashed(6, whole, [0, 24]), hashed(5, whole.t().contiguous(), [0, 24])}
    for i in range(24):
        for bit in (0, 15, 31):
            other = whole.clone()
            flat = other.view(-1).view(torch.int32)
            flat[i] ^= -(1 << 31) if bit == 31 else 1 << bit
            seen.add(hashed(5, other, [0, 24]))
    swapped = whole.clone()
    swapped[0, 0], swapped[0, 1] = whole[0, 1], whole[0, 0]
    seen.add(hashed(5, swapped, [0, 24]))
    assert len(seen) == 3 + 24 * 3 + 1
