"""Which groups a rank makes, what they are like, and that each one's first operation is of all its ranks."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pipelines import build, engine_of
from torch.distributed import HashStore, distributed_c10d as c10d
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.distributed import axis as axis_module, groups
from zero3d.distributed.axis import Axis, forget_note
from zero3d.distributed.groups import GroupOptions, backend_options, options_of, warm_up
from zero3d.distributed.mesh import usual_communicators
from zero3d.engine.foundation import Axes
from zero3d.tools.plan.calibrate import Sizes, calibrate

MANY = 4096
NAMES = ("pp", "tp", "dp", "world", "replica")  # in the order in which an engine opens them


@contextmanager
def world_of(size, rank=0):
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def made(monkeypatch):
    """The ranks of every group that is made."""
    new_group, found = dist.new_group, []

    def record(ranks, **options):
        found.append(list(ranks))
        return new_group(ranks, **options)

    monkeypatch.setattr(dist, "new_group", record)
    return found


@pytest.mark.parametrize("rank", [0, 1777, MANY - 1])
def test_a_rank_of_4096_makes_groups_for_its_own_axes_and_two_where_states_are_cut(made, rank):
    with world_of(MANY, rank):
        mesh = zero3d.Mesh(pp=8, dp=64, tp=8)
        for name in NAMES:
            mesh.axis(name)
    assert [len(ranks) for ranks in made] == [8, 8, 64, 64, 64]  # of the default group's ranks there is no other
    assert all(rank in ranks for ranks in made)


@pytest.mark.parametrize("per_axis", [1, 2])
@pytest.mark.parametrize(("degrees", "node", "replay"), [
    ({"dp": 8}, None, False), ({"dp": 8}, 2, False), ({"tp": 8}, None, False), ({"pp": 2, "tp": 4}, None, False),
    ({"pp": 2, "dp": 2, "tp": 2}, None, True), ({"dp": 8, "shard": 4}, 2, False), ({"dp": 8, "sp": 2}, None, False),
    ({"dp": 8, "sp": 2}, None, True), ({"dp": 8, "ep": 2, "shard": 4}, None, False),
    ({"dp": 4, "tp": 2, "ep": 2, "sp": 2}, None, True),
])  # fmt: skip
def test_an_engine_opens_the_groups_that_are_counted_by_degrees(degrees, node, replay, per_axis):
    with world_of(8, rank=3):
        mesh = zero3d.Mesh(**degrees, device="cpu")
        mesh.communicators = per_axis
        Axes.of(mesh, "auto", node, replay=replay)
        opened = {axis.name: {axis.gathers, axis.reductions} for axis in mesh._axes[per_axis].values() if axis.size > 1}
    found = {name: len(groups) for name, groups in opened.items()}
    assert found == mesh.degrees.process_groups(per_axis, node or 1, replay)
    several = {name for name in ("shard", "eshard") if mesh.degrees.size(name) > 1}
    assert {name for name, count in found.items() if count == 2} == {
        mesh.degrees.group(name) for name in several if per_axis == 2
    }


def test_with_one_communicator_a_rank_makes_one_group_for_each_of_its_axes(made):
    with world_of(8):
        mesh = zero3d.Mesh(pp=2, dp=2, tp=2)
        mesh.communicators = 1
        axes = [mesh.axis(name) for name in NAMES]
    assert len(made) == 4
    assert all(axis.reductions is axis.gathers for axis in axes)


def calls_of(work):
    """How many functions a call of `work` calls, in Python and in C."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_what_opening_an_axis_costs_is_a_matter_of_its_own_ranks(made):
    """The same axes in a world of 8 times the ranks: the same calls."""
    counted = []
    for dp in (64, 64, 512):  # the first time imports
        with world_of(8 * dp):
            mesh = zero3d.Mesh(pp=4, dp=dp, tp=2)
            counted.append([calls_of(lambda name=name, mesh=mesh: mesh.axis(name)) for name in ("pp", "tp", "replica")])
    assert counted[2] == counted[1]
    assert min(counted[1]) > 20


