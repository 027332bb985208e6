"""Memory of other systems by hand: every constant of a profile, and of the closed forms, written down once more."""

from dataclasses import replace

import pytest

from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.profile_memory import profile_memory
from zero3d.tools.plan.profiles import PROFILES, Profile
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.plan.time import Cut, Pace

H, HEADS, LENGTH, VOCAB, LAYERS = 64, 4, 32, 512, 4
F = 4 * H
GPT = gpt(LAYERS, H, HEADS, VOCAB, LENGTH, flash=False)
BLOCK = 12 * H * H + 13 * H
EMBEDDING, NORM, COPY = VOCAB * H + LENGTH * H, 2 * H, VOCAB * H
PARAMS = EMBEDDING + LAYERS * BLOCK + NORM
# Korthikanti: 34 h + 5 a s bytes of a token in a block, 10 h of them whole on every tp rank.
CUT, WHOLE, SCORES, INPUT = 24 * H, 10 * H, 5 * HEADS * LENGTH, 2 * H
LOGITS = 6 * VOCAB + 4 * VOCAB  # 2 bytes and their fp32 copy, kept; the fp32 gradient
SYSTEM = Profile("by hand", 2, 4, 12, Pace({}), spare=1.25, context=7e9, communicator=1e9, buffers=3e6, units=3)


def of(system=SYSTEM, **plan):
    return profile_memory(GPT, ParallelPlan(**{"stage": 1, "micro_batch": 2} | plan), cluster("a100-80", 16, 2), system)


TOKENS = 2 * LENGTH


def test_one_rank_has_states_all_activations_logits_and_buffers():
    found = of()
    assert found.parts == {
        "states": 18 * PARAMS, "gathered": 0.0, "buffers": 3e6, "transient": 0.0,
        "activations": TOKENS * LAYERS * ((CUT + WHOLE) + SCORES), "logits": TOKENS * LOGITS,
    }  # fmt: skip
    assert found.states == 18 * PARAMS
    assert found.allocated == sum(found.parts.values())
    assert found.reserved == 1.25 * found.allocated
    assert found.device == found.reserved + 7e9


@pytest.mark.parametrize(
    ("degrees", "communicators"),
    [({}, 0), ({"dp": 2}, 2), ({"dp": 2, "tp": 2}, 3), ({"tp": 2, "pp": 2}, 4), ({"dp": 2, "tp": 2, "pp": 2}, 5)],
)
def test_each_axis_all_ranks_and_a_model_s_together_have_a_communicator(degrees, communicators):
    found = of(**degrees)
    assert found.device == found.reserved + 7e9 + 1e9 * communicators


def test_inputs_of_recomputed_blocks_may_be_on_the_host():
    here, away = (of(activations="full", offload_activations=place) for place in ("none", "host"))
    assert here.parts["activations"] - away.parts["activations"] == TOKENS * LAYERS * INPUT


@pytest.mark.parametrize(("stage", "per_parameter"), [
    (0, 2 + 4 + 12), (1, 2 + 4 + 12 / 4), (2, 2 + (4 + 12) / 4), (3, (2 + 4 + 12) / 4),
])  # fmt: skip
def test_states_by_stage(stage, per_parameter):
    found = of(dp=4, stage=stage)
    assert found.states == pytest.approx(per_parameter * PARAMS, rel=1e-12)
    assert found.parts["gathered"] == (3 * 2 * BLOCK if stage == 3 else 0)


def test_narrow_gradients_are_accumulated_in_fp32_beside_them():
    narrow = replace(SYSTEM, gradient=2)
    assert of(narrow).states == (2 + 2 + 4 + 12) * PARAMS
    assert of(narrow, reduce_dtype="bf16").states == (2 + 2 + 12) * PARAMS
    assert of(narrow, dp=4, stage=2).states == pytest.approx((2 + (2 + 4 + 12) / 4) * PARAMS, rel=1e-12)


