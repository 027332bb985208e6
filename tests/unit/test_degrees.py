"""Ranks on three axes and those that fold dp: the arithmetic, both worked examples of the mission, refusals, rows."""

import inspect
import re
from types import SimpleNamespace

import pytest

import zero3d
from zero3d.checkpoint.resume_contract import ROWS, USUAL
from zero3d.config import Mesh, Train, degrees_of, load
from zero3d.config.batch import resolve_batch
from zero3d.config.keys import KEYS
from zero3d.distributed.degrees import AXES, FOLDS, Degrees, Place, least_dp
from zero3d.errors import MeshError
from zero3d.spec.bits import ALWAYS, PLAIN
from zero3d.train.setup.build import used_axes


def test_64_ranks_as_8_pipeline_stages_of_8_tensor_ranks_are_one_replica():
    degrees = Degrees.resolve(64, tp=8, pp=8)
    assert degrees == Degrees(pp=8, dp=1, tp=8)
    assert degrees.along("dp", 37) == [37]
    assert {degrees.place(rank).dp for rank in range(64)} == {0}
    assert resolve_batch(Train(batch=16, micro_batch=2, steps=1), degrees.dp).accumulate == 8


def test_128_ranks_are_two_replicas_of_64_that_share_the_batch():
    degrees = Degrees.resolve(128, tp=8, pp=8)
    assert degrees == Degrees(pp=8, dp=2, tp=8)
    replicas = [[rank for rank in range(128) if degrees.place(rank).dp == dp] for dp in range(2)]
    assert [len(replica) for replica in replicas] == [64, 64]
    assert replicas[0][:10] == [0, 1, 2, 3, 4, 5, 6, 7, 16, 17], "tp innermost, then dp, then pp"
    assert degrees.along("dp", 3) == [3, 11], "who reduces gradients with whom"
    assert degrees.along("pp", 3) == [3, 19, 35, 51, 67, 83, 99, 115]
    assert degrees.along("tp", 19) == [16, 17, 18, 19, 20, 21, 22, 23]
    batch = resolve_batch(Train(batch=16, micro_batch=2, steps=1), degrees.dp)
    assert batch.micro_batch * batch.accumulate == 16 // 2, "each replica trains on half of the batch"


@pytest.mark.parametrize("degrees", [Degrees(2, 3, 4), Degrees(1, 5, 1), Degrees(4, 1, 2)])
def test_ranks_and_places_are_one_to_one(degrees):
    places = [degrees.place(rank) for rank in range(degrees.world)]
    assert [degrees.rank(place) for place in places] == list(range(degrees.world))
    assert places == sorted(
        Place(p, d, t) for p in range(degrees.pp) for d in range(degrees.dp) for t in range(degrees.tp)
    )
    for rank, place in enumerate(places):
        for axis in ("pp", "dp", "tp"):
            others = degrees.along(axis, rank)
            assert others[getattr(place, axis)] == rank
            assert len(others) == getattr(degrees, axis)
            assert all(degrees.along(axis, other) == others for other in others)


@pytest.mark.parametrize(
    ("world", "asked", "found"),
    [
        (8, {}, (1, 8, 1)),
        (8, {"pp": 2}, (2, 4, 1)),
        (8, {"tp": 2}, (1, 4, 2)),
        (8, {"pp": 2, "dp": 2}, (2, 2, 2)),
        (8, {"dp": 2, "tp": 2}, (2, 2, 2)),
        (8, {"dp": 8}, (1, 8, 1)),
    ],
)
def test_a_degree_that_is_left_out_is_computed(world, asked, found):
    assert Degrees.resolve(world, **asked)[:3] == found


