"""Bytes of states by hand: precisions, padding, frozen weights, sums of summands."""

import pytest
from by_hand import BLOCK, BLOCKS, ENDS, HIDDEN, LENGTH, VOCAB, model_of

from zero3d.config import load
from zero3d.errors import ConfigError
from zero3d.tools.plan.emit import plan_of, train_config
from zero3d.tools.plan.saves import copy_bytes
from zero3d.tools.plan.spec import ModelSpec, Operations, ParallelPlan, Part, Unit, Weight
from zero3d.tools.plan.states import states


@pytest.mark.parametrize(("precision", "widths"), [
    ("bf16", (2, 4, 12)), ("fp16", (2, 4, 12)), ("fp32", (4, 4, 8)), ("fp64", (8, 8, 16)),
])  # fmt: skip
def test_states_of_every_precision(precision, widths):
    params = 2 * ENDS + BLOCKS * BLOCK
    found = states(model_of(), ParallelPlan(dp=4, stage=0, precision=precision))
    assert found.states == tuple(width * params for width in widths)
    assert found.padding == 0
    sharded = states(model_of(), ParallelPlan(dp=4, stage=3, precision=precision))
    assert sharded.total == sum(widths) * params / 4


@pytest.mark.parametrize(("precision", "width"), [("bf16", 4), ("fp32", 4), ("fp64", 8)])
def test_an_average_of_weights_is_as_wide_as_a_moment_and_sharded_like_one(precision, width):
    for stage, share in ((0, 1), (1, 4), (3, 4)):
        plain = states(model_of(), ParallelPlan(dp=4, stage=stage, precision=precision))
        averaged = states(model_of(), ParallelPlan(dp=4, stage=stage, precision=precision, ema=0.999))
        more = width * (2 * ENDS + BLOCKS * BLOCK) / share
        assert averaged.states == (*plain.states[:2], plain.states.optimizer + more)


def test_averages_of_a_file_are_in_its_plan_in_the_copy_of_its_saves_and_in_the_file_of_that_plan():
    sections = {"train": {"batch": 4, "micro_batch": 2}, "checkpoint": {"asynchronous": True}}
    plain = plan_of(load(sections), 2)
    averaged = plan_of(load({**sections, "train": {**sections["train"], "ema": 0.99}}), 2)
    params = 2 * ENDS + BLOCKS * BLOCK
    assert copy_bytes(model_of(), averaged) - copy_bytes(model_of(), plain) == 4 * params / 2
    assert load(train_config(model_of(), averaged, "demo", None)).train.ema == 0.99
    assert load(train_config(model_of(), plain, "demo", None)).train.ema is None
    for away in ("optimizer", "params"):
        with pytest.raises(ConfigError, match=rf"offload\.{away}=host .*states leave it: type offload\.optimizer=none"):
            load({"train": {"ema": 0.99}, "offload": {away: "host"}})
    with pytest.raises(ConfigError, match=r"offload\.optimizer=host and .*states leave it"):
        states(model_of(), averaged.replace(offload="host"))


@pytest.mark.parametrize("numel", [8_191, 8_192, 8_193])
def test_a_rank_whose_shard_is_padding_has_a_master_and_no_moments(numel):
    """A storage of 16,384 elements on two ranks: the second one's half begins at 8,192."""
    part = Part("block", (Unit("block", (Weight("block.weight", (numel,)),)),), Operations(1.0))
    model = ModelSpec("padding", (part,), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)
    for rank, moments in ((0, 8), (1, 8 if numel > 8_192 else 0)):
        found = states(model, ParallelPlan(dp=2, stage=1), dp_rank=rank)
        assert found.states == (2 * numel, (2 + 4 / 2) * numel, (4 + moments) / 2 * numel)
        assert found.padding == (2 + 2 + 4 / 2 + (4 + moments) / 2) * (16_384 - numel)
        assert found.total == sum(found.states) + found.padding
        whole = states(model, ParallelPlan(dp=2, stage=0), dp_rank=rank)  # stage 0 updates everything everywhere
        assert whole.states == (2 * numel, 4 * numel, 12 * numel)


def test_frozen_weights_have_no_other_states():
    part = Part("block", (Unit("block", (Weight("block.weight", (16_384,), trainable=False),)),), Operations(1.0))
    model = ModelSpec("frozen", (part,), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)
    for stage, share in ((0, 1), (2, 1), (3, 2)):
        assert states(model, ParallelPlan(dp=2, stage=stage)).states == (2 * 16_384 / share, 0, 0)


@pytest.mark.parametrize(("plan", "gradients"), [
    # fp32 sums of summands in a binary counter: floor(log2(M + 1)), and in a pipeline of two at least
    ({"accumulate": 8, "stage": 3, "dp": 4}, 3 * 4 / 4), ({"accumulate": 8, "stage": 1, "dp": 4}, 3 * 4),
    ({"accumulate": 1, "stage": 1, "dp": 4}, 4 / 4), ({"accumulate": 4, "stage": 1, "dp": 4, "pp": 2}, 2 * 4),
    ({"accumulate": 2, "stage": 1, "dp": 4, "pp": 2}, 4),
])  # fmt: skip
def test_exact_sums_of_summands(plan, gradients):
    found = states(model_of(), ParallelPlan(exact=True, **plan))
    params = (2 * ENDS + BLOCKS * BLOCK) if "pp" not in plan else ENDS + 2 * BLOCK
    assert found.states.gradients == gradients * params