@pytest.mark.parametrize(("axis", "options"), [
    ("dp", GroupOptions(high_priority=True)), ("pp", GroupOptions()), ("tp", GroupOptions()),
    ("shard", GroupOptions(high_priority=True)), ("edp", GroupOptions(high_priority=True)),
    ("node", GroupOptions(high_priority=True)), ("ep", GroupOptions()), ("sp", GroupOptions()),
    ("world", GroupOptions(channels=1)), ("replica", GroupOptions(channels=1)),
])  # fmt: skip
def test_groups_are_like_what_they_carry(axis, options):
    assert options_of(axis) == options


@pytest.mark.parametrize(("device", "hip", "queues", "wanted"), [
    ("cuda", None, None, 2), ("cuda", None, "8", 2), ("cuda", None, "1", 1), ("cuda", "6.4", None, 1),
    ("xpu", None, "1", 1), ("cpu", "6.4", "1", 2),
])  # fmt: skip
def test_an_axis_has_one_group_where_two_might_wait_for_each_other(monkeypatch, device, hip, queues, wanted):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    if queues is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
    assert usual_communicators(torch.device(device)) == wanted


class NcclOptions:
    """What torch has in builds with NCCL."""

    def __init__(self, is_high_priority_stream):
        self.is_high_priority_stream = is_high_priority_stream
        self.config = SimpleNamespace(min_ctas=None, max_ctas=None)


def test_nccl_takes_the_options_and_other_backends_have_none(monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=NcclOptions), raising=False)
    lanes, few = (backend_options("nccl", options_of(axis), timedelta(minutes=3)) for axis in ("dp", "world"))
    assert (lanes.is_high_priority_stream, lanes.config.max_ctas) == (True, None)
    assert (few.is_high_priority_stream, few.config.min_ctas, few.config.max_ctas) == (False, 1, 1)
    assert lanes._timeout == few._timeout == timedelta(minutes=3)
    assert backend_options("gloo", options_of("dp"), timedelta(minutes=3)) is None


@pytest.fixture
def recorded(monkeypatch):
    """A mesh takes its fake groups for such that must be warmed: (operation, ranks of its group) of all that they do."""
    monkeypatch.setattr(Axis, "backend", property(lambda axis: "none" if axis.gathers is None else "stand-in"))
    done = []

    def note(owner, name, group_of):
        original = getattr(owner, name)

        def call(*arguments, **options):
            done.append((name, group_of(*arguments, **options)))
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    note(dist, "all_reduce", lambda tensor, group, **_: group)
    note(dist, "batch_isend_irecv", lambda calls: calls[0].group)
    note(dist, "new_group", lambda *_, **__: None)
    return done


def test_both_groups_of_an_axis_carry_a_number_of_all_ranks_as_soon_as_they_are_made(recorded):
    with world_of(12, rank=5):
        mesh = zero3d.Mesh(pp=3, dp=2, tp=2)
        for name in NAMES:
            axis, begun = mesh.axis(name), len(recorded)
            wanted = [("new_group", None)] * {"world": 0, "dp": 2}.get(name, 1)
            wanted += [("all_reduce", group) for group in dict.fromkeys((axis.gathers, axis.reductions))]
            assert recorded[-len(wanted) :] == wanted
            assert mesh.axis(name) is axis
            assert len(recorded) == begun  # once


def test_the_group_that_a_later_engine_adds_to_an_axis_carries_a_number_of_all_ranks_too(recorded):
    with world_of(12, rank=5):
        mesh = zero3d.Mesh(pp=3, dp=2, tp=2)
        mesh.communicators = 1
        for name in NAMES:
            mesh.axis(name)
        mesh.communicators = 2
        for name in NAMES:
            begun = len(recorded)
            axis = mesh.axis(name)
            wanted = [("new_group", None), ("all_reduce", axis.gathers), ("all_reduce", axis.reductions)]
            assert recorded[begun:] == (wanted if name == "dp" else [])


def test_engines_with_other_numbers_of_groups_share_the_one_group_of_other_axes(made):
    with world_of(8):
        mesh = zero3d.Mesh(pp=2, dp=2, tp=2)
        mesh.communicators = 1
        before = [mesh.axis(name) for name in NAMES]
        mesh.communicators = 2
        after = [mesh.axis(name) for name in NAMES]
    assert len(made) == 5  # one of dp was added
    assert [axis.reductions is axis.gathers for axis in after] == [name != "dp" for name in NAMES]
    assert [axis.gathers for axis in after] == [axis.gathers for axis in before]


