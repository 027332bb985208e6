"""Memory of systems that train adapters on a traced model: the engine's arithmetic, and what each has beside it."""

import json
from dataclasses import replace

import pytest

from zero3d.tools.plan.corrected import SPREAD, profile as run_profile
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.profiles import profile
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan

MODEL = gpt(4, 512, 8, 32000, 256)
PLACE = cluster("a100-80", 2, 1)
PLAN = ParallelPlan(micro_batch=4, accumulate=2, activations="full", tiled_loss=False)
LOGITS = 4 * 256 * 32000


def memory(system, model=MODEL, plan=PLAN, place=PLACE):
    return evaluate(model, place, plan, system).memory


def test_a_loss_that_copies_its_logits_has_them_beside_its_own():
    """The fullest instant is the loss's: 4 bytes of each logit more, or less where they stay in 16 bits."""
    own = memory("zero3d")
    assert own.instant == "logits and loss"
    assert memory("peft").allocated == own.allocated
    assert memory("fsdp-qlora").allocated == own.allocated + 4 * LOGITS
    assert own.allocated - 4 * LOGITS <= memory("peft-gptq").allocated < own.allocated
    assert memory("fsdp-qlora").parts["loss"] == 4 * LOGITS


def test_gathered_weights_wait_for_their_next_use_at_stage_3_alone():
    sharded = PLAN.replace(dp=2, stage=3)
    live = profile("peft-zero3").live
    kept, own = memory("peft-zero3", plan=sharded), memory("zero3d", plan=sharded)
    assert kept.parts["gathered"] == live > own.parts.get("gathered", 0.0)
    assert memory("peft-zero3").allocated == memory("zero3d").allocated


def test_layers_in_few_bits_keep_their_inputs_where_nothing_is_recomputed():
    first = MODEL.blocks[0].units[0].weights[2]
    packed = replace(first, shape=(first.numel // 2,), trainable=False, matrix=first.shape)
    unit = MODEL.blocks[0].units[0]
    unit = replace(unit, weights=tuple(packed if w is first else w for w in unit.weights))
    parts = tuple(replace(p, units=(unit,)) if p is MODEL.blocks[0] else p for p in MODEL.parts)
    model, whole = replace(MODEL, name="packed", parts=parts), PLAN.replace(activations="none")
    more = memory("litgpt", model, whole).allocated - memory("peft", model, whole).allocated
    assert more == pytest.approx(profile("litgpt").packed_input * 4 * 256 * first.shape[1])
    assert memory("litgpt", model).allocated == memory("peft", model).allocated


def test_a_full_device_lets_go_of_what_is_not_live():
    """Reserved is 1.18 times what is live, up to the card; never less than that and a little."""
    system, one = profile("peft"), memory("peft")
    assert one.reserved == pytest.approx(system.spare * one.allocated)
    for share, reserved in ((1.1, 1.1), (0.9, system.tight)):
        gpu = replace(PLACE.gpu, memory=share * one.allocated + system.context)
        found = memory("peft", place=replace(PLACE, gpu=gpu))
        assert found.reserved == pytest.approx(reserved * one.allocated)


def test_a_runs_profile_narrows_the_range_and_widens_none():
    for known, written in ((None, SPREAD), (0.02, SPREAD), (0.3, 0.3)):
        place = replace(PLACE, spread=known)
        seconds = 1.5 * evaluate(MODEL, place, PLAN).seconds.mid
        told = json.loads(run_profile(MODEL, place, PLAN, seconds))
        assert told["spread"] == written
        assert "fitted on" in told["provenance"]["spread"]
