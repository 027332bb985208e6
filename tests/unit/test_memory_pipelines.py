"""The memory model of pipelines by hand: what is in flight, passed on, and kept between two backwards."""

from math import isclose

import pytest
from by_hand import (
    BATCH,
    BLOCK,
    BLOCK_KEPT,
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

from zero3d.tools.plan.in_flight import moments
from zero3d.tools.plan.memory import Ranks, memory
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import ParallelPlan

PIPE = {"stage": 0, "pp": 2, "accumulate": 4}
STATE = 2 * TOKENS * HIDDEN  # a hidden state between parts, and its gradient


@pytest.mark.parametrize(("schedule", "held", "passed"), [
    ("gpipe", 3, 4),  # in the second, beside gradients; an input came for each, its gradient goes and nothing tells so
    ("1f1b", 1, 1 + 1),  # the gradient before is on its way
])  # fmt: skip
def test_a_pipeline_keeps_what_is_in_flight_and_what_is_passed_on(schedule, held, passed):
    found = fullest("head", 1, schedule=schedule, **PIPE)
    assert found["batch"] == 4 * BATCH
    assert found["activations"] == held * TOKENS * (2 * BLOCK_KEPT + HEAD_KEPT)
    assert found["passed"] == passed * STATE


def test_gradients_are_reduced_in_the_last_micro_batch_or_in_each_as_asked():
    """Before the last one two micro-batches are in flight: where all are reduced, that is the fullest."""
    plan = PIPE | {"dp": 2, "stage": 2}
    native = {"reduce_scatter": "native", "reduce_dtype": "bf16"}
    once = fullest("embedding", 0, reduce="every_step", **native, **plan)
    each = fullest("embedding", 0, reduce="every_micro_batch", **plan)
    assert once["activations"] == TOKENS * EMBEDDING_KEPT
    assert once["wire"] == 2 * (2 * BLOCK + 2 * BLOCK / 2)  # summed in fp32, cast to be sent
    assert "bucket" not in once
    assert once["passed"] == (1 + 1) * STATE  # what went out, and its gradient
    assert each["passed"] == (2 + 1) * STATE
    assert each["activations"] == TOKENS * (2 * EMBEDDING_KEPT + 2 * BLOCK_KEPT)
    assert (each["bucket"], each["wire"]) == (2 * (2 * BLOCK + ENDS), 2 * WIRE["block"])


OUTPUTS = {"block": 128 + 128, "head": 64}  # elements of a token behind a part's weights: their gradients wait for W
FOR_WEIGHTS = {kind: 2 * TOKENS * elements for kind, elements in OUTPUTS.items()}
LOGITS = 4 * TOKENS * VOCAB  # in fp32, behind the last weight: let go by the backward of inputs
BLOCK_HEAD = TOKENS * (BLOCK_KEPT + HEAD_KEPT)
NORM = 20 * TOKENS * HIDDEN  # the backward of a norm: five fp32 of every hidden element


@pytest.mark.parametrize(("schedule", "stage", "others", "passed"), [
    # Stage 1 runs parts 1 and 3: two forwards of part 1, then F and I of part 3 in turn; at the second I the first
    # still waits for its W. An input came for each of four, an output went from those of part 1; one is early, and
    # one gradient is on its way.
    ("zero-bubble", 1, 2 * TOKENS * BLOCK_KEPT + BLOCK_HEAD + FOR_WEIGHTS["block"] + FOR_WEIGHTS["head"] - LOGITS,
     2 * 2 + 2 + 1 + 1),
    # Stage 0 runs parts 0 and 3: three forwards of part 0, then F, I and W of part 3.
    ("zbv", 0, 3 * TOKENS * (EMBEDDING_KEPT + BLOCK_KEPT), 3 + 1 + 1 + 1),
])  # fmt: skip
def test_a_backward_of_inputs_keeps_all_and_gradients_for_that_of_weights(schedule, stage, others, passed):
    many = 64  # micro-batches of 128 sequences: more than gradients of weights
    found = at(
        model_of(), f"end of the backward of inputs, pipeline stage {stage} of 2", schedule=schedule,
        **PIPE | {"micro_batch": 2 * many},
    )  # fmt: skip
    running = BLOCK_HEAD + FOR_WEIGHTS["head"] + FOR_WEIGHTS["block"]
    assert found["activations"] == many * (others + running)
    assert found["temporary"] == many * NORM
    assert found["passed"] == many * passed * STATE


def test_where_a_v_turns_nothing_is_passed_on_and_what_waits_has_its_gradient():
    """At the last I of part 1 another of its own waits for its W, and one of part 2: all three with all they kept.

    For part 1 two inputs came, for part 2 one output went, whose gradient is there; one is early, one on its way.
    """
    many = 512
    found = at(
        model_of(), "end of the backward of inputs, pipeline stage 1 of 2", schedule="zbv",
        **PIPE | {"micro_batch": 2 * many},
    )  # fmt: skip
    assert found["activations"] == many * 3 * (TOKENS * BLOCK_KEPT + FOR_WEIGHTS["block"])
    assert found["passed"] == many * (2 + 1 + 1 + 1 + 1) * STATE


def test_gradients_of_weights_pile_up_in_a_part_s_backward_of_weights():
    """Ones of two bytes of block and head, in the W of the first micro-batch; its own outputs' gradients are what they are of."""
    name = "backward of weights, pipeline stage 0 of 2"
    found = at(model_of(), name, schedule="zbv", precision="fp16", **PIPE | {"micro_batch": 8})
    assert found["temporary"] == 2 * (BLOCK + ENDS)
    assert found["activations"] == 4 * (3 * TOKENS * (EMBEDDING_KEPT + BLOCK_KEPT) + BLOCK_HEAD - LOGITS)


def test_sequence_parallelism_divides_a_norm_s_backward_and_leaves_the_last_norm_s_output_whole():
    """Behind the last block a rank has whole sequences again."""
    found = {}
    for sequence in (False, True):
        model = model_of(root=16_384)
        plan = ParallelPlan(
            tp=2, pp=2, stage=0, accumulate=4, micro_batch=2048, schedule="zbv", sequence_parallel=sequence
        )
        found[sequence] = memory(model, plan)
        assert found[sequence].instant == "end of the backward of inputs, pipeline stage 0 of 2"
        assert found[sequence].parts["temporary"] == 1024 * NORM / (2 if sequence else 1)
    norm = 16_384
    for sequence, bytes_ in found.items():
        embedding, block, head = (kept(kind, 2, sequence) for kind in ("embedding", "block", "head"))
        outputs = 128 / 2 + 128 + 64 / 2 + norm
        assert bytes_.parts["activations"] == 2048 * LENGTH * (3 * (embedding + block) + (block + head) + 2 * outputs)


@pytest.mark.parametrize("schedule", ["zbv", "zero-bubble"])
def test_part_0_has_no_backward_of_inputs_and_that_of_its_weights_is_a_whole_one(schedule):
    """Four of its micro-batches are held, whose outputs went; a gradient came, one is on its way, a state is early."""
    found = fullest("embedding", 0, schedule=schedule, **PIPE)
    assert found["temporary"] == TOKENS * MUCH
    assert found["activations"] == TOKENS * (4 * EMBEDDING_KEPT + 3 * BLOCK_KEPT)
    assert found["passed"] == (4 + 1 + 1 + 1) * STATE


def test_the_head_of_a_split_backward_is_as_full_as_that_of_a_whole_one():
    found = fullest("head", 1, schedule="zero-bubble", **PIPE)
    assert found["temporary"] == TOKENS * MUCH
    waiting = BLOCK_HEAD + FOR_WEIGHTS["block"] + FOR_WEIGHTS["head"] - LOGITS
    assert found["activations"] == 2 * TOKENS * BLOCK_KEPT + waiting + BLOCK_HEAD


def test_recomputed_blocks_stay_whole_between_their_two_backwards():
    """What the backward of inputs ran again waits for that of weights, beside the kept inputs."""
    found = fullest("head", 1, schedule="zero-bubble", activations="full", **PIPE)
    kept = TOKENS * (INPUT + HEAD_KEPT)
    waiting = kept + TOKENS * BLOCK_KEPT + FOR_WEIGHTS["block"] + FOR_WEIGHTS["head"] - LOGITS
    assert found["activations"] == 2 * TOKENS * INPUT + waiting + kept


@pytest.mark.parametrize("schedule", ["interleaved", "zero-bubble", "zbv"])
@pytest.mark.parametrize("activations", ["none", "full"])
@pytest.mark.parametrize("head", [512, 1 << 15])
def test_bounds_leave_out_no_rank_and_no_moment_that_is_the_fullest(schedule, activations, head):
    """Of small vocabularies a rank in the middle is the fullest, of large ones that of the logits."""
    model = gpt(17, 256, 4, head, 256)
    for pp, accumulate in ((2, 4), (4, 16), (8, 8)):
        plan = ParallelPlan(pp=pp, accumulate=accumulate, schedule=schedule, activations=activations)
        alone = [Ranks(model, plan, (stage,)) for stage in range(pp)]
        for rank in alone:
            fullest = rank._backwards()
            assert fullest
            for turn, reduces, start, others, passed in fullest:
                alike = [moment for moment in moments(plan, rank.stages[0]) if moment.kind == start.moment.kind]
                alike = [each for each in alike if each.chunk == start.moment.chunk and each.final == reduces]
                alike = [each for each in alike if each.come == start.moment.come]
                bytes_of = [bytes_at(moment, turn, rank) for moment in alike]
                assert others + passed == max(bytes_of)
                assert others + passed == bytes_at(start.moment, turn, rank)
            assert rank.fullest.peak.total <= rank.at_most()
        most = max(sum(rank.base.values()) + rank.fullest.peak.total for rank in alone)
        assert isclose(memory(model, plan).allocated, most)


def bytes_at(moment, turn, rank):
    """Bytes that other micro-batches keep at a moment, and of what is passed on, one by one."""
    chunks = zip(moment.in_flight, moment.waiting, rank._sizes, strict=True)
    kept = sum((alive - waits) * whole + waits * half for alive, waits, (whole, half) in chunks)
    states, gradients = rank._passes()
    passed = len(states) - 1 + gradients[turn] + moment.under_way
    passed += sum(alive * each for alive, each in zip(moment.in_flight, states, strict=True))
    passed += sum(waits * each for waits, each in zip(moment.waiting, gradients, strict=True))
    return kept - rank._sizes[turn][0] + passed * rank._hidden