def test_a_monitor_hears_of_axes_of_engines_with_any_number_of_groups(monkeypatch):
    told = []
    with world_of(4):
        mesh = zero3d.Mesh(dp=2, tp=2)
        monkeypatch.setattr(mesh.heartbeat, "tell", lambda axes, **_: told.append(axes))
        for number, name in ((1, "dp"), (2, "tp"), (1, "world")):
            mesh.communicators = number
            mesh.axis(name)
    assert told == [{"dp": [0, 2]}, {"dp": [0, 2], "tp": [0, 1]}, {"dp": [0, 2], "tp": [0, 1], "world": [0, 1, 2, 3]}]


def test_neighbours_of_engines_with_other_numbers_of_groups_are_as_many_as_each_asks_for():
    with world_of(8):
        mesh = zero3d.Mesh()
        sizes = []
        for number, ranks in ((1, 2), (2, 4), (1, 2), (2, 2), (1, 4)):
            mesh.communicators = number
            sizes.append(mesh.node(ranks).size)
    assert sizes == [2, 4, 2, 2, 4]


def test_no_group_is_made_or_used_first_after_an_engine_is_built(recorded, monkeypatch):
    """The last stage of three is the neighbour of the first in nothing but the tie: their group must know all three."""
    monkeypatch.setattr("zero3d.distributed.collectives.Comm.read", lambda self, values, assumed: assumed)
    monkeypatch.setattr(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1))
    with world_of(6):
        engine = engine_of(build("qwen3", 6), zero3d.Mesh(pp=3, dp=2), stage=1, accumulate=3)
        assert engine.model_group.traded
        warm, before = [group for name, group in recorded if name == "all_reduce"], len(recorded)
        ids = torch.zeros(1, 5, dtype=torch.int64)
        engine.train_batch([{"input_ids": ids, "targets": ids}] * 3)
        engine.mesh.axis("pp"), engine.mesh.everyone, engine.mesh.model_parallel
    after = recorded[before:]
    assert "new_group" not in {name for name, _ in after}
    sent = [group for name, group in after if name == "batch_isend_irecv"]
    assert sent
    assert all(any(group is one for one in warm) for group in sent)


def test_a_read_waits_as_long_for_a_peer_of_another_axis_and_alone_for_ever():
    with world_of(4):
        mesh = zero3d.Mesh(tp=4)
        patiences = {mesh.axis(name).patience for name in NAMES}
    assert patiences == {0.9 * groups.timeout(mesh.device).total_seconds()}
    with world_of(1):
        assert {zero3d.Mesh().axis(name).patience for name in NAMES} == {math.inf}


@pytest.mark.parametrize(("backend", "ids"), [("nccl", [3]), ("gloo", None)])
def test_a_barrier_is_on_the_device_of_its_rank(monkeypatch, backend, ids):
    seen, axis = [], Axis("dp", 1, 2, gathers="gathers", device=torch.device("cuda:3"))
    monkeypatch.setattr(axis_module, "backends_of", lambda group: {"cuda": backend})
    monkeypatch.setattr(dist, "barrier", lambda **options: seen.append(options))
    forget_note(axis)
    assert seen == [{"group": "gathers", "device_ids": ids}] * 2


def test_calibration_uses_no_group_that_was_not_warmed(recorded, monkeypatch, tmp_path):
    for name in ("barrier", "broadcast"):
        monkeypatch.setattr(
            dist, name, lambda *_, group=None, name=name, **__: recorded.append((name, group or dist.group.WORLD))
        )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with world_of(2):
        monkeypatch.setattr("zero3d.distributed.mesh.backends_of", lambda: {"cpu": "stand-in"})
        calibrate(zero3d.Mesh(dp=2), tmp_path, Sizes(side=256, copied=1 << 20, disk=1 << 20, messages=(64, 128)))
    warm = [group for name, group in recorded if name == "all_reduce"]
    used = [group for name, group in recorded if name in ("barrier", "broadcast")]
    assert len(used) == 2 * 6 + 1
    assert all(any(group is one for one in warm) for group in used)


