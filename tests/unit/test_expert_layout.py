"""Experts one behind the other: whoever has some of them has that part of the whole, whatever ep and dp."""

import pytest
import torch

from zero3d.blueprint.layout import UnitLayout
from zero3d.zero.unit_parts import parameter_views

STACKS = (("gate_up", (48, 32)), ("bias", (48,)), ("scale", ()), ("down", (32, 24)))


def layout(experts, dp, ep):
    return UnitLayout.for_experts([(name, (experts // ep, *shape), 0) for name, shape in STACKS], dp, ep)


def cells(experts, dp, ep):
    """For each cell of the whole grid: which elements of which experts are in it."""
    found = {}
    for rank in range(dp):
        own, first = layout(experts, dp, ep), rank % ep * (experts // ep)
        for piece in own.pieces(rank // ep):
            slot = own.slots[piece.slot]
            for cell, low, high in own.grid_cells(piece.offset, piece.stop - piece.start):
                number = rank % ep * (64 // ep) + rank // ep * (64 // dp) + cell
                at = first * slot.run + piece.start + low
                found.setdefault(number, []).append((slot.name, at, at + high - low))
    return {number: joined(sorted(ranges)) for number, ranges in found.items()}


def joined(ranges):
    """Ranges that follow one another as one."""
    out = []
    for name, start, stop in ranges:
        if out and out[-1][0] == name and out[-1][2] == start:
            start = out.pop()[1]
        out.append((name, start, stop))
    return out


@pytest.mark.parametrize("experts", [4, 8, 64, 128])
def test_cells_hold_the_same_elements_at_any_ep_and_dp(experts):
    whole = cells(experts, 1, 1)
    for dp, ep in ((2, 1), (2, 2), (4, 2), (4, 4), (8, 2), (16, 4)):
        assert cells(experts, dp, ep) == whole, (dp, ep)


@pytest.mark.parametrize(("experts", "dp", "ep"), [(6, 3, 3), (6, 6, 2), (12, 12, 4), (10, 5, 5), (8, 80, 8)])
def test_any_ep_that_divides_experts_has_equal_shards_of_whole_groups(experts, dp, ep):
    own = layout(experts, dp, ep)
    assert own.total == own.n * own.shard
    assert own.shard % 16 == 0
    pieces = [piece for rank in range(own.n) for piece in own.pieces(rank)]
    assert sum(piece.stop - piece.start for piece in pieces) == own.numel
    assert own.padding >= own.tail >= 0


def test_views_are_the_parameters_and_every_expert_follows_itself():
    own = layout(8, 2, 2)
    storage = torch.arange(own.total)
    views = parameter_views(storage, own)
    assert [tuple(view.shape) for view in views] == [(4, *shape) for _, shape in STACKS]
    for piece in own.whole_pieces():
        flat = views[piece.slot].reshape(-1)[piece.start : piece.stop]
        assert torch.equal(flat, storage[piece.offset : piece.offset + len(flat)])
