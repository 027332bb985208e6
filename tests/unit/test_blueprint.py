"""What a unit is, worked out by hand: what of it is kept, what comes and goes, and the dtypes in which it travels."""

import pytest
from blueprints import unit_plan
from models import adamw, batch, build, loss_of

import zero3d
from zero3d.blueprint.blueprint import Blueprint, UnitFacts
from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.unit import Kind, decide
from zero3d.distributed.choice import ALL_TO_ALL, FAKE, NATIVE, PAIRWISE
from zero3d.errors import ConfigError
from zero3d.spec.dtypes import BF16, BY_NAME, FP16, FP32, FP64, Dtype
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.sections import Spec
from zero3d.spec.zero import Zero

ON_HOST = Offload(optimizer="host", gradients="host")


@pytest.mark.parametrize(("settings", "local", "travels", "kept", "shard"), [
    # a backward's gradients in bf16: kept beside a shard of their fp32 sum, or in a bucket
    ({"stage": 1}, BF16, BF16, True, True),
    ({"stage": 2}, BF16, BF16, False, True),
    ({"stage": 3}, BF16, BF16, False, True),
    # several are added up in fp32, in whose place the shard is
    ({"stage": 0}, FP32, BF16, True, False),
    ({"stage": 1, "accumulate": 2}, FP32, FP32, True, False),
    ({"stage": 3, "accumulate": 2, "reduce": "every_step"}, FP32, FP32, True, False),
    # a native sum is rounded to fp32 on its way: what comes and goes has that dtype at once
    ({"stage": 3, "algorithm": NATIVE}, FP32, FP32, False, True),
    ({"stage": 1, "algorithm": NATIVE}, BF16, FP32, True, True),
    # messages between two ranks carry what is kept
    ({"stage": 0, "algorithm": PAIRWISE}, FP32, FP32, True, False),
    ({"stage": 3, "algorithm": PAIRWISE}, BF16, BF16, False, True),
    # one rank alone adds up in the shard, unless that is on the host
    ({"stage": 3, "ranks": 1}, FP32, BF16, True, False),
    ({"stage": 3, "ranks": 1, "offload": ON_HOST}, BF16, BF16, False, True),
    ({"stage": 3, "ranks": 1, "offload": ON_HOST, "algorithm": NATIVE}, BF16, FP32, False, True),
    # other precisions
    ({"stage": 3, "precision": "fp32"}, FP32, FP32, False, True),
    ({"stage": 2, "precision": "fp64", "accumulate": 2}, FP64, FP64, False, True),
    ({"stage": 3, "dtype": "fp32"}, FP32, FP32, False, True),
    ({"stage": 1, "precision": "fp16", "reduce_dtype": "fp16"}, FP16, FP16, True, True),
    # in fp16, asked for in bf16: terms are cast, though as wide
    ({"stage": 1, "precision": "fp16", "reduce_dtype": "bf16"}, FP16, BF16, True, True),
    ({"stage": 1, "precision": "fp16", "reduce_dtype": "bf16", "algorithm": PAIRWISE}, FP16, BF16, True, True),
    # gradients of sources are kept apart, summed in fp32, and travel so
    ({"stage": 3, "ep": 2}, BF16, FP32, False, True),
    ({"stage": 1, "ep": 2, "ranks": 1}, BF16, FP32, True, True),
    ({"stage": 2, "ep": 2, "ranks": 1}, BF16, FP32, False, True),
    ({"stage": 3, "ep": 2, "experts": False}, BF16, BF16, False, True),
    # exact mode: a micro-batch's in a bucket, sums in counters of shards or of whole buffers
    ({"stage": 3, "exact": True, "accumulate": 4}, BF16, BF16, False, True),
    ({"stage": 3, "exact": True, "accumulate": 4, "ep": 2}, BF16, FP32, False, True),
    ({"stage": 1, "exact": True, "accumulate": 4}, BF16, FP32, False, False),
    ({"stage": 1, "exact": True}, BF16, BF16, False, True),
    ({"stage": 0, "exact": True}, BF16, BF16, False, False),
])  # fmt: skip
def test_gradients_are_kept_and_travel(settings, local, travels, kept, shard):
    found = unit_plan(**settings).gradients
    assert (found.local, found.travels, found.kept, found.shard) == (local, travels, kept, shard)


def test_sums_travel_as_asked_unless_weights_are_wider():
    def sums(**settings):
        return unit_plan(2, reduce_dtype="bf16", **settings).gradients.sums

    assert (sums(), sums(dtype="fp32"), unit_plan(2).gradients.sums) == (BF16, FP32, FP32)


def test_all_micro_batches_add_up_in_the_shard_of_one_rank_that_reduces_after_each():
    assert unit_plan(3, 1).adds_up
    assert not any(unit.adds_up for unit in (unit_plan(3), unit_plan(1, 1), unit_plan(3, 1, trainable=False)))


