"""A pipeline that failed on one rank is not used again; what all ranks refuse alike is no failure; nothing piles up."""

import gc

import pytest
import torch
from pipelines import build, engine_of, micro_batches, sum_of, weights_of

import zero3d
from zero3d.distributed.axis import Axis, leave_note, read_note
from zero3d.errors import ConfigError, Zero3dError
from zero3d.pipeline import runner
from zero3d.pipeline.failures import Failures
from zero3d.pipeline.stage import Stage

CHUNK = "model chunk 1 of 2 of the pipeline, on rank 1 of axis pp,"


def failing_once(fault):
    """A loss that fails when it is asked to, and how to ask; `fault`: it raises, or returns a sum without its weight."""
    bad = []

    def loss(output, given):
        if not bad:
            return sum_of(output, given)
        text = bad.pop()
        if fault == "no weight":
            return sum_of(output, given)[0]
        raise ValueError(text)

    return loss, bad


def error_of(call):
    """What a call raises: its type and text."""
    with pytest.raises(Exception) as error:
        call()
    return type(error.value).__name__, str(error.value)


def go_on_after(action, fault):
    loss, bad = failing_once(fault)
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2), loss=loss)
    engine.train_batch(micro_batches(0, 0))
    bad.append("a bad sample")
    given = micro_batches(1, 0)
    first = error_of(lambda: getattr(engine, action)(given))
    ids = given[0]["input_ids"]
    calls = [lambda: engine.train_batch(given), lambda: engine.evaluate(given), lambda: engine.generate(ids, 2),
             lambda: engine.save("nowhere"), lambda: engine.export("nowhere")]  # fmt: skip
    again = [error_of(call) for call in calls]
    return first, [*again, error_of(lambda: engine_of(build("net", 4), engine.mesh))]


@pytest.mark.parametrize(
    ("action", "fault", "why"),
    [
        ("train_batch", "raises", "ValueError: a bad sample"),
        pytest.param("evaluate", "raises", "ValueError: a bad sample", marks=pytest.mark.long),
        ("train_batch", "no weight", "TypeError: iteration over a 0-d tensor"),
    ],
)
def test_after_a_loss_function_failed_every_further_call_raises_at_once_on_all_ranks(ranks, action, fault, why):
    results = ranks(2, go_on_after, action, fault, group_timeout=3.0)
    for rank, (first, again) in enumerate(results):
        assert first[1].startswith(f"{CHUNK} failed: {why}"), rank
        for kind, text in again:
            assert kind == "Zero3dError"
            assert f"this pipeline failed before ({CHUNK} failed: {why})" in text
            assert "engine.load in new processes" in text


def fail_to_pick():
    """Generation fails on the rank that picks tokens: with NaN for logits there is nothing to draw from."""
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2))
    with engine.full_params(), torch.no_grad():
        for p in engine.module.parameters():
            p.fill_(float("nan"))
    ids = micro_batches(0, 0)[0]["input_ids"]
    return [error_of(lambda: engine.generate(ids, 3, do_sample=True)) for _ in range(2)]


def test_a_failure_while_tokens_are_picked_reaches_the_other_rank_and_is_not_forgotten(ranks):
    (peer, peer_again), (own, own_again) = ranks(2, fail_to_pick, group_timeout=3.0)
    assert own[0] == "RuntimeError"
    assert "rank 1 of axis pp failed: RuntimeError" in peer[1]
    for kind, text in (peer_again, own_again):
        assert kind == "Zero3dError"
        assert "failed before (rank 1 of axis pp failed: RuntimeError" in text


REFUSED = {
    "top_k=500 must be a whole number from 1 to the vocabulary's 64: pass one of them": {"top_k": 500},
    "top_k=0 must be": {"top_k": 0},
    "temperature=0.0 divides logits": {"temperature": 0.0},
    "temperature='hot' divides logits": {"temperature": "hot"},
}


def refuse_and_go_on():
    engine = engine_of(build("llama", 4), zero3d.Mesh(pp=2))
    given, vocabulary = micro_batches(0, 0), engine.pipeline.vocabulary
    ids = given[0]["input_ids"]
    options = [options | {"do_sample": True} for options in REFUSED.values()]
    texts = [error_of(lambda one=one: engine.generate(ids, 2, **one)) for one in options]
    texts += [error_of(lambda: engine.train_batch([])), error_of(lambda: engine.evaluate([(ids,)]))]
    greedy = engine.generate(ids, 2, temperature=0.0)
    widest = engine.generate(ids, 2, do_sample=True, top_k=vocabulary)
    return texts, vocabulary, greedy.shape == widest.shape, float(engine.train_batch(given))


