"""An engine that nobody holds any more gives its memory back."""

import gc
import weakref

import pytest
import torch
from torch import nn

from zero3d import Engine


def trained(stage: int) -> list[weakref.ref]:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    engine = Engine(model, stage=stage, precision="bf16")
    engine.backward(engine(torch.randn(2, 8)).float().sum())
    engine.step()
    states = [unit.weights.masters.stored for unit in engine.units] + [unit.gradients.shard for unit in engine.units]
    return [weakref.ref(held) for held in (engine, model, engine.arena, *engine.units, *states)]


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_a_dropped_engine_frees_its_memory(stage):
    held = trained(stage)
    for _ in range(2):  # torch lets go of some objects only while the first pass runs
        gc.collect()
    assert [ref() for ref in held] == [None] * len(held)
