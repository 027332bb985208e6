"""Vision-language models of every family: an engine trains as plain PyTorch does, and exports what transformers opens."""

import pytest
import torch
from models import adamw, bits
from vision import EVERY, config, micro_batch, model

import zero3d

CLIP = 0.5
CASES = ["llava", *(pytest.param(name, marks=pytest.mark.long) for name in EVERY if name != "llava")]


def batches(name, ranks=1):
    """Three steps of two micro-batches, and of these those of each rank."""
    generator = torch.Generator().manual_seed(1)
    drawn = [[micro_batch(name, generator) for _ in range(2)] for _ in range(3)]
    return drawn if ranks == 1 else [[step[rank::ranks] for step in drawn] for rank in range(ranks)]


def train_plain(name):
    """The loop everyone writes; parameters that nothing has reached have a gradient of zero, as on other ranks' images.

    Returns losses, norms and the trained model.
    """
    plain, losses, norms = model(name), [], []
    optimizer = adamw(plain.parameters())
    for step in batches(name):
        values = [plain(**batch, use_cache=False).loss for batch in step]
        for value in values:
            (value / len(step)).backward()
        for p in plain.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(value.item() for value in values) / len(step))
    return losses, norms, plain


def train_engine(name, stage, steps):
    """The same on an engine; returns losses of this rank, norms and the engine."""
    engine = zero3d.Engine(
        model(name), stage=stage, precision="fp32", clip_norm=CLIP, optimizer=adamw, accumulate=len(steps[0])
    )
    losses, norms = [], []
    for step in steps:
        values = [engine(**batch, use_cache=False).loss for batch in step]
        for value in values:
            engine.backward(value)
        norms.append(float(engine.step().grad_norm))
        losses.append(sum(value.item() for value in values) / len(step))
    return losses, norms, engine


@pytest.mark.parametrize("name", CASES)
def test_one_rank_trains_as_plain_pytorch_bit_for_bit_and_exports(name, tmp_path):
    import transformers as t

    losses, norms, plain = train_plain(name)
    for stage in (0, 3):
        found = train_engine(name, stage, batches(name))
        assert found[:2] == (losses, norms)
        with found[2].full_params():
            assert bits(found[2].module.parameters()) == bits(plain.parameters())
    found[2].export(tmp_path)
    opened = t.AutoModelForImageTextToText.from_pretrained(tmp_path)
    assert type(opened) is type(plain)
    assert bits(opened.parameters()) == bits(plain.parameters())


@pytest.mark.parametrize("name", CASES)
def test_a_folder_is_opened_with_the_weights_that_it_has_or_with_new_ones(name, tmp_path):
    from zero3d.config import Model
    from zero3d.models.open import open_model
    from zero3d.shards.boxes import whole

    saved = model(name)
    saved.save_pretrained(tmp_path)
    wanted = dict(saved.named_parameters())
    opened = open_model(Model(path=str(tmp_path)))
    assert type(opened.module) is type(saved)
    assert opened.notes == ()
    for parameter, _ in opened.module.named_parameters():
        assert torch.equal(opened.weights(parameter, whole(wanted[parameter].shape)), wanted[parameter])
    new = open_model(Model(path=str(tmp_path), init="random"))
    engine = zero3d.Engine(new.module, weights=new.weights, stage=3, precision="fp32", optimizer=adamw)
    assert engine.train_batch([micro_batch(name, torch.Generator().manual_seed(1))]).isfinite()


def on_two_ranks(name, stage):
    rank = torch.distributed.get_rank()
    losses, norms, engine = train_engine(name, stage, batches(name, 2)[rank])
    unequal = [entry for entry in engine.memory if entry.planned is not None and entry.planned != entry.measured]
    with engine.full_params():
        return losses, norms, [p.detach().double().norm().item() for p in engine.module.parameters()], unequal


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_two_ranks_train_as_one_process(ranks, name, stage):
    losses, norms, plain = train_plain(name)
    weights = [p.detach().double().norm().item() for p in plain.parameters()]
    first, second = ranks(2, on_two_ranks, name, stage)
    assert [sum(both) / 2 for both in zip(first[0], second[0], strict=True)] == pytest.approx(losses, rel=1e-5)
    for found in (first, second):
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert found[2] == pytest.approx(weights, rel=1e-3)
        assert found[3] == []


@pytest.mark.parametrize("name", ["idefics3", "qwen2_vl"])
def test_gradients_of_the_first_backward_come_in_the_order_in_which_units_are_reduced(name):
    """The input embeddings' come last, behind those of the tower, which would wait for them."""
    engine = zero3d.Engine(model(name), stage=3, precision="fp32", optimizer=adamw)
    engine.backward(engine(**micro_batch(name, torch.Generator()), use_cache=False).loss)
    observed = engine.reductions.observed()
    assert observed == sorted(observed)
    assert len(observed) > 4


def orders_of_reductions(name, deep):
    """On each of two ranks: the order of the first backward, as places in that of reductions; what is above its bound."""
    tower = config(name).vision_config
    if deep:
        tower.depth = 6
    engine = zero3d.Engine(model(name, blocks=4, vision_config=tower), stage=2, precision="fp32", optimizer=adamw)
    engine.backward(engine(**micro_batch(name, torch.Generator().manual_seed(1)), use_cache=False).loss)
    observed = engine.reductions.observed()
    engine.step()
    held = [row for row in engine.report().memory if row.bound is not None]
    return observed, {row.category: (row.peak, row.bound) for row in held if row.peak > row.bound}


@pytest.mark.parametrize(("name", "deep"), [
    ("qwen3_vl", True),
    *(pytest.param(name, False, marks=pytest.mark.long) for name in EVERY if not name.startswith("llava")),
])  # fmt: skip
def test_on_two_ranks_the_first_backward_reduces_each_unit_as_it_comes_to_it(ranks, name, deep):
    """DeepStack's mergers lie behind the tower's blocks, and run between them; Gemma 4's tower behind its language model."""
    for observed, above in ranks(2, orders_of_reductions, name, deep):
        assert observed == sorted(observed)
        assert above == {}


def planned_and_gathered(name):
    """Units in the order in which a first forward expects to gather them, and in which it does; if they are in bounds."""
    engine = zero3d.Engine(model(name, blocks=4), stage=3, precision="fp32", optimizer=adamw)
    order = engine.gathers.training
    planned = [unit.name for unit in order._plan.units]
    loss = engine(**micro_batch(name, torch.Generator().manual_seed(1)), use_cache=False).loss
    gathered = [unit.name for unit in order._record.units if unit.name in planned]
    engine.backward(loss)
    engine.step()
    (row,) = [row for row in engine.report().memory if row.category == "gathered"]
    return planned, gathered, row.peak <= row.bound


@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.long) for name in ("gemma4", "llama4"))]
)
def test_a_first_forward_gathers_ahead_what_it_comes_to_and_no_more_than_its_bound(ranks, name):
    """DeepStack's mergers lie behind the tower's blocks, and run between them; Gemma 4 reads two units' weights outside of
    their modules, which stay with the root's."""
    for planned, gathered, within in ranks(2, planned_and_gathered, name):
        assert planned == gathered
        assert within
