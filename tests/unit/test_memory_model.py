"""The memory model by hand: a model whose figures tell each other apart, and every constant written down once more.

Instants of a step are made the fullest in turn by what a part's backward needs beside what it kept. No weight has
padding: each is a multiple of 16,384 elements.
"""

from dataclasses import replace

import pytest

from zero3d.plan.footprint import footprints
from zero3d.plan.hardware import cluster
from zero3d.plan.memory import memory
from zero3d.plan.spec import Instant, ModelSpec, Operations, ParallelPlan, Part, Unit, Weight
from zero3d.plan.states import states

LENGTH, HIDDEN, VOCAB, BLOCKS = 8, 16, 64, 4
TOKENS = 2 * LENGTH  # of a micro-batch of two
MUCH = 10.0**6  # bytes per token: more than all else
ENDS, UP, DOWN = 16_384, 16_384, 32_768  # elements: of the embedding and of the head; of a block's two matrices
BLOCK = UP + DOWN
# Bytes that a token keeps: cut by tp + whole on all tp ranks.
EMBEDDING_KEPT, BLOCK_KEPT, HEAD_KEPT = 3 + 5, 101 + 211, 401 + 43
ATTENTION, INPUT = 31, 32  # of a block's: what recomputing attention frees, and its input
TRANSIENT = {"embedding": 7.0, "block": 11.0, "head": 13.0}


def model_of(much="", tied=False, blocks=BLOCKS, root=0, instants=()):
    """`much`: the kind of part whose backward is the fullest instant; `root`: elements of a norm in the root unit."""
    transient = TRANSIENT | ({much: MUCH} if much else {})
    inside = Operations(
        1.0,
        kept_cut=101.0,
        kept_whole=211.0,
        attention=31.0,
        input=32.0,
        transient=transient["block"],
        instants=instants,
    )
    before = Operations(0.0, kept_cut=3.0, kept_whole=5.0, transient=transient["embedding"])
    after = Operations(1.0, kept_cut=401.0, kept_whole=43.0, transient=transient["head"])
    embed = Unit("embed", (Weight("embed.weight", (64, 256), cut=0),))
    units = [Unit("head", (Weight("head.weight", (64, 256), cut=0),), copy_of="embed" if tied else None)]
    if root:
        units.insert(0, Unit("root", (Weight("norm.weight", (root,)),)))
    parts = [Part("embedding", (embed,), before)]
    for i in range(blocks):
        up = Weight(f"blocks.{i}.up", (128, 128), cut=0)
        down = Weight(f"blocks.{i}.down", (128, 256), cut=1)
        parts.append(Part("block", (Unit(f"blocks.{i}", (up, down)),), inside))
    parts.append(Part("head", tuple(units), after))
    return ModelSpec("by hand", tuple(parts), LENGTH, HIDDEN, VOCAB, heads=4, kv_heads=4)


def at(model, wanted, **plan):
    """The parts of the fullest instant, which is the wanted one, beside the states."""
    found = memory(model, ParallelPlan(**{"stage": 3, "micro_batch": 2} | plan))
    assert found.instant == wanted
    assert found.allocated == sum(found.parts.values())
    return {name: size for name, size in found.parts.items() if name not in ("parameters", "gradients", "optimizer")}


# --- one rank class, at stage 3 -------------------------------------------------------------------
# bf16 weights (2 bytes) are gathered; local gradients wait in buckets (2) and travel as fp32: a cast of the whole
# unit (4) and the shard that arrives (4). Tokens and labels are int64: 16 bytes.

BATCH = 16 * TOKENS
WIRE = {"ends": 4 * ENDS + 4 * ENDS / 2, "block": 4 * BLOCK + 4 * BLOCK / 2}