def test_a_second_backward_widens_what_is_kept_and_leaves_what_was_agreed_on():
    plan = unit_plan(1, algorithm=ALL_TO_ALL).gradients
    assert plan.widened(FP32) == plan._replace(local=FP32, shard=False)
    passing = unit_plan(3).gradients
    assert passing.widened(FP32) == passing


def test_steps_of_more_micro_batches_have_more_counters():
    plan = unit_plan(3, exact=True)
    assert [plan.of_steps(many).gradients.counters for many in (1, 2, 3, 4, 7, 8)] == [1, 1, 2, 2, 3, 3]


def test_weights_are_whole_between_uses_where_nothing_is_gathered():
    assert all(unit_plan(stage).whole for stage in (0, 1, 2))
    assert not unit_plan(3).whole
    assert unit_plan(3, release="every_step").whole
    assert unit_plan(3, 1).whole
    for apart in ({"gather_wire": "int8"}, {"offload": Offload(params="host")}, {"poison": True}, {"weights": "cast"}):
        assert not unit_plan(3, 1, **apart).whole


def test_experts_that_no_other_rank_has_are_never_gathered():
    assert unit_plan(3, 1, ep=4).row.number == 2
    for gathered in (
        {"ranks": 2, "ep": 4},
        {"ranks": 1, "experts": True},
        {"ranks": 1, "ep": 4, "gather_wire": "int8"},
        {"ranks": 1, "ep": 4, "offload": Offload(params="host")},
        {"ranks": 1, "ep": 4, "weights": "cast"},
    ):
        assert unit_plan(3, **gathered).row.number == 3


def test_second_shards_and_blocks_are_of_what_is_gathered():
    assert unit_plan(3, node=2).node == 2
    assert unit_plan(2, node=2).node == unit_plan(3, node=2, ep=2).node == 1
    assert unit_plan(3, gather_wire="int8").coded
    assert not unit_plan(2, gather_wire="int8").coded
    packed = Kind(Dtype("uint8", 1), trainable=False)
    assert not decide(packed, Policy.of(Spec(Zero(3, gather_wire="int8"))), Ranks()).coded


def test_weights_are_cast_in_gathers_where_a_trained_units_masters_are_wider():
    cast = {"weights": "cast"}
    assert unit_plan(3, **cast).from_masters
    assert unit_plan(3, 1, **cast).from_masters
    assert not any(unit_plan(3, **others).from_masters for others in ({}, cast | {"trainable": False}))
    assert unit_plan(3, trainable=False, **cast).trained == unit_plan(3, **cast)
    in_fp32 = decide(Kind(FP32), Policy.of(Spec(Zero(3, **cast))), Ranks(Group(2)))
    assert not in_fp32.from_masters


def test_weights_that_were_whole_while_frozen_stay_so_when_they_are_trained():
    alone = unit_plan(3, 1, trainable=False, weights="cast")
    assert alone.whole
    assert alone.trained.whole
    assert not alone.trained.from_masters
    assert alone.trained.gradients is not None


def test_experts_are_cut_over_the_ranks_that_have_the_same_ones_with_a_row_for_each_source():
    policy, ranks = Policy.of(Spec(Zero(3))), Ranks(Group(8), Group(2), ep=4)
    experts, others = (decide(Kind(BF16, experts=each), policy, ranks) for each in (True, False))
    assert (experts.cut.size, experts.sources) == (2, 4)
    assert (others.cut.size, others.sources) == (8, 1)
    assert decide(experts.kind, policy._replace(apart=False), ranks).sources == 1


def test_what_is_frozen_has_no_gradients_until_it_is_trained():
    frozen = unit_plan(2, trainable=False)
    assert frozen.gradients is None
    assert frozen.trained == unit_plan(2)


def test_pipelines_keep_weights_and_sum_gradients_for_a_step():
    here, piped = (Policy.of(Spec(Zero(3), mesh=Mesh(pp=pp))) for pp in (1, 2))
    assert (here.release, here.reduce) == ("every_use", "every_micro_batch")
    assert (piped.release, piped.reduce) == ("every_step", "every_step")
    assert Policy.of(Spec(Zero(3, second_shard=2), mesh=Mesh(pp=2))).release == "every_use"
    exact = Zero(1, exact=True)
    assert [Policy.of(Spec(exact, mesh=Mesh(pp=pp))).summands for pp in (1, 2)] == [1, 2]


@pytest.mark.parametrize(("zero", "offload"), [
    (Zero(3, gather_budget=1000), Offload()), (Zero(3, gather_wire="int8"), Offload()), (Zero(3), Offload(params="host")),
    (Zero(3, weights="cast"), Offload()),
])  # fmt: skip
def test_a_pipeline_gives_weights_back_after_every_use_where_a_setting_is_about_each_gather(zero, offload):
    policy = Policy.of(Spec(zero, offload, mesh=Mesh(pp=2)))
    assert policy.release == "every_use"
    assert policy.gathers
    assert not Policy.of(Spec(Zero(3, release="every_step"))).gathers
    assert not Policy.of(Spec(Zero(2))).gathers


