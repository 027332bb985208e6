"""Pipelines beyond a step of equal micro-batches: evaluation, generation, overflow, experts, leaks, failures, refusals."""

from contextlib import nullcontext
from functools import partial
from unittest import mock

import blueprints
import pytest
import torch
import torch.distributed as dist
from models import batch
from pipelines import SCHEDULES, build, engine_of, layers_for, micro_batches, modules_of, schedule_of, weights_of
from tensors import assert_near

import zero3d.engine.options
from zero3d.errors import ConfigError
from zero3d.memory.arena import STATES, TRANSIENT
from zero3d.precision import LossScaling, Precision

GEN = 4


@pytest.fixture(scope="module")
def whole(ranks):
    """What a case returns without a pipeline, on dp ranks, each once."""
    found = {}

    def run(case, *args, dp=1):
        key = case, args, dp
        if key not in found:
            found[key] = ranks(dp, case, *args)
        return found[key]

    return run


def evaluate_and_generate(family, dp, pp, stage, schedule):
    """Mean losses before and after a step, of unequal micro-batches; greedy and sampled tokens."""
    mesh = zero3d.Mesh(dp=dp, pp=pp)
    engine = engine_of(build(family, 4), mesh, stage=stage, schedule=schedule_of(mesh, schedule))
    given = [*micro_batches(7, mesh.place.dp, 2), *micro_batches(8, mesh.place.dp, 1, size=1, length=5)]
    losses = [float(engine.evaluate(given))]
    engine.train_batch(micro_batches(0, mesh.place.dp))
    losses.append(float(engine.evaluate(given)))
    assert all(module.training for module in engine.module.modules())
    ids = batch(3, mesh.place.dp)
    forward = zero3d.engine.generation.generate

    def logits(prefix):
        return zero3d.engine.generation.next_logits(engine.module(prefix))

    tokens = []
    for options in ({}, {"do_sample": True, "temperature": 0.7, "top_k": 9}):
        torch.manual_seed(5)
        if pp == 1:  # Hugging Face's own generate draws other numbers
            ending = zero3d.engine.generation.Ending.of(engine.module)
            with engine._evaluating(True), torch.no_grad():
                tokens.append(forward(logits, lambda t: t, ids, GEN, ending, **options).tolist())
        else:
            tokens.append(engine.generate(ids, max_new_tokens=GEN, **options).tolist())
    return losses, tokens


@pytest.mark.parametrize(("family", "dp", "pp", "stage", "schedule"), [
    ("net", 1, 2, 3, "1f1b"), ("llama", 1, 2, 2, "interleaved"),
    *(pytest.param("net", *case, marks=pytest.mark.long) for case in ((2, 2, 3, "zbv"), (1, 4, 0, "gpipe"))),
])  # fmt: skip
def test_evaluation_and_generation_in_a_pipeline_equal_none(ranks, whole, family, dp, pp, stage, schedule):
    wanted = whole(evaluate_and_generate, family, dp, 1, 0, "1f1b", dp=dp)
    for rank, results in enumerate(ranks(dp * pp, evaluate_and_generate, family, dp, pp, stage, schedule)):
        assert results == wanted[rank % dp]


