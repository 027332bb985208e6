"""Axes of real ranks: who is in which group, and torch's DeviceMesh over the same groups."""

from unittest import mock

import pytest
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


def met_in_the_store(*meshes):
    """The ranks that this one meets on the axes of several meshes, which begin at the same rank."""
    nccl = mock.patch("zero3d.distributed.mesh.backends_of", return_value={"cpu": "stand-in"})  # not on the host
    with nccl, mock.patch("zero3d.distributed.mesh.A_DAY", 5.0):
        axes = [zero3d.Mesh(**degrees).axis(name) for name, degrees in meshes]
        return [axis.meet(torch.tensor([dist.get_rank()])).flatten().tolist() for axis in axes]


@pytest.mark.parametrize(("name", "degrees", "groups"), [
    ("dp", [{"pp": 1, "dp": 2, "tp": 2}, {"dp": 4}, {"pp": 2, "dp": 2}], ["02 13 02 13", "0123" * 4, "01 01 23 23"]),
    ("replica", [{"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}, {"pp": 2, "tp": 2}],
     ["01 01 23 23", "02 13 02 13", "0123" * 4]),
])  # fmt: skip
def test_axes_of_several_meshes_that_begin_at_one_rank_meet_apart(ranks, name, degrees, groups):
    found = ranks(4, met_in_the_store, *[(name, each) for each in degrees])
    for number, text in enumerate(groups):
        flat = [int(digit) for digit in text.replace(" ", "")]
        size = len(flat) // 4
        assert [met[number] for met in found] == [flat[rank * size :][:size] for rank in range(4)]


def neighbours_of_several_sizes(*sizes):
    """The sums of ranks over groups of so many neighbours, asked for in this order; how many groups there are then.

    And how many a closed mesh leaves.
    """
    groups = dist.distributed_c10d._world.pg_map
    before, mesh = len(groups), zero3d.Mesh(dp=4)
    axes = [mesh.node(size) for size in sizes]
    sums, made = [summed(mesh.rank, axis.gathers) for axis in axes], len(groups) - before
    mesh.close()
    return sums, made, len(groups) - before


def test_groups_of_neighbours_of_several_sizes_live_beside_each_other_and_end_with_their_mesh(ranks):
    first, second = ([1, 6, 1], 2, 0), ([5, 6, 5], 2, 0)
    assert ranks(4, neighbours_of_several_sizes, 2, 4, 2) == [first, first, second, second]
