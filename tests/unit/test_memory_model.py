"""The memory model by hand, of one class of ranks: every constant written down once more."""

from dataclasses import replace

import pytest
from by_hand import (
    ATTENTION,
    BATCH,
    BLOCK,
    BLOCK_KEPT,
    BLOCKS,
    DOWN,
    EMBEDDING_KEPT,
    ENDS,
    HEAD_KEPT,
    HIDDEN,
    INPUT,
    LENGTH,
    MUCH,
    TOKENS,
    VOCAB,
    WIRE,
    at,
    fullest,
    kept,
    model_of,
)

from zero3d.memory.scratch import group_elements
from zero3d.spec.offload import Offload
from zero3d.tools.plan.footprint import footprints
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.memory import instants, memory
from zero3d.tools.plan.spec import Instant, ModelSpec, Operations, ParallelPlan, Part, Unit, Weight
from zero3d.tools.plan.windows import backwards

# --- one rank class, at stage 3 -------------------------------------------------------------------
# bf16 weights (2 bytes) are gathered; local gradients wait in buckets (2) and travel as they are: the terms of all
# ranks arrive (2). Tokens and labels are int64: 16 bytes.


def test_the_head_s_logits_beside_all_that_is_kept_and_two_blocks_gathered_ahead_of_its_own_backward_alone():
    kept_by_all = {"batch": BATCH, "activations": TOKENS * (EMBEDDING_KEPT + 4 * BLOCK_KEPT + HEAD_KEPT)}
    assert fullest("head", dp=2) == kept_by_all | {"temporary": TOKENS * MUCH, "gathered": 2 * ENDS}
    after, gradients = TOKENS * MUCH - 6_000, 6_000  # less than two blocks: the instants are as full as each other
    model = model_of("head", instants_of_head=(Instant(0.0, MUCH), Instant(0.0, after / TOKENS, gradients)))
    assert at(model, "backward of the head", dp=2) == kept_by_all | {
        "temporary": TOKENS * MUCH,
        "gathered": 2 * (ENDS + 2 * BLOCK),
    }
    found = dict(instants(model, ParallelPlan(stage=3, micro_batch=2, dp=2)))
    assert found["logits and loss"]["gathered"] == 2 * ENDS
    assert at(model, "logits and loss", dp=2, stage=2)["temporary"] == TOKENS * MUCH  # nothing is gathered


def test_a_loss_is_the_fullest_instant_where_no_part_s_backward_has_as_much():
    """Also where what it has more than these is less than the weights that are gathered for it."""
    plan = ParallelPlan(stage=3, micro_batch=2, dp=2, accumulate=2)
    for margin in (ENDS, 10**6):
        alike = dict(instants(model_of("head", instants=(Instant(0.0, MUCH),)), plan))
        loss = sum(alike["logits and loss"].values())
        more = max(sum(alike[f"backward of blocks.{block}"].values()) for block in range(BLOCKS)) - loss
        model = model_of("head", instants=(Instant(0.0, MUCH - (more + margin) / TOKENS),))
        assert memory(model, plan).instant == "logits and loss"


def test_what_is_gathered_ahead_is_as_large_as_it_is_where_blocks_differ():
    model = model_of(blocks=9)
    double = replace(model.blocks[0], units=(Unit("blocks.0", (Weight("double", (256, 384), cut=0),)),))
    parts = tuple(double if part is model.blocks[0] else part for part in model.parts)
    (backward,) = backwards(replace(model, parts=parts), ParallelPlan(stage=3, micro_batch=2, dp=2), 0).values()
    gathered = [windows.gathered for windows in backward.turns[3:8]]  # of blocks 6 to 2, each before two others
    assert gathered == [2 * 3 * BLOCK] * 4 + [2 * 4 * BLOCK]


@pytest.mark.parametrize("blocks", [1, 2, 4, 9])
def test_a_block_s_backward_beside_what_those_before_it_keep(blocks):
    """The first one of the backward keeps the most, the third one has as much on its way as there ever is."""
    model, last = model_of("block", blocks=blocks), blocks - 1
    found = at(model, f"backward of blocks.{max(0, last - 2)}", dp=2)
    third = min(2, last)
    assert found == {
        "batch": BATCH,
        "activations": TOKENS * (EMBEDDING_KEPT + (blocks - third) * BLOCK_KEPT),
        "temporary": TOKENS * MUCH,
        "gathered": 2 * (min(3, blocks - third) * BLOCK + (ENDS if blocks - third < 3 else 0)),
        "bucket": 2 * ((third + 1) * BLOCK + (0 if third == 2 else ENDS)),
        "wire": third * WIRE["block"] + (0 if third == 2 else WIRE["ends"]),
    }