def generate_wrongly():
    engine = engine_of(build("net", 2), zero3d.Mesh(pp=2))
    texts = []
    for call in (
        lambda: engine.generate(batch(0), num_beams=4),
        lambda: engine(input_ids=batch(0)),
        lambda: engine.backward(torch.zeros((), requires_grad=True)),
        lambda: engine.train_batch([]),
        lambda: engine.train_batch([batch(0), batch(1)]),
        lambda: engine.evaluate([(batch(0),)]),
        lambda: engine.train_batch([*micro_batches(0, 0, 3), *micro_batches(0, 0, 1, size=1)]),
        lambda: engine.train_batch(micro_batches(0, 0, 1)),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        texts.append(str(error.value))
    return texts, float(engine.train_batch(micro_batches(0, 0, 2)))


def test_what_a_pipeline_cannot_do_is_refused_with_what_to_type(ranks):
    words = ["has no option 'num_beams'", "engine.train_batch(micro_batches)", "engine.train_batch(micro_batches)",
             "was given no micro-batches", "mappings with 'input_ids'", "got a tuple", "have one shape, and have [(1, 9), (2, 9)]",
             "a micro-batch for each of 2 pipeline stages, and a step has 1: pass 2 or more micro-batches (in a file"]  # fmt: skip
    for texts, loss in ranks(2, generate_wrongly):
        assert [word in text for word, text in zip(words, texts, strict=True)] == [True] * len(words), texts
        assert 3 < loss < 5  # the engine goes on after a refusal


def micro_batch_numbers(pp, schedule, layers, counts):
    """Steps of one engine, each of another number of micro-batches: loss and norm, or what is said. Then another loss."""
    mesh = zero3d.Mesh(pp=pp)
    engine = engine_of(build("net", layers), mesh, schedule=schedule_of(mesh, schedule))
    results = {}
    for count in counts:
        try:
            loss = float(engine.train_batch(micro_batches(count, 0, count)))
            results[count] = loss, float(engine.last_step.grad_norm)
        except ConfigError as error:
            results[count] = str(error)
    return results, float(engine.evaluate(micro_batches(0, 0)))


ROUNDS = ("interleaved", "zero-bubble")
COUNTS = {2: (1, 2, 3, 5), 4: (1, 2, 3, 5, 9)}
MORE = {2: (7,), 4: (10,)}  # for schedules that go in rounds
REFUSED = {
    (2, "1f1b"): {1: "each of 2 pipeline stages, and a step has 1: pass 2 or more micro-batches"},
    (4, "1f1b"): {count: f"each of 4 pipeline stages, and a step has {count}: pass 4 or more" for count in (1, 2, 3)},
    (2, "rounds"): {5: "5 // 2 = 2 rounds, which do not divide 5: pass 4 or 6 micro-batches",
                    7: "7 // 2 = 3 rounds, which do not divide 7: pass 6 or 8 micro-batches"},
    (4, "rounds"): {9: "9 // 4 = 2 rounds, which do not divide 9: pass 8 or 10 micro-batches"},
}  # fmt: skip


@pytest.mark.parametrize(("pp", "schedule"), [
    (2, "1f1b"), (2, "interleaved"), (2, "zbv"),
    *(pytest.param(2, schedule, marks=pytest.mark.long) for schedule in ("gpipe", "zero-bubble")),
    *(pytest.param(4, schedule, marks=pytest.mark.long) for schedule in SCHEDULES),
])  # fmt: skip
def test_every_number_of_micro_batches_is_right_or_refused(ranks, whole, pp, schedule):
    counts = COUNTS[pp] + MORE[pp] * (schedule in ROUNDS)
    refused = REFUSED.get((pp, "rounds" if schedule in ROUNDS else schedule), {})
    layers, taken = layers_for(pp, schedule), tuple(count for count in counts if count not in refused)
    wanted, last = whole(micro_batch_numbers, 1, "1f1b", layers, taken)[0]
    for results, loss in ranks(pp, micro_batch_numbers, pp, schedule, layers, counts):
        assert tuple(results) == counts
        for count, result in results.items():
            if count in refused:
                assert refused[count] in result
            else:
                assert result == wanted[count], count
        assert loss == last  # what is refused changes nothing, and the last step's update is right, too


def scaled_steps(pp, initial, overflows=(), steps=2):
    """fp16 steps; block 3, on the last stage of two, overflows in some.

    By step: applied, whether weights moved, scale, norm, loss; then the weights, and the largest gradient that came
    in block 3 in the first step.
    """
    model, step, arrived = build("net", 4), 0, []
    weight = model.layers[3].up.weight
    weight.register_hook(lambda grad: arrived.append(float(grad.abs().max())) or grad)
    weight.register_hook(lambda grad: grad * float("inf") if step in overflows else grad)
    precision = Precision("fp16", LossScaling(initial=initial, hysteresis=1, window=2))
    sgd = partial(torch.optim.SGD, lr=0.1)
    engine = engine_of(model, zero3d.Mesh(pp=pp), stage=2, precision=precision, optimizer=sgd, clip_norm=0.2)
    found = []
    for step in range(steps):
        before = weights_of(engine)
        loss = float(engine.train_batch(micro_batches(step, 0)))
        moved = any(not torch.equal(value, before[name]) for name, value in weights_of(engine).items())
        result = engine.last_step
        found.append((bool(result.applied), moved, float(result.loss_scale), float(result.grad_norm), loss))
    return found, weights_of(engine), arrived[0] if arrived else None


def test_an_fp16_overflow_on_one_pipeline_stage_skips_the_step_on_all_and_halves_the_scale(ranks):
    results = ranks(2, scaled_steps, 2, 16.0, (1, 2), 4)
    for steps, _, _ in results:
        assert [step[:3] for step in steps] == [
            (True, True, 16.0),
            (False, False, 8.0),
            (False, False, 4.0),
            (True, True, 4.0),
        ]
    (first, _, nothing), (last, _, _) = results
    assert [step[2:] for step in first[::3]] == [step[2:] for step in last[::3]]
    assert nothing is None  # block 3 is on the last stage


def test_a_scaled_loss_in_a_pipeline_gives_what_an_unscaled_one_does(ranks):
    """Gradients travel 256 times as large, and norms, losses and weights are those without to rounding."""
    plain, scaled, whole = (ranks(pp, scaled_steps, pp, scale) for pp, scale in ((2, 1.0), (2, 256.0), (1, 256.0)))
    assert scaled[1][2] == pytest.approx(256 * plain[1][2], rel=1e-2)
    for rank in range(2):
        for step, other, alone in zip(scaled[rank][0], plain[rank][0], whole[0][0], strict=True):
            assert step[0]
            assert step[3:] == pytest.approx(other[3:], rel=1e-3)
            assert step[2:] == alone[2:]  # of a pipeline and of none the same bits
            assert step[3] > 0.2  # clipping was active: a scale left in the norm would show in the weights
        for name, value in scaled[rank][1].items():
            assert torch.equal(value, whole[0][1][name])
        assert_near(scaled[rank][1], plain[rank][1], 2**-10)  # fp16's unit in the last place


def curve(pp, precision, steps, stage=3, **options):
    engine = engine_of(build("llama", 4), zero3d.Mesh(pp=pp), precision=precision, stage=stage, **options)
    return [float(engine.train_batch(micro_batches(step, 0))) for step in range(steps)]


@pytest.mark.long
def test_bf16_in_a_pipeline_gives_the_bits_of_no_pipeline(ranks):
    whole = ranks(1, curve, 1, "bf16", 2)[0]
    for losses in ranks(2, curve, 2, "bf16", 2):
        assert losses == whole


def some_steps(schedule, release, poisoned):
    """Losses; bytes held and users after every step."""
    with blueprints.poisoned() if poisoned else nullcontext():
        engine = engine_of(build("net", 4), zero3d.Mesh(pp=2), schedule=schedule, release=release, stage=3)
    losses, held = [], []
    for step in range(4):
        if step == 2:
            engine.evaluate(micro_batches(0, 0))
            assert not any(unit.users for unit in engine.units)
        losses.append(float(engine.train_batch(micro_batches(step, 0))))
        users = sum(len(unit.users) for unit in engine.units)
        held.append(([float(engine.arena.live(category)) for category in (*STATES, *TRANSIENT)], users))
    return losses, held


@pytest.mark.parametrize(("schedule", "release", "poisoned"), [
    pytest.param("zero-bubble", "every_use", True, marks=pytest.mark.long),
    ("zbv", "every_use", True), ("1f1b", "every_step", False),
])  # fmt: skip
def test_steps_leave_memory_and_users_at_base(ranks, schedule, release, poisoned):
    whole = None
    for losses, held in ranks(2, some_steps, schedule, release, poisoned):
        assert all(loss == loss for loss in losses)
        assert whole in (None, losses)
        whole = losses
        assert all(bytes_and_users == held[0] for bytes_and_users in held)
        assert held[0][1] == 0


class Broken(RuntimeError):
    pass


def fail_in_a_stage(where):
    engine = engine_of(build("net", 4), zero3d.Mesh(dp=where[0], pp=2), stage=3)
    engine.train_batch(micro_batches(0, 0))

    def fail(module, args):
        raise Broken("a broken block")

    if engine.mesh.rank == where[1]:
        list(modules_of(engine)[0].modules())[-1].register_forward_pre_hook(fail)
        block = next(m for m in modules_of(engine)[0].modules() if type(m).__name__ == "Block")
        block.register_forward_pre_hook(fail)
    engine.train_batch(micro_batches(1, 0))


@pytest.mark.parametrize("where", [(1, 0), (1, 1)], ids=str)
def test_an_exception_in_one_chunk_ends_all_ranks_with_its_name(ranks, where, capfd):
    answers = ranks(2 * where[0], fail_in_a_stage, where, group_timeout=3.0, check=False)
    name = f"model chunk {where[1]} of 2 of the pipeline, on rank {where[1]} of axis pp, failed: Broken: a broken block"
    for _, error in answers:
        assert error is not None
        assert name in error
    assert "Full Schedule" not in capfd.readouterr().err


def experts(pp, stage, schedule):
    """A mixture of experts with its auxiliary loss, which needs the router logits of all layers."""
    model = build("qwen3_moe", 4)
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    mesh = zero3d.Mesh(pp=pp)
    engine = engine_of(model, mesh, stage=stage, schedule=schedule_of(mesh, schedule), loss=None)
    given = [{"input_ids": row["input_ids"], "labels": row["input_ids"]} for row in micro_batches(0, 0)]
    losses = [float(engine.evaluate(given)), *(float(engine.train_batch(given)) for _ in range(2))]
    return [*losses, float(engine.last_step.grad_norm)], weights_of(engine)


@pytest.mark.parametrize("schedule", [pytest.param("1f1b", marks=pytest.mark.long), "zero-bubble"])
def test_the_auxiliary_loss_of_experts_is_that_of_the_whole_model(ranks, whole, schedule):
    wanted, weights = whole(experts, 1, 0, "1f1b")[0]
    for numbers, own in ranks(2, experts, 2, 3, schedule):
        assert numbers == wanted
        assert all(torch.equal(value, weights[name]) for name, value in own.items())


def ready_optimizer(pp, schedule):
    model = build("net", 4)
    split = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() == 1]]
    optimizer = torch.optim.AdamW([{"params": split[0]}, {"params": split[1], "weight_decay": 0.0}], lr=1e-2)
    mesh = zero3d.Mesh(pp=pp)
    engine = engine_of(model, mesh, schedule=schedule_of(mesh, schedule), optimizer=optimizer)
    return [float(engine.train_batch(micro_batches(step, 0))) for step in range(2)]


