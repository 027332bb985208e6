"""Mixtures that see: experts of the language model on an axis of their own, images on some ranks alone."""

import pytest
import torch
from models import adamw

import zero3d
from zero3d.activations import recompute
from zero3d.expert_parallel.plan import find_experts
from zero3d.tools.vision.tiny import micro_batch, tiny_model

MIXTURES = ("ernie4_5_vl_moe", "glm4v_moe", "kimi_k25", "qwen3_5_moe", "qwen3_vl_moe")
BALANCED = ("ernie4_5_vl_moe", "glm4v_moe", "qwen3_5_moe", "qwen3_vl_moe")  # whose heads add a loss of the routers
SHORT = ("ernie4_5_vl_moe", "qwen3_vl_moe")  # the first has experts for images' tokens, which text never reaches
CASES = [kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long) for kind in MIXTURES]
STEPS = [(True, False), (False, True), (True, True), (False, False)]  # which rank has images


def balanced(kind):
    """A model whose loss has a term of its routers, which matters."""
    model = tiny_model(kind)
    if kind in BALANCED:
        text = model.config.get_text_config()
        text.output_router_logits, text.router_aux_loss_coef = True, 0.5
        model.router_aux_loss_coef = 0.5
    return model


def batches(model):
    generator = torch.Generator().manual_seed(1)
    return [[micro_batch(model, generator, (1, 1) if has else (0, 0)) for has in step] for step in STEPS]


def train_plain(kind):
    """Means of losses over both ranks' micro-batches, and norms."""
    model, losses, norms = balanced(kind), [], []
    optimizer = adamw(model.parameters())
    for step in batches(model):
        values = [model(**batch, use_cache=False).loss for batch in step]
        (sum(values) / 2).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(value.item() for value in values) / 2)
    return losses, norms


def train_shared(kind, stage, activations):
    model, rank, losses, norms = balanced(kind), torch.distributed.get_rank(), [], []
    steps = batches(model)
    recompute(model, activations)
    engine = zero3d.Engine(model, mesh=zero3d.Mesh(ep=2), stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    for step in steps:
        loss = engine(**step[rank], use_cache=False).loss
        engine.backward(loss)
        norms.append(float(engine.step().grad_norm))
        losses.append(loss.item())
    return losses, norms, len(engine.experts.dispatches)


@pytest.mark.parametrize("kind", CASES)
@pytest.mark.parametrize(("stage", "activations"), [
    (3, "full"), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, "none"), (3, "none"))),
])  # fmt: skip
def test_shared_experts_of_models_that_see_equal_one_process(ranks, kind, stage, activations):
    losses, norms = train_plain(kind)
    first, second = ranks(2, train_shared, kind, stage, activations)
    assert [sum(both) / 2 for both in zip(first[0], second[0], strict=True)] == pytest.approx(losses, rel=1e-5)
    for found in (first, second):
        assert found[1] == pytest.approx(norms, rel=1e-4)
        assert found[2] > 0


@pytest.mark.parametrize("kind", BALANCED)
def test_routers_losses_reach_the_head(kind):
    with_term, without = balanced(kind), tiny_model(kind)
    batch = batches(without)[0][0]
    assert with_term(**batch, use_cache=False).loss > without(**batch, use_cache=False).loss


def test_experts_are_found_below_the_language_model():
    for kind in MIXTURES:
        layers = find_experts(tiny_model(kind))
        assert layers, kind
        assert all(layer.experts == 4 for layer in layers)