def test_the_head_s_logits_beside_all_that_is_kept_and_two_blocks_gathered_ahead():
    assert at(model_of("head"), "logits and loss", dp=2) == {
        "batch": BATCH,
        "activations": TOKENS * (EMBEDDING_KEPT + 4 * BLOCK_KEPT + HEAD_KEPT),
        "temporary": TOKENS * MUCH,
        "gathered": 2 * (ENDS + 2 * BLOCK),
    }


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
    assert at(model_of("embedding"), "backward of the embedding", dp=2) == {
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
    assert at(model_of(root=root), "end of the backward", dp=2, stage=2) == {
        "batch": BATCH,
        "bucket": 2 * (ENDS + root),
        "wire": WIRE["ends"] + 4 * root + 4 * root / 2,
    }
    assert at(model_of(root=root), "end of the backward", dp=2, stage=1, accumulate=2) == {
        "batch": 2 * BATCH, "wire": 4 * (ENDS + root) / 2
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
    assert head["gathered"] == 2 * (ENDS + 2 * BLOCK)


def test_gradients_that_autograd_holds_are_divided_by_tp():
    instants = (Instant(300.0, MUCH, gradients=6000.0), Instant(100.0, MUCH, gradients=0.0))
    for tp, precision, width in ((1, "bf16", 1), (2, "bf16", 1), (2, "fp32", 2)):
        found = at(model_of(instants=instants), "backward of blocks.3", dp=1, stage=0, tp=tp, precision=precision)
        assert found["temporary"] == width * (TOKENS * (300 / tp + MUCH) + 6000 / tp)


# --- the optimizer step ---------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [{"dp": 1}, {"dp": 16}, {"dp": 1, "precision": "fp16"}])
def test_masters_are_cast_a_unit_at_a_time(plan):
    found = at(model_of(), "optimizer step", micro_batch=1, stage=0, **plan)
    assert found == {"batch": BATCH / 2, "temporary": 4 * BLOCK}


@pytest.mark.parametrize("plan", [
    {"precision": "fp32"}, {"offload": "host"},  # nothing is cast, or not here
    {"dp": 16, "stage": 1, "accumulate": 2},  # a shard is less than what reductions hold
])  # fmt: skip
def test_elsewhere_another_instant_is_fuller_than_the_step(plan):
    assert memory(model_of(), ParallelPlan(**{"stage": 0} | plan)).instant != "optimizer step"


# --- activations ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "width"), [("bf16", 1), ("fp16", 1), ("fp32", 2), ("fp64", 4)])
def test_figures_are_of_two_bytes_and_blocks_of_others_are_as_much_wider(precision, width):
    found = at(model_of("block"), "backward of blocks.3", dp=1, stage=0, precision=precision)
    assert found["activations"] == TOKENS * (EMBEDDING_KEPT + 4 * width * BLOCK_KEPT)
    assert found["temporary"] == width * TOKENS * MUCH
    head = at(model_of("head"), "logits and loss", dp=1, stage=0, precision=precision)
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
    head = at(model_of("head"), "logits and loss", dp=1, stage=0, activations=policy)
    assert head["activations"] == TOKENS * (EMBEDDING_KEPT + 4 * kept + HEAD_KEPT)


def test_tp_divides_what_is_cut_and_sequence_parallelism_the_rest_but_gathered_inputs():
    """Attention's and the MLP's inputs, 2 bytes of a hidden element each, are gathered whole for the backward."""
    plan = {"dp": 1, "stage": 0, "tp": 2}
    found = at(model_of("head"), "logits and loss", **plan)
    assert found["activations"] == TOKENS * (3 / 2 + 5 + 4 * (101 / 2 + 211) + 401 / 2 + 43)
    assert found["temporary"] == TOKENS * MUCH / 2
    found = at(model_of("head"), "logits and loss", sequence_parallel=True, **plan)
    gathered = 4 * HIDDEN
    block = 101 / 2 + (211 - gathered) / 2 + gathered
    assert found["activations"] == TOKENS * ((3 + 5) / 2 + 4 * block + (401 + 43) / 2)


def test_what_was_traced_over_tp_counts_where_there_is_tp():
    over = replace(model_of().parts[1].operations, kept_cut=60.0, kept_whole=300.0)
    parts = tuple(
        replace(part, operations=replace(part.operations, over_tp=over)) if part.kind == "block" else part
        for part in model_of("head").parts
    )
    model = replace(model_of("head"), parts=parts)
    for tp, block in ((1, BLOCK_KEPT), (2, 60 / 2 + 300), (4, 60 / 4 + 300)):
        found = at(model, "logits and loss", dp=1, stage=0, tp=tp)
        assert found["activations"] == TOKENS * (3 / tp + 5 + 4 * block + 401 / tp + 43)


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


# --- buffers of reductions ------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "cast", "arrives"), [
    ({}, 4, 4),  # bf16 gradients travel as fp32
    ({"reduce_dtype": "bf16"}, 0, 2),
    ({"precision": "fp32"}, 0, 4),
    ({"precision": "fp64"}, 0, 8),
    ({"reduce": "every_step", "accumulate": 2}, 0, 4),  # summed in fp32 where they are
    ({"reduce": "every_step", "accumulate": 1}, 4, 4),
    ({"stage": 1, "accumulate": 1}, 4, 4),
    ({"stage": 1, "accumulate": 2}, 0, 4),
    ({"stage": 0}, 0, 4),
    ({"stage": 1, "precision": "bf16", "reduce_dtype": "bf16", "accumulate": 2}, 2, 2),
])  # fmt: skip
def test_two_reductions_are_under_way_as_they_travel(plan, cast, arrives):
    found = at(model_of("embedding"), "backward of the embedding", **{"dp": 4} | plan)
    assert found["wire"] == 2 * (cast * BLOCK + arrives * BLOCK / 4)


