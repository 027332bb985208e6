"""Axes of real ranks: who is in which group, beside groups of the caller's own, and torch's DeviceMesh over them."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import adamw, net

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


def make_groups(ranks_of_each, local):
    """Make a caller's groups, which those who are in them make alone if `local`; return those this rank is in."""
    members = [ranks for ranks in ranks_of_each if not local or dist.get_rank() in ranks]
    made = [dist.new_group(ranks, use_local_synchronization=local) for ranks in members]
    return [group for ranks, group in zip(members, made, strict=True) if dist.get_rank() in ranks]


def beside_groups_of_the_caller(local, before, between):
    """Sums over the axes of two meshes that live at once, while a caller makes groups and destroys them.

    And how many groups there are when a mesh has been closed, the caller's have been destroyed, and all have been.
    """
    groups = dist.distributed_c10d._world.pg_map
    its_own = make_groups(before, local)
    first = zero3d.Mesh(dp=2, tp=2)
    found = [summed(first.rank, axis.gathers) for axis in (first.axis("dp"), first.axis("tp"), first.everyone)]
    its_own += make_groups(between, local)
    second = zero3d.Mesh(pp=2, tp=2)
    found += [summed(second.rank, second.axis(name).reductions) for name in ("tp", "pp")]
    found += [summed(first.rank, axis.reductions) for axis in (first.axis("dp"), first.axis("tp"))]
    first.close()
    third = zero3d.Mesh(dp=2, tp=2)
    found += [summed(third.rank, third.axis(name).gathers) for name in ("tp", "dp")]
    for group in its_own:
        dist.destroy_process_group(group)
    left = [len(groups)]
    for mesh in (second, third):
        mesh.close()
    left.append(len(groups))
    found.append(summed(dist.get_rank(), dist.group.WORLD))
    dist.destroy_process_group()
    return found, [*left, len(groups)]


ALONE = [[rank] for rank in range(4) for _ in range(rank)]  # each rank another number of groups


@pytest.mark.parametrize(("local", "before", "between"), [
    (False, [[0, 1]], [[1, 2, 3], [0, 1]]),
    (True, [[0, 1], [0, 1], [2, 3]], []),
    (True, [], [[2, 3]]),
    (True, ALONE, [[3], [3]]),
])  # fmt: skip
def test_axes_meet_whatever_groups_the_caller_made_and_all_groups_can_be_destroyed(ranks, local, before, between):
    found = ranks(4, beside_groups_of_the_caller, local, before, between, group_timeout=10)
    tp, across = [1, 1, 5, 5], [2, 4, 2, 4]
    for rank, (sums, left) in enumerate(found):
        own, others = tp[rank], across[rank]
        assert sums == [others, own, 6, own, others, others, own, own, others, 6]
        assert left == [6, 1, 0], "the default group, and those of two meshes: one for each axis, two for dp"


def trained_beside_groups_of_the_caller():
    """The losses of two engines, before each of which some ranks have made groups of their own."""
    losses = []
    for _ in range(2):
        make_groups([[0, 1]], local=False)
        make_groups(ALONE, local=True)
        engine = zero3d.Engine(net(), mesh=zero3d.Mesh(shard=2), stage=3, precision="fp32", optimizer=adamw)
        loss = engine(torch.arange(6)[None]).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        engine.close()
    return losses


def test_engines_train_beside_groups_of_the_caller(ranks):
    found = ranks(4, trained_beside_groups_of_the_caller, group_timeout=10)
    assert found == [[found[0][0]] * 2] * 4
