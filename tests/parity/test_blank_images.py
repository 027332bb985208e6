"""Micro-batches with and without images side by side: at stage 3 a blank one runs the tower, without any effect."""

import pytest
import torch
from models import adamw
from vision import EVERY, micro_batch, model, text_alone

import zero3d
from zero3d.activations import recompute
from zero3d.errors import ConfigError
from zero3d.models.images import BlankImages

SHORT = ("llava", "qwen3_vl")  # the second reads features at its blocks, too
CASES = [name if name in SHORT else pytest.param(name, marks=pytest.mark.long) for name in EVERY]
IMAGES = [[True, False], [False, True], [False, False], [True, True]]  # by step, of each rank


def batches(name):
    generator = torch.Generator().manual_seed(1)
    drawn = [[micro_batch(name, generator) for _ in step] for step in IMAGES]
    return [
        [batch if has else text_alone(batch) for batch, has in zip(step, which, strict=True)]
        for step, which in zip(drawn, IMAGES, strict=True)
    ]


def train_plain(name):
    """Returns means of losses, norms, and the weights' norms."""
    plain, losses, norms = model(name), [], []
    optimizer = adamw(plain.parameters())
    for step in batches(name):
        values = [plain(**batch, use_cache=False).loss for batch in step]
        (sum(values) / 2).backward()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(value.item() for value in values) / 2)
    return losses, norms, [float(p.detach().norm()) for p in plain.parameters()]


def train_engine(name, stage, activations):
    """The same of this rank, and what it evaluates and generates of text alone."""
    given, rank = model(name), torch.distributed.get_rank()
    recompute(given, activations)
    engine = zero3d.Engine(given, stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    losses, norms = [], []
    for step in batches(name):
        loss = engine(**step[rank], use_cache=False).loss
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
        losses.append(loss.item())
    engine.evaluate([batches(name)[0][rank]])
    with engine.full_params():
        ids = {key: value for key, value in batches(name)[2][rank].items() if key != "labels"}
        engine.module.generate(**ids, max_new_tokens=2 + rank, do_sample=False)  # ranks may end apart
        return losses, norms, [float(p.detach().norm()) for p in engine.module.parameters()]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("stage", "activations"), [
    *(pytest.param(stage, "none", marks=pytest.mark.long) for stage in (2, 3)), (3, "full"),
])  # fmt: skip
def test_ranks_with_images_beside_ranks_without_equal_one_process(ranks, name, stage, activations):
    losses, norms, weights = train_plain(name)
    first, second = ranks(2, train_engine, name, stage, activations)
    assert [sum(both) / 2 for both in zip(first[0], second[0], strict=True)] == pytest.approx(losses, rel=1e-5)
    for found in (first, second):
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert found[2] == pytest.approx(weights, rel=1e-3)


def reached(given, batch):
    """Names of the parameters that have a gradient after a micro-batch, and its loss."""
    given.zero_grad(set_to_none=True)
    loss = given(**batch, use_cache=False).loss
    loss.backward()
    return {name for name, p in given.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize(
    "name", [name if name in (*SHORT, "llama4") else pytest.param(name, marks=pytest.mark.long) for name in EVERY]
)
def test_a_blank_image_gives_gradients_to_the_parameters_that_images_give_them_to_and_to_no_others(name):
    given, generator = model(name), torch.Generator().manual_seed(1)
    shown, text = micro_batch(name, generator), text_alone(micro_batch(name, generator))
    wanted, _ = reached(given, shown)
    without, loss = reached(given, text)
    BlankImages(given)
    assert reached(given, text) == (wanted, loss)
    assert without < wanted
    assert reached(given, shown)[0] == wanted


def generate(engine_or_model, shown, **options):
    ids, others = shown["input_ids"], {key: value for key, value in shown.items() if key not in ("input_ids", "labels")}
    return engine_or_model.generate(ids, max_new_tokens=4, do_sample=False, **others, **options).tolist()


def generate_on_a_rank(name, stage):
    """After a step: what this rank's sequences with images go on with, units gathered for all tokens and for each."""
    rank = torch.distributed.get_rank()
    engine = zero3d.Engine(model(name), stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    shown = batches(name)[3][rank]
    found = [generate(engine, shown, keep_full=keep) for keep in (True, False)]
    engine.train_batch([shown])
    return [*found, generate(engine, shown)]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_images_are_answered_as_by_the_model_itself(ranks, name, stage):
    plain = model(name)
    optimizer = adamw(plain.parameters())
    wanted = [generate(plain.eval(), shown) for shown in batches(name)[3]]
    (sum(plain.train()(**shown, use_cache=False).loss for shown in batches(name)[3]) / 2).backward()
    torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
    optimizer.step()
    trained = [generate(plain.eval(), shown) for shown in batches(name)[3]]
    found = ranks(2, generate_on_a_rank, name, stage)
    assert found == [[each, each, after] for each, after in zip(wanted, trained, strict=True)]


def train_without_tower():
    """Losses of text alone at stage 3, and of a model whose config has no tower that it names no images."""
    engine = zero3d.Engine(model("gemma4", vision_config=None), stage=3, precision="fp32", optimizer=adamw)
    ids = torch.arange(3, 23).view(2, 10) + torch.distributed.get_rank()
    return [float(engine.train_batch([{"input_ids": ids, "labels": ids}])) for _ in range(2)]


def test_a_model_without_a_tower_is_given_no_blank_image(ranks):
    first, second = ranks(2, train_without_tower)
    assert first == second
    assert first[1] < first[0]


def refusal_of_blank_images():
    with pytest.raises(ConfigError) as refused:
        zero3d.Engine(model("gemma3", mm_tokens_per_image=256), stage=3, precision="fp32", optimizer=adamw)
    return str(refused.value)


def test_a_tower_that_cannot_run_a_blank_image_is_refused_before_training(ranks):
    for message in ranks(2, refusal_of_blank_images):
        assert message == (
            "Gemma3ForConditionalGeneration cannot process a blank image (RuntimeError: stride should not be zero), "
            "which stage 3 needs where a micro-batch has none: pass zero.stage=2, or a config without vision_config."
        )