@pytest.mark.parametrize(("policy", "token"), [
    ("none", LAYERS * ((CUT + WHOLE) + SCORES)),
    ("selective", LAYERS * (CUT + WHOLE) + SCORES),
    ("full", LAYERS * INPUT + (CUT + WHOLE) + SCORES),
    ("every:2", LAYERS / 2 * INPUT + 2 * ((CUT + WHOLE) + SCORES)),
])  # fmt: skip
def test_what_recomputation_keeps(policy, token):
    assert of(activations=policy).parts["activations"] == TOKENS * token


@pytest.mark.parametrize("sequence", [False, True])
def test_selective_may_keep_the_input_attention_and_every_second_product(sequence):
    """Of products 3 h, h, f and h wide half the 2-byte outputs; 2 h of attention."""
    halves = replace(SYSTEM, every_other=True)
    kept = 2 * H + (3 * H + H + F + H)
    assert of(halves, activations="selective").parts["activations"] == TOKENS * (LAYERS * (INPUT + kept) + SCORES)
    entry = INPUT / 2 if sequence else INPUT
    cut = of(halves, activations="selective", tp=2, sequence_parallel=sequence).parts["activations"]
    assert cut == TOKENS * (LAYERS * (entry + kept / 2) + SCORES / 2)
    assert of(halves).parts == of().parts


def test_a_loss_over_tp_may_hold_more_of_its_logits():
    wide = replace(SYSTEM, loss_over_tp=6.0)
    assert of(wide).parts == of().parts
    assert of(wide, tp=2).parts["logits"] == TOKENS * (LOGITS + 6 * VOCAB) / 2


def test_stages_may_be_cut_by_weights_so_that_the_head_has_fewer_blocks():
    """A head of 32,768 products is 2/3 of a block's 49,152: of 4 2/3 blocks 2 1/3 are a half, two and a head of two."""
    deep = gpt(6, H, HEADS, 4 * VOCAB, LENGTH, flash=False)  # a head of 8/3 blocks: 4 and 2 of 6
    system = replace(SYSTEM, pace=Pace({}, cut=Cut(head=None)))
    plan = ParallelPlan(pp=2, stage=1, micro_batch=2, accumulate=8)
    place = cluster("a100-80", 16, 2)
    even, weighed = profile_memory(deep, plan, place, SYSTEM), profile_memory(deep, plan, place, system)
    assert even.instant == "pipeline rank 1 of 2"
    assert weighed.instant == "pipeline rank 0 of 2"
    assert weighed.parts["activations"] == TOKENS * 2 * 4 * (CUT + WHOLE + SCORES)


@pytest.mark.parametrize("sequence", [False, True])
def test_tp_divides_what_is_cut_and_sequence_parallelism_the_rest(sequence):
    found = of(tp=2, stage=3, sequence_parallel=sequence)
    whole = WHOLE / 2 if sequence else WHOLE
    assert found.states == pytest.approx(18 * PARAMS / 2, rel=1e-12)
    assert found.parts["activations"] == TOKENS * LAYERS * ((CUT / 2 + whole) + SCORES / 2)
    assert found.parts["logits"] == TOKENS * LOGITS / 2
    assert found.parts["gathered"] == 3 * 2 * BLOCK / 2
    full = of(tp=2, sequence_parallel=sequence, activations="full").parts["activations"]
    entry = INPUT / 2 if sequence else INPUT
    assert full == TOKENS * (LAYERS * entry + (CUT / 2 + whole) + SCORES / 2)


@pytest.mark.parametrize(("plan", "flight"), [
    ({"accumulate": 8}, 4), ({"accumulate": 3}, 3), ({"accumulate": 8, "schedule": "gpipe"}, 8),
])  # fmt: skip
def test_the_first_rank_of_a_pipeline_holds_the_most_micro_batches(plan, flight):
    wide = gpt(LAYERS, H, HEADS, 8, LENGTH, flash=False)  # hardly any logits
    found = profile_memory(wide, ParallelPlan(pp=4, stage=1, micro_batch=2, **plan), cluster("a100-80", 16, 2), SYSTEM)
    assert found.instant == "pipeline rank 0 of 4"
    assert found.parts["activations"] == TOKENS * flight * ((CUT + WHOLE) + SCORES)
    assert found.parts["transient"] == TOKENS * (2 * F + 6 * H)
    assert "logits" not in found.parts
    plan = ParallelPlan(**{"pp": 4, "tp": 2, "stage": 1, "micro_batch": 2} | plan)
    assert profile_memory(wide, plan, cluster("a100-80", 16, 2), SYSTEM).parts["transient"] == TOKENS * (F + 3 * H)