def test_a_rank_by_itself_sends_nothing():
    assert "wire" not in at(model_of("embedding"), "backward of the embedding", dp=1)


@pytest.mark.parametrize(("plan", "leaf"), [
    ({"accumulate": 2}, 2), ({"accumulate": 2, "reduce": "every_step"}, 4), ({"reduce": "every_step"}, 2),
])  # fmt: skip
def test_exact_reductions_hold_what_arrives_and_a_tree_s_sums(plan, leaf):
    """(dp - 1) / dp of a unit arrives as leaves or, summed over micro-batches, as fp32; log2(dp) + 1 fp32 shards for two."""
    found = at(model_of("embedding"), "backward of the embedding", dp=4, exact=True, **plan)
    assert found["wire"] == 2 * leaf * BLOCK * 3 / 4 + 3 * 4 * BLOCK / 4
    assert found["bucket"] == 2 * (2 * BLOCK + ENDS)


# --- around it ------------------------------------------------------------------------------------


def test_what_the_device_shows_is_reserved_blocks_and_contexts():
    alone, two = (memory(model_of(), ParallelPlan(dp=dp, stage=1)) for dp in (1, 2))
    for found, contexts in ((alone, 0.6e9), (two, 0.6e9 + 0.4e9)):
        assert found.reserved == pytest.approx(1.05 * found.allocated, rel=1e-12)
        assert found.device == pytest.approx(found.reserved + contexts, rel=1e-12)


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


# --- states ---------------------------------------------------------------------------------------


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
    # fp32 sums of leaves in a binary counter: floor(log2(M + 1)), and in a pipeline of two at least
    ({"accumulate": 8, "stage": 3, "dp": 4}, 3 * 4 / 4), ({"accumulate": 8, "stage": 1, "dp": 4}, 3 * 4),
    ({"accumulate": 1, "stage": 1, "dp": 4}, 4 / 4), ({"accumulate": 4, "stage": 1, "dp": 4, "pp": 2}, 2 * 4),
    ({"accumulate": 2, "stage": 1, "dp": 4, "pp": 2}, 4),
])  # fmt: skip
def test_exact_sums_of_leaves(plan, gradients):
    found = states(model_of(), ParallelPlan(exact=True, **plan))
    params = (2 * ENDS + BLOCKS * BLOCK) if "pp" not in plan else ENDS + 2 * BLOCK
    assert found.states.gradients == gradients * params