def test_a_dry_run_warms_nothing(monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", None)
    with world_of(8):
        axis = zero3d.Mesh(dp=4, pp=2).data
        warm_up(axis)
    warm_up(Axis("dp", 0, 1))


def test_a_default_group_that_is_bound_to_a_device_is_not_split(monkeypatch):
    """torch would take all ranks of the world to make a group of a few."""
    bound, seen = torch.device("cuda:0"), []
    with world_of(8):
        world = SimpleNamespace(bound_device_id=bound)
        group = dist.group.WORLD
        monkeypatch.setattr(groups, "timeout", lambda device: timedelta(seconds=5))
        monkeypatch.setattr(groups, "backends_of", lambda: {"cpu": "fake"})
        monkeypatch.setattr(groups, "dist", SimpleNamespace(
            group=SimpleNamespace(WORLD=world),
            get_backend=lambda: "fake",
            new_group=lambda ranks, **options: seen.append((ranks, world.bound_device_id, options)) or group,
        ))  # fmt: skip
        assert groups.new_group("tp", range(2), torch.device("cpu"), everyone=False) is group
    options = {"timeout": timedelta(seconds=5), "pg_options": None, "use_local_synchronization": True}
    assert seen == [([0, 1], None, options)]
    assert world.bound_device_id == bound


def test_a_group_of_the_caller_s_that_cannot_carry_the_device_s_tensors_is_refused(monkeypatch):
    with world_of(2):
        monkeypatch.setattr(groups, "backends_of", lambda: {"cuda": "nccl"})
        said = (
            r"computes on cpu, .* carries tensors of cuda \(by nccl\): pass device='cuda' .*with 'gloo', or not at all"
        )
        with pytest.raises(zero3d.MeshError, match=said):
            zero3d.Mesh(device="cpu")


@pytest.fixture
def alone_on_gloo():
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    yield
    dist.destroy_process_group()


def torchs_name():
    return c10d._process_group_name([0], use_hashed_name=True)


def test_groups_are_named_by_axis_ranks_and_number_and_take_none_of_torch_s_own_names(alone_on_gloo):
    """torch counts the groups of everyone in their names, and ranks on which it counted otherwise would not meet."""
    device, counted = torch.device("cpu"), c10d._world.group_count
    names = [
        groups.new_group(axis, [0], device, everyone).group_name
        for axis, everyone in (("dp", True), ("dp", False), ("tp", False))
    ]
    assert [name.rpartition("/")[2] for name in names] == ["1", "2", "1"]
    assert len({name.rpartition("/")[0] for name in names}) == 2
    assert all(name.startswith(f"zero3d/groups/{axis}/") for name, axis in zip(names, ("dp", "dp", "tp"), strict=True))
    assert c10d._world.group_count == counted
    dist.destroy_process_group(c10d._resolve_process_group(names[1]))
    assert groups.new_group("dp", [0], device, everyone=False).group_name.endswith("/3"), "addresses of a group stay"


def test_a_group_is_named_in_the_thread_that_makes_it_and_torch_names_those_of_others(alone_on_gloo):
    before = c10d._process_group_name
    first, second = groups._named("dp", [0]), groups._named("tp", [0])
    with ThreadPoolExecutor(1) as beside, ThreadPoolExecutor(1) as caller:
        first.__enter__()
        beside.submit(second.__enter__).result()
        names = torchs_name(), beside.submit(torchs_name).result(), caller.submit(torchs_name).result()
        first.__exit__(None, None, None)
        later = torchs_name(), beside.submit(torchs_name).result()
        beside.submit(second.__exit__, None, None, None).result()
        last = beside.submit(torchs_name).result()
    c10d._process_group_name = before  # the first one's stays, and passes on
    assert [name.split("/")[:3] for name in names[:2]] == [["zero3d", "groups", axis] for axis in ("dp", "tp")]
    assert later[1] == names[1]
    assert not any(name.startswith("zero3d") for name in (names[2], later[0], last))


def test_torch_names_groups_again_after_one_could_not_be_made(alone_on_gloo):
    before = c10d._process_group_name
    with pytest.raises(ValueError, match=r"duplicate|size"):
        groups.new_group("dp", [0, 0], torch.device("cpu"), everyone=False)
    assert c10d._process_group_name is before