def test_interleaving_holds_korthikanti_s_share_more():
    """1 + (p - 1) / (p v) of p micro-batches: 2 x 1.25 of all layers of a rank, and not beyond those there are."""
    few = gpt(LAYERS, H, HEADS, 8, LENGTH, flash=False)
    for accumulate, flight in ((8, 2 * (1 + 1 / 4)), (2, 2)):
        plan = ParallelPlan(pp=2, virtual=2, stage=1, micro_batch=2, accumulate=accumulate)
        found = profile_memory(few, plan, cluster("a100-80", 16, 2), SYSTEM)
        assert found.parts["activations"] == TOKENS * flight * 2 * ((CUT + WHOLE) + SCORES)


def test_the_last_rank_has_logits_and_a_tied_embedding_once_more():
    """Of the copied embedding unit: its matrix, positions among it."""
    found = of(pp=2, accumulate=1)
    assert found.instant == "pipeline rank 1 of 2"
    held = 2 * BLOCK + NORM + EMBEDDING
    assert found.states == 18 * held
    assert of(pp=2, accumulate=1, tp=2).states == pytest.approx(18 * held / 2, rel=1e-12)
    assert found.parts["logits"] == TOKENS * LOGITS
    assert of(pp=2, accumulate=1, tp=2).states == pytest.approx(18 * held / 2, rel=1e-12)


def test_at_stage_3_a_system_may_keep_whole_weights_and_gradients_through_a_pipeline_s_step():
    keeps = replace(SYSTEM, keeps_in_pipelines=True)
    held = 2 * BLOCK + NORM + EMBEDDING
    for system, gathered in ((SYSTEM, 3 * 2 * BLOCK), (keeps, (2 + 4) * held)):
        assert of(system, pp=2, accumulate=1, stage=3, dp=2).parts["gathered"] == gathered
    assert of(keeps, stage=3, dp=2).parts["gathered"] == 3 * 2 * BLOCK
    wider = replace(SYSTEM, shard_weight=4.0)
    assert of(wider, stage=3, dp=4).states == pytest.approx((4 + 4 + 12) / 4 * PARAMS, rel=1e-12)


def test_a_node_s_host_loads_the_whole_model_for_every_rank_and_what_is_offloaded():
    assert of(dp=16).host == 8 * 2 * PARAMS
    assert of(dp=4).host == 4 * 2 * PARAMS
    there = of(dp=4, tp=2, offload="host")
    assert there.host == 8 * (2 * PARAMS + 12 / 4 * PARAMS / 2)
    assert there.states == pytest.approx((2 + 4) * PARAMS / 2, rel=1e-12)


# Bytes per parameter at stages 0 to 3 over 8 ranks, as the table in profiles.py has them.
TABLE = {
    "megatron": (18, 6 + 12 / 8, None, None),
    "megatron-core": (18, 6 + 12 / 8, None, None),
    "deepspeed": (24, 8 + 16 / 8, 2 + 22 / 8, 24 / 8),
    "deepspeed-0.3": (20, 8 + 12 / 8, 2 + 18 / 8, 20 / 8),
    "torchtitan": (14, 6 + 8 / 8, 2 + 12 / 8, 16 / 8),
    "nanotron": (18, 6 + 12 / 8, None, None),
}


@pytest.mark.parametrize(("system", "stage"), [(s, i) for s, row in TABLE.items() for i, v in enumerate(row) if v])
def test_bytes_per_parameter_of_every_system(system, stage):
    assert sum(PROFILES[system].rates(ParallelPlan(dp=8, stage=stage))) == TABLE[system][stage]