def test_an_optimizer_built_beforehand_works_in_a_pipeline(ranks):
    whole = ranks(1, ready_optimizer, 1, "1f1b")[0]
    assert ranks(2, ready_optimizer, 2, "zbv") == [whole, whole]


class Loose(torch.nn.Module):
    """Blocks, but in no list."""

    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.ReLU()

    def forward(self, input_ids):
        return self.second(self.first(self.embed(input_ids)))


def build_wrongly():
    texts = []
    for make in (
        lambda: engine_of(build("net", 3), zero3d.Mesh(pp=2), schedule="zbv"),
        lambda: engine_of(build("net", 1), zero3d.Mesh(pp=2)),
        lambda: engine_of(Loose(), zero3d.Mesh(pp=2)),
        lambda: engine_of(build("net", 4), zero3d.Mesh(pp=2), schedule="dualpipe"),
        lambda: engine_of(build("net", 4), zero3d.Mesh(), schedule="1f1b"),
        lambda: engine_of(build("net", 4), zero3d.Mesh(), schedule="zbv", blocks="layers"),
    ):
        with pytest.raises(ConfigError) as error:
            make()
        texts.append(str(error.value))
    return texts


def test_models_and_schedules_that_do_not_fit_are_refused_with_what_to_type(ranks):
    words = ["'zbv' puts 2 model chunks on each of 2 pipeline stages = 4 chunks, and layers has 3 blocks: pass schedule='1f1b'",
             "pp=2 pipeline stages need a block each, and layers has 1: pass pp=1",
             "Put its blocks in an nn.ModuleList, or pass pp=1",
             "'dualpipe' is unknown: type one of gpipe, 1f1b",
             "schedule='1f1b' is for a pipeline, and pp is 1: pass mesh=zero3d.Mesh(pp=2)",
             "schedule='zbv', blocks='layers' are for a pipeline, and pp is 1"]  # fmt: skip
    for texts in ranks(2, build_wrongly):
        assert all(word in text for word, text in zip(words, texts, strict=True)), texts


def sent_one_by_one(schedule):
    """Calls of a first step that send or receive a tensor by itself, for which NCCL makes communicators of two ranks."""
    mesh, calls = zero3d.Mesh(pp=2), []
    engine = engine_of(build("gpt2", layers_for(2, schedule)), mesh, stage=1, schedule=schedule_of(mesh, schedule))

    def noted(*_, **__):
        calls.append(1)

    with mock.patch.object(dist, "send", noted), mock.patch.object(dist, "recv", noted):
        engine.train_batch(micro_batches(0, 0))
    return calls


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_ranks_of_a_pipeline_do_not_vote_on_shapes_that_all_of_them_know(ranks, schedule):
    assert ranks(2, sent_one_by_one, schedule) == [[], []]