def test_the_embedding_s_backward_beside_two_blocks_being_reduced():
    assert fullest("embedding", dp=2) == {
        "batch": BATCH,
        "activations": TOKENS * EMBEDDING_KEPT,
        "temporary": TOKENS * MUCH,
        "gathered": 2 * ENDS,
        "bucket": 2 * (2 * BLOCK + ENDS),
        "wire": 2 * WIRE["block"],
    }


def test_a_root_unit_is_gathered_all_along_and_its_bucket_opens_at_once():
    without, with_root = (at(model_of("block", root=root), "backward of blocks.1", dp=2) for root in (0, 16_384))
    assert with_root == without | {
        "gathered": without["gathered"] + 2 * 16_384, "bucket": without["bucket"] + 2 * 16_384
    }  # fmt: skip


def test_a_large_root_unit_is_reduced_at_the_end_beside_the_last_of_the_others():
    root = 16 * 16_384
    assert at(model_of(root=root), "end of the backward", dp=16, stage=2) == {
        "batch": BATCH,
        "bucket": 2 * (ENDS + root),
        "wire": WIRE["ends"] + 2 * root,
    }
    native = {"reduce_scatter": "native", "reduce_dtype": "bf16"}
    assert at(model_of(root=root), "end of the backward", dp=16, stage=1, accumulate=2, **native) == {
        "batch": 2 * BATCH, "wire": (2 + 2 / 16) * (ENDS + root)
    }  # fmt: skip


def test_a_tied_head_s_gradient_waits_for_the_embedding_s():
    """Once beside every block, twice at the embedding, where both are summed; their unit is the last to go."""
    for kind, name, waits in (("block", "backward of blocks.1", 1), ("embedding", "backward of the embedding", 2)):
        found, untied = (at(model_of(kind, tied=tied), name, dp=2) for tied in (True, False))
        assert found["temporary"] == untied["temporary"] + waits * 2 * ENDS
    assert found["gathered" if "gathered" in found else "bucket"] == 2 * (2 * BLOCK + ENDS)
    cut, untied = (at(model_of("block", tied=tied), "backward of blocks.1", dp=2, tp=2) for tied in (True, False))
    assert cut["temporary"] == untied["temporary"] + 2 * ENDS / 2
    head = at(model_of("head", tied=True), "logits and loss", dp=2)
    assert head["temporary"] == TOKENS * MUCH
    assert head["gathered"] == 2 * ENDS


def test_gradients_that_autograd_holds_are_divided_by_tp():
    instants = (Instant(300.0, MUCH, gradients=6000.0), Instant(100.0, MUCH, gradients=0.0))
    for tp, precision, width in ((1, "bf16", 1), (2, "bf16", 1), (2, "fp32", 2)):
        found = at(model_of(instants=instants), "backward of blocks.3", dp=1, stage=0, tp=tp, precision=precision)
        assert found["temporary"] == width * (TOKENS * (300 / tp + MUCH) + 6000 / tp)


# --- gradients of model states --------------------------------------------------------------------
# They have memory from their first use to the update: shards from their reduction, whole ones from the first gradient.


def gradients_at(model, **plan):
    return {name: parts["gradients"] for name, parts in instants(model, ParallelPlan(**{"micro_batch": 2} | plan))}


def test_the_only_backward_of_a_step_has_the_gradients_of_those_units_alone_that_it_has_reached():
    """Stage 3 at dp 2 keeps 4 bytes of half of each; stage 1 has 2 of the whole and 4 of half, these when reduced."""
    root = 16_384
    shards = gradients_at(model_of(root=root), stage=3, dp=2)
    assert shards == {
        "logits and loss": 0,
        **{f"backward of blocks.{3 - k}": 2 * (ENDS + k * BLOCK) for k in range(4)},
        "backward of the embedding": 2 * (ENDS + 4 * BLOCK),
        **dict.fromkeys(("end of the backward", "optimizer step"), 2 * (2 * ENDS + root + 4 * BLOCK)),
        "between two steps": 0,
    }
    whole = gradients_at(model_of(root=root), stage=1, dp=2)
    assert whole["logits and loss"] == whole["between two steps"] == 0
    assert whole["backward of blocks.2"] == 4 * (ENDS + BLOCK) + 2 * (BLOCK + root)
    assert whole["end of the backward"] == 4 * (2 * ENDS + root + 4 * BLOCK)