@pytest.mark.parametrize(
    ("world", "asked", "message"),
    [
        (6, {"pp": 4}, r"^6 ranks cannot form pp=4: dp would be 6 / 4 = 1.5, no whole number. Start a multiple of 4"),
        (
            4,
            {"pp": 2, "dp": 3},
            r"^4 ranks cannot form pp=2 x dp=3 \(= 6 ranks\): leave dp out and it is 4 / 2 = 2, or start 6 ranks\.$",
        ),
        (8, {"dp": 3, "tp": 2}, r"dp=3 x tp=2 \(= 6 ranks\): leave dp out and it is 8 / 2 = 4, or start 6 ranks"),
        (8, {"pp": 2, "dp": 2, "tp": 1}, r"pp=2 x dp=2 x tp=1 \(= 4 ranks\): leave dp out and it is 8 / 2 = 4"),
        (4, {"pp": 2, "dp": 8}, r"leave dp out and it is 4 / 2 = 2, or start 16 ranks"),
        (4, {"dp": 3}, r"^4 ranks cannot form dp=3 \(= 3 ranks\): leave dp out and it is 4, or start 3 ranks"),
        (6, {"pp": 4, "dp": 2}, r"pp=4 x dp=2 \(= 8 ranks\), nor with another dp, 6 / 4 = 1.5: start 8 ranks\.$"),
        (2, {"pp": 4}, r"^2 ranks cannot form pp=4: dp would be 2 / 4 = 0.5, no whole number. Start a multiple of 4"),
        (4, {"pp": 0}, "pp=0 is not a degree"),
        (4, {"tp": True}, "tp=True is not a degree"),
    ],
)
def test_degrees_that_do_not_multiply_show_the_arithmetic(world, asked, message):
    with pytest.raises(MeshError, match=message):
        Degrees.resolve(world, **asked)


def test_the_rank_map_is_a_table():
    assert Degrees(2, 2, 2).table().splitlines() == [
        "8 ranks = pp 2 x dp 2 x tp 2",
        "        dp 0    dp 1",
        "pp 0    0-1     2-3",
        "pp 1    4-5     6-7",
    ]
    assert Degrees(1, 3, 1).table().splitlines()[-1] == "pp 0    0       1       2"


def test_ep_folds_dp_into_neighbours_that_share_experts_out():
    degrees = Degrees.resolve(16, tp=2, ep=4)
    assert (degrees.dp, degrees.ep, degrees.edp) == (8, 4, 2)
    assert degrees.along("ep", 3) == [1, 3, 5, 7]
    assert degrees.along("edp", 3) == [3, 11]
    assert str(degrees) == "pp 1 x dp 8 x tp 2 (ep 4 x edp 2)"
    for rank in range(16):
        assert rank in set(degrees.along("ep", rank)) & set(degrees.along("edp", rank))


@pytest.mark.parametrize(("ep", "says"), [
    (4, "dp=6: 6 / 4 = 1.5 is not whole; pass ep=2 or 3 or 6"), (7, "pass ep=2 or 3 or 6"), (0, "ep=0 is not a degree"),
])  # fmt: skip
def test_an_ep_that_does_not_fold_dp_is_refused(ep, says):
    with pytest.raises(MeshError, match=re.escape(says)):
        Degrees.resolve(6, ep=ep)


def test_a_complement_that_is_all_of_dp_has_the_groups_of_dp():
    assert Degrees(1, 8, 1, ep=1).group("edp") == "dp"
    assert Degrees(1, 8, 1, ep=1).along("edp", 3) == list(range(8))
    for axis in ("ep", "edp", "dp", "world"):
        assert Degrees(1, 8, 1, ep=8).group(axis) == axis


@pytest.mark.parametrize(("degrees", "cut"), [
    (Degrees(1, 8, 1), False), (Degrees(2, 4, 1), True), (Degrees(1, 4, 2), True), (Degrees(1, 8, 1, ep=2), True),
])  # fmt: skip
def test_a_model_is_cut_over_every_axis_but_dp(degrees, cut):
    assert degrees.cuts_model == cut


def test_shards_fold_dp_into_neighbours_that_have_all_states_together():
    degrees = Degrees.resolve(16, tp=2, ep=2, shard=4)
    assert (degrees.size("shard"), degrees.replicate, degrees.size("eshard")) == (4, 2, 2)
    assert degrees.along("shard", 3) == [1, 3, 5, 7]
    assert degrees.along("replicate", 3) == [3, 11]
    assert degrees.along("eshard", 3) == [3, 7]
    assert degrees.along("edp", 3) == [3, 7, 11, 15], "the same experts: in this group, and again in the other"
    assert str(degrees) == "pp 1 x dp 8 x tp 2 (ep 2 x edp 4, shard 4 x replicate 2)"
    for axis in ("shard", "eshard", "replicate"):
        assert degrees.group(axis) == axis
        assert all(degrees.along(axis, other) == degrees.along(axis, 3) for other in degrees.along(axis, 3))