def test_what_all_ranks_refuse_alike_is_no_failure(ranks):
    for texts, vocabulary, same, loss in ranks(2, refuse_and_go_on):
        for (kind, text), words in zip(texts, [*REFUSED, "was given no micro-batches", "got a tuple"], strict=True):
            assert kind == "ConfigError"
            assert words.replace("64", str(vocabulary)) in text
        assert same
        assert loss > 0


def begin_anew():
    leave_note("an old reason")
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2))
    before = read_note()
    engine.train_batch(micro_batches(0, 0))
    return before, read_note()


def test_what_failed_before_an_engine_was_built_is_not_quoted(ranks):
    assert ranks(2, begin_anew) == [("", ""), ("", "")]


def say_it_per_batch():
    model = build("qwen3_moe", 4)
    engine = engine_of(model, zero3d.Mesh(pp=2))
    plain = micro_batches(0, 0)
    routed = [row | {"output_router_logits": True} for row in plain]
    with pytest.raises(ConfigError, match=r"set model.config.output_router_logits = True before zero3d.Engine"):
        engine.train_batch(routed)
    with pytest.raises(ConfigError, match="leave it out of the batches"):
        engine.evaluate(routed)
    return float(engine.train_batch([row | {"output_router_logits": False} for row in plain]))


def test_router_logits_asked_for_by_a_batch_are_refused_with_what_to_type(ranks):
    assert all(loss > 0 for loss in ranks(2, say_it_per_batch))


def change_lengths(schedule):
    """After the first and the last of steps of ever other lengths, bytes of leaves that pass between chunks."""
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2), schedule=schedule)
    gc.disable()  # what only it frees lives for many steps
    try:
        sizes = []
        for step, length in enumerate((20, 8, 10, 12, 14, 20)):
            engine.train_batch(micro_batches(step, 0, length=length))
            if length < 20:
                continue
            leaves = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.is_leaf and t.requires_grad]
            leaves = [t for t in leaves if t.device.type == "cpu"]  # shapes alone, on meta, take nothing
            sizes.append(sum(t.untyped_storage().nbytes() for t in leaves if t.dim() == 3 and t.shape[-1] == 48))
    finally:
        gc.enable()
    return sizes[0], sizes[-1]


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.long), "zbv"])
def test_changing_lengths_leave_nothing_behind(ranks, schedule):
    assert all(last == first for first, last in ranks(2, change_lengths, schedule))


def alternate(pp, schedule, lazily):
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=pp), schedule=schedule if pp > 1 else None)
    losses, shapes = [], [(9, 4), (6, 4), (9, 4), (9, 2), (6, 4)]
    for step, (length, count) in enumerate(shapes):
        given = micro_batches(step, 0, count, length=length)
        losses.append(float(engine.train_batch(iter(given) if lazily else given)))
        losses.append(float(engine.evaluate(micro_batches(step, 0, 1, length=7))))
    return losses, weights_of(engine)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.long), "zbv"])
def test_lengths_and_numbers_that_alternate_and_any_iterable_give_the_bits_of_no_pipeline(ranks, schedule):
    whole, weights = ranks(1, alternate, 1, "1f1b", True)[0]
    for losses, own in ranks(2, alternate, 2, schedule, schedule == "zbv"):
        assert losses == whole
        assert all(torch.equal(value, weights[name]) for name, value in own.items())


def count_starts(steps, most):
    """Which of steps of (length, micro-batches) started a schedule, at which all stages vote; evaluations between."""
    engine = engine_of(build("net", 4), zero3d.Mesh(pp=2), accumulate=2)
    prepare, started, now = Stage._prepare_forward_infra, [], []

    def noted(stage, *args, **kwargs):
        now.append(stage.stage_index)
        return prepare(stage, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stage, "_prepare_forward_infra", noted)
        patch.setattr(runner, "KEPT", most)
        for step, (length, count) in enumerate(steps):
            now.clear()
            engine.train_batch(micro_batches(step, 0, count, length=length))
            started.append(len(now))
            engine.evaluate(micro_batches(step, 0, 1, length=5))
    return started


@pytest.mark.parametrize(("steps", "most", "started"), [
    ([(9, 2), (6, 2), (9, 2), (9, 3), (6, 2), (9, 2), (9, 3)], 16, [1, 1, 0, 1, 0, 0, 0]),
    ([(9, 2), (6, 2), (9, 2), (7, 2), (9, 2), (6, 2)], 2, [1, 1, 0, 1, 0, 1]),  # 7 took the place of 6, used before 9
])  # fmt: skip
def test_a_shape_that_comes_back_is_run_by_the_schedule_it_had(ranks, steps, most, started):
    assert ranks(2, count_starts, steps, most) == [started] * 2


def test_a_broken_axis_is_refused_with_the_reason():
    axis = Axis("pp", 0, 2, broken="model chunk 0 of 2 failed")
    with pytest.raises(Zero3dError, match=r"failed before \(model chunk 0 of 2 failed\).*--resume auto"):
        Failures(axis, 2)