# --- pipelines ------------------------------------------------------------------------------------

PIPE = {"stage": 0, "pp": 2, "accumulate": 4}
STATE = 2 * TOKENS * HIDDEN  # a hidden state between parts, and its gradient


@pytest.mark.parametrize(("schedule", "held", "passed"), [
    ("gpipe", 4, 4),  # an input came for each; its gradient goes, and nothing tells that it has arrived
    ("1f1b", 1, 1 + 1),  # the gradient before is on its way
])  # fmt: skip
def test_a_pipeline_keeps_what_is_in_flight_and_what_is_passed_on(schedule, held, passed):
    found = at(model_of("head"), "logits and loss, pipeline stage 1 of 2", schedule=schedule, **PIPE)
    assert found["batch"] == 4 * BATCH
    assert found["activations"] == held * TOKENS * (2 * BLOCK_KEPT + HEAD_KEPT)
    assert found["passed"] == passed * STATE


def test_gradients_are_reduced_in_the_last_micro_batch_or_in_each_as_asked():
    """Before the last one two micro-batches are in flight: where all are reduced, that is the fullest."""
    plan = PIPE | {"dp": 2, "stage": 2}
    once, each = (
        at(model_of("embedding"), "backward of the embedding, pipeline stage 0 of 2", reduce=reduce, **plan)
        for reduce in ("every_step", "every_micro_batch")
    )
    assert once["activations"] == TOKENS * EMBEDDING_KEPT
    assert once["wire"] == 2 * 4 * BLOCK / 2  # summed in fp32: no cast
    assert "bucket" not in once
    assert each["activations"] == TOKENS * (2 * EMBEDDING_KEPT + 2 * BLOCK_KEPT)
    assert (each["bucket"], each["wire"]) == (2 * (2 * BLOCK + ENDS), 2 * WIRE["block"])


OUTPUTS = {"block": 128 + 128, "head": 64}  # elements of a token behind a part's weights: their gradients wait for W
FOR_WEIGHTS = {kind: 2 * TOKENS * elements for kind, elements in OUTPUTS.items()}
LOGITS = 4 * TOKENS * VOCAB  # in fp32, behind the last weight: let go by the backward of inputs
BLOCK_HEAD = TOKENS * (BLOCK_KEPT + HEAD_KEPT)
NORM = 20 * TOKENS * HIDDEN  # the backward of a norm: five fp32 of every hidden element


@pytest.mark.parametrize(("schedule", "stage", "others", "states"), [
    # Stage 1 runs parts 1 and 3: two forwards of part 1, then F and I of part 3 in turn; at the second I the first
    # still waits for its W. An input came for each of four, an output went from those of part 1; one is early, and
    # one gradient is on its way.
    ("zero-bubble", 1, 2 * TOKENS * BLOCK_KEPT + BLOCK_HEAD + FOR_WEIGHTS["block"] + FOR_WEIGHTS["head"] - LOGITS,
     2 * 2 + 2 + 1 + 1),
    # Stage 0 runs parts 0 and 3: three forwards of part 0, then F, I and W of part 3.
    ("zbv", 0, 3 * TOKENS * (EMBEDDING_KEPT + BLOCK_KEPT), 3 + 1 + 1 + 1),
])  # fmt: skip
def test_a_backward_of_inputs_keeps_all_and_gradients_for_that_of_weights(schedule, stage, others, states):
    many = 64  # micro-batches of 128 sequences: more than gradients of weights
    found = at(
        model_of(), f"end of the backward of inputs, pipeline stage {stage} of 2", schedule=schedule,
        **PIPE | {"micro_batch": 2 * many},
    )  # fmt: skip
    running = BLOCK_HEAD + FOR_WEIGHTS["head"] - LOGITS + FOR_WEIGHTS["block"]
    assert found["activations"] == many * (others + running)
    assert found["temporary"] == many * NORM
    assert found["passed"] == many * states * STATE