def test_of_several_backwards_a_later_one_has_all_gradients_throughout():
    several = gradients_at(model_of(), stage=3, dp=2, accumulate=2)
    assert several.pop("between two steps") == 0
    assert set(several.values()) == {2 * (2 * ENDS + 4 * BLOCK)}


def test_the_fullest_instant_is_where_gradients_have_come_if_these_outweigh_what_activations_leave():
    plan = ParallelPlan(stage=0, dp=1, micro_batch=2, precision="fp32")
    assert memory(model_of("block"), plan).instant == "backward of blocks.0"  # 4 bytes of BLOCK for 312 of 16 tokens
    assert memory(model_of("block"), plan.replace(accumulate=2)).instant == "backward of blocks.3"


# --- the optimizer step ---------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "elements"), [
    ({"dp": 1}, 4 * BLOCK + 2 * ENDS), ({"dp": 16, "reduce_scatter": "native"}, 4 * BLOCK + 2 * ENDS),
    ({"dp": 2, "stage": 1, "accumulate": 2}, (4 * BLOCK + 2 * ENDS) / 2),
])  # fmt: skip
def test_masters_are_cast_together(plan, elements):
    found = at(model_of(), "optimizer step", **{"micro_batch": 1, "stage": 0} | plan)
    assert found == {"batch": BATCH / 2 * plan.get("accumulate", 1), "wire": 8 * elements}


def test_masters_are_cast_in_groups_where_they_are_many():
    assert at(model_of(root=1 << 26), "optimizer step", stage=0)["wire"] == 8 * group_elements("cuda")


@pytest.mark.parametrize("plan", [
    {"precision": "fp32"}, {"offload": "host", "executor": "host"},  # nothing is cast, or not here
    {"precision": "fp16"},  # torch's own cast takes no scratch
    {"dp": 64, "stage": 1, "accumulate": 1},  # a shard is less than what reductions hold
])  # fmt: skip
def test_elsewhere_another_instant_is_fuller_than_the_step(plan):
    assert memory(model_of(), ParallelPlan(**{"stage": 0} | plan)).instant != "optimizer step"


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "width"), [("bf16", 1), ("fp16", 1), ("fp32", 2), ("fp64", 4)])
def test_figures_are_of_two_bytes_and_blocks_of_others_are_as_much_wider(precision, width):
    found = at(model_of("block"), "backward of blocks.3", dp=1, stage=0, precision=precision)
    assert found["activations"] == TOKENS * (EMBEDDING_KEPT + 4 * width * BLOCK_KEPT)
    assert found["temporary"] == width * TOKENS * MUCH
    head = fullest("head", dp=1, stage=0, precision=precision)
    assert head["activations"] == TOKENS * (EMBEDDING_KEPT + 4 * width * BLOCK_KEPT + HEAD_KEPT)
    assert head["temporary"] == TOKENS * MUCH


@pytest.mark.parametrize(("policy", "kept", "again"), [
    ("none", BLOCK_KEPT, 0), ("selective", BLOCK_KEPT - ATTENTION, ATTENTION), ("full", INPUT, BLOCK_KEPT),
    ("every:1", INPUT, BLOCK_KEPT), ("every:2", INPUT / 2, 2 * BLOCK_KEPT), ("every:4", INPUT / 4, 4 * BLOCK_KEPT),
])  # fmt: skip
def test_what_recomputation_keeps_and_brings_back(policy, kept, again):
    name = "backward of blocks.3" + (" after its recomputation" if again else "")
    found = at(model_of("block"), name, dp=1, stage=0, activations=policy)
    assert found["activations"] == TOKENS * (EMBEDDING_KEPT + 4 * kept + again)
    head = fullest("head", dp=1, stage=0, activations=policy)
    assert head["activations"] == TOKENS * (EMBEDDING_KEPT + 4 * kept + HEAD_KEPT)


