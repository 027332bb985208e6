"""What recomputation keeps is what its arithmetic says, and nothing is left behind."""

import gc
import weakref

import pytest
import torch
from deep import LAYERS, deep, kept_inputs, recomputed
from models import batch, loss_of
from torch import nn

import zero3d
from zero3d.activations.policy import recompute_arithmetic
from zero3d.activations.recomputation import recompute
from zero3d.train.measure import Activations
from zero3d.zero.tokens import count_gathers


@pytest.mark.parametrize("policy", ["full", "every:1", "every:2", "every:3", "every:9"])
def test_as_many_inputs_are_kept_as_the_arithmetic_says(policy):
    assert kept_inputs(recomputed(deep("llama"), policy))[0] == recompute_arithmetic(LAYERS, policy).kept_inputs


def test_the_more_is_recomputed_the_fewer_bytes_are_saved():
    saved = [kept_inputs(recomputed(deep("llama"), p))[1] for p in ("none", "selective", "full", "every:2", "every:5")]
    assert saved == sorted(saved, reverse=True)
    assert len(set(saved)) == len(saved)


def test_a_blocks_interior_is_let_go_as_its_backward_goes_on():
    class Watch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.clone())
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            (saved,) = ctx.saved_tensors
            alive.append(sum(ref() is not None for ref in seen))
            seen.append(weakref.ref(saved))
            return grad

    seen, alive = [], []

    class Watched(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            return Watch.apply(self.linear(x))

    model = nn.Sequential(*(Watched() for _ in range(6)))
    recompute(model, "every:3")
    model(torch.randn(2, 8)).sum().backward()
    assert alive == [0] * 6


@pytest.mark.parametrize(
    "policy", ["every:2", *(pytest.param(each, marks=pytest.mark.long) for each in ("full", "every:3"))]
)
def test_nothing_is_left_after_a_backward_or_a_dropped_forward(policy):
    model = recomputed(deep("net"), policy)
    refs = []
    for block in model.layers:
        block.register_forward_hook(lambda m, args, out: refs.append(weakref.ref(out.untyped_storage())))
    gc.collect()
    gc.disable()  # reference counting alone must do
    try:
        loss_of(model, batch(0)).backward()
        loss_of(model, batch(0))
        if policy == "full":  # torch's checkpoint leaves a cycle
            gc.collect()
        assert len(refs) >= 2 * LAYERS
        assert all(ref() is None for ref in refs)
    finally:
        gc.enable()


@pytest.mark.parametrize(("policy", "gathers"), [("full", [2, 2, 2, 2, 2]), ("every:2", [3, 2, 3, 2, 2])])
def test_at_stage_3_blocks_before_the_last_of_a_segment_are_gathered_once_more(policy, gathers):
    engine = zero3d.Engine(recomputed(deep("net"), policy), stage=3, precision="fp32")
    engine.gathers.events = []
    engine.backward(loss_of(engine, batch(0)))
    counted = count_gathers(engine.gathers.events)
    assert [counted[f"layers.{i}"] for i in range(LAYERS)] == gathers


def test_the_meter_of_a_run_counts_what_the_arithmetic_says():
    """`none` keeps the most; full keeps an input per block, every:2 one per segment."""

    def metered(policy):
        engine = zero3d.Engine(recomputed(deep("llama"), policy), stage=3, precision="fp32")
        meter = Activations(engine)
        loss_of(engine, batch(0)).backward()
        return sum(meter.bytes.values())

    kept = {policy: metered(policy) for policy in ("none", "selective", "full", "every:2", "every:5")}
    assert sorted(kept.values(), reverse=True) == list(kept.values())
    inputs = {p: recompute_arithmetic(LAYERS, p).kept_inputs for p in ("full", "every:2", "every:5")}
    one_input = batch(0).numel() * 32 * 4
    assert kept["full"] - kept["every:2"] == (inputs["full"] - inputs["every:2"]) * one_input
    assert kept["every:2"] - kept["every:5"] == (inputs["every:2"] - inputs["every:5"]) * one_input