@pytest.mark.parametrize(("degrees", "groups"), [
    (Degrees(1, 8, 1), ("dp", "replicate", "dp")), (Degrees(1, 8, 1, shard=1), ("shard", "dp", "shard")),
    (Degrees(1, 8, 1, ep=2), ("dp", "replicate", "edp")), (Degrees(1, 8, 1, shard=4), ("shard", "replicate", "shard")),
    (Degrees(1, 8, 1, ep=4, shard=4), ("shard", "replicate", "eshard")),
])  # fmt: skip
def test_levels_that_are_all_of_another_axis_have_its_groups(degrees, groups):
    assert tuple(map(degrees.group, ("shard", "replicate", "eshard"))) == groups
    for axis, group in zip(("shard", "replicate", "eshard"), groups, strict=True):
        assert degrees.size(axis) == degrees.size(group)
        assert degrees.along(axis, 5) == degrees.along(group, 5)


def test_shards_over_all_of_dp_are_those_that_nobody_asked_for():
    assert Degrees.resolve(8, tp=2, shard=4) == Degrees.resolve(8, tp=2) == Degrees(1, 4, 2)
    assert Degrees.resolve(8, shard=1).shard == 1


@pytest.mark.parametrize(("asked", "says"), [
    ({"shard": 3}, "shard=3 folds the data-parallel axis, and dp=8: 8 / 3 = 2.667 is not whole; pass shard=2 or 4"),
    ({"shard": 2, "ep": 4}, "and ep=4: 2 / 4 = 0.5 is not whole; pass a shard that ep divides"),
    ({"dp": 12, "shard": 4, "sp": 6}, "shard=4 and sp=6 are neighbours on the data-parallel axis, and neither divides"),
])  # fmt: skip
def test_shards_that_do_not_nest_are_refused(asked, says):
    with pytest.raises(MeshError, match=re.escape(says)):
        Degrees.resolve(asked.get("dp", 8), **asked)


@pytest.mark.parametrize(("degrees", "on_host", "wanted"), [
    (Degrees(1, 8, 1, shard=4), 4, (4, 1, 4)), (Degrees(1, 8, 1, shard=2), 4, (2, 2, 2)),
    (Degrees(1, 8, 1, ep=2, shard=4), 4, (4, 1, 2)), (Degrees(1, 8, 1, shard=4), 2, (2, 1, 2)),
    (Degrees(1, 8, 1, shard=4), None, (None, None, None)), (Degrees(1, 12, 1, shard=4), 6, (3, 1, 3)),
])  # fmt: skip
def test_of_both_levels_it_is_known_how_many_ranks_share_a_host(degrees, on_host, wanted):
    assert tuple(degrees.on_host(axis, on_host) for axis in ("shard", "replicate", "eshard")) == wanted


def test_dp_is_a_multiple_of_what_folds_it():
    assert least_dp(degrees_of(Mesh(tp=2))) == 1
    assert least_dp(degrees_of(Mesh(tp=2, ep=4))) == 4


@pytest.mark.parametrize("fold", FOLDS, ids=lambda fold: fold.name)
def test_an_axis_that_folds_dp_is_known_wherever_degrees_are(fold):
    degrees = Degrees.resolve(8, **{fold.name: 2})
    assert (degrees.size(fold.name), degrees.size(fold.complement)) == (2, 4)
    assert f"{fold.name} 2 x {fold.complement} 4" in str(degrees)
    assert f"mesh.{fold.name}" in KEYS
    assert fold.name in inspect.signature(zero3d.Mesh).parameters
    assert USUAL[fold.name] == fold.usual, "of a checkpoint that is older than the axis"
    row = ROWS[fold.name]
    assert row.told, "a run names another degree also where no bit changes with it"
    assert row.why.endswith("zero.exact=true would be bitwise") == fold.exact
    assert row.when == (PLAIN if fold.exact else ALWAYS)


def test_axes_have_names_of_their_own_in_groups_and_ledger():
    names = [*AXES, "world", "replica", *(name for fold in FOLDS for name in (fold.name, fold.complement))]
    assert sorted(set(names)) == sorted(names)


def test_options_of_an_axis_that_is_not_there_are_named_and_left_out():
    words = ["mesh.ep=2", "mesh.ep_plan={experts: grouped}", "mesh.sequence_parallel=true", "mesh.schedule=zbv"]
    config = load(None, words)
    mesh = SimpleNamespace(degrees=Degrees(1, 2, 1, ep=2), rank=0)
    with pytest.warns(UserWarning, match="has no effect") as told:
        assert used_axes(config, mesh) == Mesh(**mesh.degrees._asdict(), ep_plan={"experts": "grouped"})
    assert [str(each.message).split(":")[0] for each in told] == [
        "mesh.schedule=zbv has no effect", "mesh.sequence_parallel=True has no effect"
    ]  # fmt: skip
    assert {key.axis for key in KEYS.values()} <= {"", *Degrees._fields}