def test_gradients_of_weights_pile_up_in_a_part_s_backward_of_weights():
    """bf16 ones of block and head, in the W of the first micro-batch; its own outputs' gradients are what they are of."""
    name = "backward of weights, pipeline stage 0 of 2"
    found = at(model_of(), name, schedule="zbv", **PIPE | {"micro_batch": 8})
    assert found["temporary"] == 2 * (BLOCK + ENDS)
    assert found["activations"] == 4 * (3 * TOKENS * (EMBEDDING_KEPT + BLOCK_KEPT) + BLOCK_HEAD - LOGITS)


def test_sequence_parallelism_divides_a_norm_s_backward_and_outputs_that_are_whole():
    """A norm's weight is not cut, so that its output is a slice of the sequence."""
    found = {}
    for sequence in (False, True):
        model = model_of(root=16_384)
        plan = ParallelPlan(
            tp=2, pp=2, stage=0, accumulate=4, micro_batch=2048, schedule="zbv", sequence_parallel=sequence
        )
        found[sequence] = memory(model, plan)
        assert found[sequence].instant == "end of the backward of inputs, pipeline stage 0 of 2"
        assert found[sequence].parts["temporary"] == 1024 * NORM / (2 if sequence else 1)
    part0 = {False: 3 / 2 + 5 + 101 / 2 + 211, True: (3 + 5) / 2 + 101 / 2 + (211 - 64) / 2 + 64}
    part3 = {False: 101 / 2 + 211 + 401 / 2 + 43, True: 101 / 2 + (211 - 64) / 2 + 64 + (401 + 43) / 2}
    norm = 16_384
    for sequence, each in found.items():
        outputs = 128 / 2 + 128 + 64 / 2 + norm / (2 if sequence else 1)
        logits = 4 * VOCAB / 2
        assert each.parts["activations"] == 2048 * LENGTH * (
            3 * part0[sequence] + part3[sequence] + 2 * outputs - logits
        )


@pytest.mark.parametrize("schedule", ["zbv", "zero-bubble"])
def test_part_0_has_no_backward_of_inputs_and_that_of_its_weights_is_a_whole_one(schedule):
    """Four of its micro-batches are held, whose outputs went; a gradient came, one is on its way, a state is early."""
    found = at(model_of("embedding"), "backward of the embedding, pipeline stage 0 of 2", schedule=schedule, **PIPE)
    assert found["temporary"] == TOKENS * MUCH
    assert found["activations"] == TOKENS * (4 * EMBEDDING_KEPT + 3 * BLOCK_KEPT)
    assert found["passed"] == (4 + 1 + 1 + 1) * STATE


def test_the_head_of_a_split_backward_is_as_full_as_that_of_a_whole_one():
    found = at(model_of("head"), "logits and loss, pipeline stage 1 of 2", schedule="zero-bubble", **PIPE)
    assert found["temporary"] == TOKENS * MUCH
    waiting = BLOCK_HEAD + FOR_WEIGHTS["block"] + FOR_WEIGHTS["head"] - LOGITS
    assert found["activations"] == 2 * TOKENS * BLOCK_KEPT + waiting + BLOCK_HEAD


def test_recomputed_blocks_stay_whole_between_their_two_backwards():
    """What the backward of inputs ran again waits for that of weights, beside the kept inputs."""
    found = at(
        model_of("head"), "logits and loss, pipeline stage 1 of 2", schedule="zero-bubble", activations="full", **PIPE
    )
    kept = TOKENS * (INPUT + HEAD_KEPT)
    waiting = kept + TOKENS * BLOCK_KEPT + FOR_WEIGHTS["block"] + FOR_WEIGHTS["head"] - LOGITS
    assert found["activations"] == 2 * TOKENS * INPUT + waiting + kept