def test_gradients_may_leave_that_are_in_shards_after_every_micro_batch():
    def may(*stage, **zero):
        return Policy.of(Spec(Zero(*stage, **zero))).gradients_may_leave

    assert [may(stage) for stage in range(4)] == [False, False, True, True]
    assert not may(2, reduce="every_step")
    assert not may(2, exact=True)


def test_sums_of_several_micro_batches_are_counted_in_exact_mode_and_others_are_alike():
    counts = (1, 2, 5)
    assert [Policy.of(Spec(accumulate=count)).summands for count in counts] == [1, 2, 2]
    assert [Policy.of(Spec(Zero(exact=True), accumulate=count)).summands for count in counts] == [1, 2, 5]


def test_no_block_of_what_travels_in_blocks_is_cut():
    blocks = {"gather_wire": {"int8": 256}, "slow_wire": {"int8": 256, "bf16": 16, "same": 16}}
    for key, forms in blocks.items():
        assert {form: Policy.of(Spec(Zero(3, **{key: form}))).block for form in forms} == forms


def test_messages_between_two_ranks_have_a_slot_for_each_other_rank():
    assert [Group(4, algorithm).slots for algorithm in (PAIRWISE, ALL_TO_ALL, NATIVE)] == [3, 4, 4]


def test_terms_arrive_of_pairs_and_of_16_bits_all_to_all_and_sums_in_a_dry_run():
    sends = {
        name: [Group(4, name).sends_terms(dtype) for dtype in (BF16, FP32)]
        for name in (PAIRWISE, ALL_TO_ALL, NATIVE, FAKE)
    }
    assert sends == {PAIRWISE: [True, True], ALL_TO_ALL: [True, False], NATIVE: [False, False], FAKE: [False, False]}
    assert Group(4, FAKE).travels(BF16, BF16, FP32) == FP32


def test_gradients_wait_on_the_host_as_wide_as_masters_or_as_asked():
    held = [
        Policy.of(Spec(Zero(2), Offload("host", gradients="host", gradient_dtype=dtype), precision=precision)).held
        for precision, dtype in (("fp64", "fp32"), ("bf16", "fp32"), ("bf16", "bf16"))
    ]
    assert held == [FP64, FP32, BF16]


def test_policies_have_the_dtypes_of_their_precision():
    for precision, master in (("bf16", FP32), ("fp16", FP32), ("fp32", FP32), ("fp64", FP64)):
        policy = Policy.of(Spec(precision=precision))
        assert (policy.compute, policy.master, policy.wire) == (BY_NAME[precision], master, master)
    with pytest.raises(ConfigError, match=r"zero\.reduce=every_micro_batch|reduce='every_micro_batch'"):
        Policy.of(Spec(Zero(0, reduce="every_micro_batch")))
    with pytest.raises(ConfigError, match="has no bf16 weights"):
        Policy.of(Spec(Zero(2, master="split"), precision="fp16"))


def test_a_blueprint_follows_from_settings_ranks_and_facts():
    ranks = Ranks(Group(4, ALL_TO_ALL), Group(4, ALL_TO_ALL))
    facts = [
        UnitFacts("root", Kind(BF16), [("norm", (6,), 0)]),
        UnitFacts("block", Kind(BF16), [("weight", (3, 8), 0)]),
    ]
    drawn = Blueprint.of(Spec(Zero(3), precision="bf16"), ranks, facts, 1)
    assert [(unit.name, unit.layout.numel, unit.plan.gradients.kept) for unit in drawn.units] == [
        ("root", 6, False),
        ("block", 24, False),
    ]
    on_host = Blueprint.of(Spec(Zero(3), ON_HOST, precision="bf16"), ranks, facts, 1)
    assert (drawn.policy.gradients, on_host.policy.gradients) == (False, True)
    assert [unit.layout.slots for unit in on_host.units] == [unit.layout.slots for unit in drawn.units]


def test_an_engine_shows_what_its_units_have_become():
    engine = zero3d.Engine(build("net"), stage=1, precision="bf16", optimizer=adamw)
    drawn = engine.blueprint
    assert [(unit.name, unit.plan) for unit in drawn.units] == [(unit.name, unit.plan) for unit in engine.units]
    assert all(drawn.layouts[unit.name] is unit.layout for unit in engine.units)
    for last in (False, True):
        engine.backward(loss_of(engine, batch(0)), last=last)
    now = engine.blueprint
    assert now.layouts is drawn.layouts
    assert now.plans != drawn.plans
    assert [now.plans[unit.name] for unit in engine.units] == [unit.plan for unit in engine.units]


def test_dtypes_of_a_file_and_of_torch_are_rounded_numbers_by_their_names():
    names = ("fp32", "bf16", "float8_e4m3fn", "bfloat16", "uint8", "int64", "bool")
    assert [name for name in names if Dtype(name, 1).is_floating_point] == list(names[:4])