def test_tp_divides_what_is_cut_and_sequence_parallelism_blocks_rest_but_gathered_inputs():
    for sequence in (False, True):
        found = fullest("head", dp=1, stage=0, tp=2, sequence_parallel=sequence)
        embedding, block, head = (kept(kind, 2, sequence) for kind in ("embedding", "block", "head"))
        assert found["activations"] == TOKENS * (embedding + 4 * block + head)
        assert sequence or found["temporary"] == TOKENS * MUCH / 2


def test_what_was_traced_over_tp_counts_where_there_is_tp():
    over = replace(model_of().parts[1].operations, kept_cut=60.0, kept_whole=300.0)
    parts = tuple(
        replace(part, operations=replace(part.operations, over_tp=over)) if part.kind == "block" else part
        for part in model_of("head").parts
    )
    model = replace(model_of("head"), parts=parts)
    for tp, block in ((1, BLOCK_KEPT), (2, 60 / 2 + 300), (4, 60 / 4 + 300)):
        found = at(model, "logits and loss", dp=1, stage=0, tp=tp)
        assert found["activations"] == TOKENS * (kept("embedding", tp) + 4 * block + kept("head", tp))


def test_outputs_of_experts_are_those_that_a_token_meets():
    """8 experts of 24 rows, tp divides their rows; of all parameters a token meets a quarter."""
    weights = Weight("router", (8, HIDDEN)), Weight("experts", (8, 24, HIDDEN), cut=1), Weight("frozen", (5, 5), False)
    biases = (Weight("router.bias", (8,)),)
    numel = 8 * HIDDEN + 8 * 24 * HIDDEN + 25 + 8
    experts = Part("block", (Unit("block", weights + biases),), Operations(1.0), active=numel // 4)
    first, *_, last = model_of().parts
    model = ModelSpec("experts", (first, experts, last), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)
    for tp in (1, 2):
        found = footprints(model, ParallelPlan(tp=tp, micro_batch=2))[experts]
        assert found.for_weights == pytest.approx(2 * TOKENS * (8 + 8 * 24 / tp * (numel // 4) / numel), rel=1e-12)


def test_a_norm_hands_on_slices_of_sequences_in_blocks_alone():
    first, block, last = (
        replace(part, units=(Unit(part.kind, (Weight(f"{part.kind}.norm", (HIDDEN,)),)),))
        for part in (model_of().parts[0], model_of().parts[1], model_of().parts[-1])
    )
    model = ModelSpec("norms", (first, block, last), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)
    found = footprints(model, ParallelPlan(tp=2, sequence_parallel=True, micro_batch=2))
    assert [found[part].for_weights / (2 * TOKENS * HIDDEN) for part in (first, block, last)] == [1, 1 / 2, 1]


# --- buffers of reductions ------------------------------------------------------------------------


NATIVE = {"reduce_scatter": "native"}


@pytest.mark.parametrize(("plan", "cast", "arrives", "of"), [
    ({}, 0, 2, 1),  # terms of all ranks
    (NATIVE, 0, 0, 4),  # bf16 gradients travel as fp32, in which their bucket is; the sum lands in its shard
    (NATIVE | {"accumulate": 2}, 0, 4, 4),  # and is added to that of the micro-batch before
    ({"reduce_dtype": "bf16"}, 0, 2, 1),
    ({"reduce_dtype": "bf16"} | NATIVE, 0, 2, 4),
    ({"precision": "fp32"}, 0, 0, 4),
    ({"precision": "fp64"}, 0, 0, 4),
    ({"precision": "fp64", "accumulate": 2}, 0, 8, 4),
    ({"reduce": "every_step", "accumulate": 2}, 0, 0, 4),  # summed in fp32 where they are
    ({"reduce": "every_step", "accumulate": 1}, 0, 2, 1),
    ({"stage": 1, "accumulate": 1}, 0, 2, 1),
    ({"stage": 1, "accumulate": 1} | NATIVE, 4, 0, 4),
    ({"stage": 1, "accumulate": 2}, 0, 0, 4),
    ({"stage": 0}, 2, 2, 1),  # kept in fp32
    ({"stage": 0} | NATIVE, 0, 0, 4),
    ({"stage": 1, "precision": "bf16", "reduce_dtype": "bf16", "accumulate": 2}, 2, 2, 1),
])  # fmt: skip
def test_two_reductions_are_under_way_as_they_travel(plan, cast, arrives, of):
    found = fullest("embedding", **{"dp": 4} | plan)
    assert found.get("wire", 0) == 2 * (cast * BLOCK + arrives * BLOCK / of)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_by_itself_sends_nothing_and_copies_neither_weights_nor_gradients(stage):
    assert at(model_of(), "logits and loss", dp=1, stage=stage, precision="fp16") == {
        "batch": BATCH,
        "activations": TOKENS * (EMBEDDING_KEPT + 4 * BLOCK_KEPT + HEAD_KEPT),
        "temporary": TOKENS * 13,
    }


def test_of_one_rank_gradients_that_leave_and_weights_in_blocks_pass_through_buffers():
    away = {"optimizer": "host", "gradients": "host"}
    leave = fullest("embedding", dp=1, stage=2, offload=Offload(**away))
    assert leave["bucket"] == 2 * (2 * BLOCK + ENDS) + (2 + 1) * 4 * BLOCK
    for way in ({"gather_wire": "int8"}, {"offload": Offload(**away, params="host")}):
        assert fullest("embedding", dp=1, **way)["gathered"] == 2 * ENDS


@pytest.mark.parametrize(("plan", "summand", "moving"), [
    ({"accumulate": 2}, 2, 2), ({"accumulate": 2, "reduce": "every_step"}, 4, 0), ({"reduce": "every_step"}, 2, 2),
])  # fmt: skip
def test_exact_reductions_hold_what_arrives_and_a_tree_s_sums(plan, summand, moving):
    """(dp - 1) / dp of a unit arrives as summands or, summed over micro-batches, as fp32; log2(dp) + 1 fp32 shards for two.

    A bucket moves, unless it has been added to the sum of micro-batches, which moves in its place.
    """
    found = fullest("embedding", dp=4, exact=True, **plan)
    assert found["wire"] == 2 * summand * BLOCK * 3 / 4 + 3 * 4 * BLOCK / 4
    assert found["bucket"] == 2 * (moving * BLOCK + ENDS)


# --- around it ------------------------------------------------------------------------------------


def test_what_the_device_shows_is_reserved_blocks_and_contexts():
    """Those of CUDA, and of NCCL by process groups: some of tensors, and those of a few numbers."""
    one = {"communicators": 1}
    for degrees, tensors, few in (
        ({}, 0, 0),
        ({"dp": 2}, 2, 0),
        ({"dp": 2} | one, 1, 0),
        ({"tp": 2}, 1, 1),
        ({"pp": 2, "accumulate": 2}, 1, 1),
        ({"dp": 2, "tp": 2}, 3, 1),
        ({"dp": 2, "tp": 2, "pp": 2, "accumulate": 2}, 4, 2),
        ({"dp": 4, "shard": 2}, 4, 0),
        ({"dp": 4, "sp": 2}, 3, 0),
        ({"dp": 4, "sp": 2, "replay": 2}, 4, 0),
    ):
        found, measured = (
            memory(model_of(), ParallelPlan(stage=1, **degrees), replace(cluster("a100-80", 8), communicator=each))
            for each in (None, 1e9)
        )
        assert found.reserved == pytest.approx(1.05 * found.allocated, rel=1e-12)
        assert found.device == pytest.approx(found.reserved + 0.6e9 + 0.69e9 * tensors + 0.03e9 * few, rel=1e-12)
        assert measured.device == pytest.approx(found.reserved + 0.6e9 + 1e9 * tensors + 0.03e9 * few, rel=1e-12)


def test_a_node_s_host_has_its_processes_the_largest_slice_in_fp32_and_what_is_offloaded():
    """Of 12 bytes per parameter a rank has its share; 16 ranks on nodes of 8."""
    params = 2 * ENDS + BLOCKS * BLOCK
    nodes = cluster("a100-80", 16, 2)
    for plan, ranks in ((ParallelPlan(dp=4, stage=1), 4), (ParallelPlan(dp=16, stage=1), 8)):
        assert memory(model_of(), plan, nodes).host == ranks * (3e9 + 4 * DOWN)
    offloaded = memory(model_of(), ParallelPlan(dp=4, stage=1, offload="host"), nodes)
    assert offloaded.host == 4 * (3e9 + 4 * DOWN + 12 * params / 4)
    assert "optimizer" not in offloaded.parts
    assert offloaded.states == (2 + 2 + 4 / 4) * params
