"""LLaVA with images: its language model is cut over tp, its vision tower is whole on every rank."""

import pytest
import torch
from families import IMAGE, llava
from models import adamw

import zero3d


def micro_batch(generator):
    """Two sequences with an image of four tokens each."""
    ids = torch.randint(3, 60, (2, 10), generator=generator)
    ids[:, 1:5] = IMAGE
    return {"input_ids": ids, "labels": ids, "pixel_values": torch.randn(2, 3, 28, 28, generator=generator)}


def train(tp, stage):
    model = llava()
    mesh = zero3d.Mesh(tp=tp)
    engine = zero3d.Engine(model, mesh=mesh, stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    generator = torch.Generator().manual_seed(1)
    steps = []
    for _ in range(2):
        loss = engine.train_batch([micro_batch(generator) for _ in range(2)])
        steps += [float(loss), float(engine.last_step.grad_norm)]
    tower = {p for name, p in model.named_parameters() if "vision" in name or "projector" in name}
    cut = sum(unit.layout.numel for unit in engine.units if not tower & set(unit.weights.params))
    return steps, cut


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long), 3])
def test_a_llava_whose_language_model_is_cut_equals_one_process(ranks, stage):
    whole, language = ranks(1, train, 1, stage)[0]
    for steps, own in ranks(2, train, 2, stage):
        assert steps == pytest.approx(whole, rel=1e-5)
        assert own < 0.6 * language
