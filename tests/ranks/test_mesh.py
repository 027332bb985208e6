"""Axes of real ranks: who is in which group, and torch's DeviceMesh over the same groups."""

import torch
import torch.distributed as dist

import zero3d


def places_and_sums(pp, dp, tp):
    """This rank's place, the sum of ranks over each axis by both of its groups and by DeviceMesh."""
    mesh = zero3d.Mesh(dp=dp, tp=tp, pp=pp)
    sums = {}
    for name in ("pp", "dp", "tp"):
        axis = mesh.axis(name)
        assert axis.rank == getattr(mesh.place, name)
        groups = [axis.gathers, axis.reductions]
        if axis.size > 1:
            groups.append(mesh.torch.get_group(name))
            assert mesh.torch.get_local_rank(name) == axis.rank
        sums[name] = [summed(mesh.rank, group) for group in groups]
    shape = tuple(mesh.torch.shape) if mesh.world > 1 else ()
    return tuple(mesh.place), sums, shape


def summed(rank, group):
    value = torch.tensor([float(rank)])
    if group is not None:
        dist.all_reduce(value, group=group)
    return int(value)


def test_every_axis_reaches_its_own_ranks(ranks):
    found = ranks(4, places_and_sums, 2, 2, 1)
    assert [place for place, _, _ in found] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert [sums["pp"] for _, sums, _ in found] == [[2] * 3, [4] * 3, [2] * 3, [4] * 3]
    assert [sums["dp"] for _, sums, _ in found] == [[1] * 3, [1] * 3, [5] * 3, [5] * 3]
    assert [sums["tp"] for _, sums, _ in found] == [[rank] * 2 for rank in range(4)], "of degree 1: no group"
    assert found[0][2] == (2, 2)


def test_one_axis_of_all_ranks_uses_the_default_group(ranks):
    for place, sums, shape in ranks(4, places_and_sums, 4, 1, 1):
        assert sums["pp"] == [6] * 3
        assert place[1:] == (0, 0)
        assert shape == (4,)
