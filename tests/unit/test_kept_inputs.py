"""Inputs of recomputed blocks that are kept on the host: the same bits, and memory that does not grow."""

import pytest
import torch
from deep import deep, recomputed
from models import batch, bits, loss_of

import zero3d

HOST = {"activations": "host"}


def run(name, policy, offload=None, steps=3, **options):
    """Losses, norms and weights of a few steps."""
    engine = zero3d.Engine(
        recomputed(deep(name), policy), precision="fp32", clip_norm=0.5, offload=offload, accumulate=2, **options
    )
    torch.manual_seed(0)
    found = []
    for step in range(steps):
        for m in range(2):
            loss = loss_of(engine, batch(10 * step + m))
            engine.backward(loss)
            found.append(float(loss.detach()))
        found.append(float(engine.step().grad_norm))
    with engine.full_params():
        return found, bits(engine.module.parameters()), engine


@pytest.mark.parametrize("policy", ["full", "every:2", "selective"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("stage", [0, 3])
def test_inputs_on_the_host_change_no_bit(poison, name, policy, stage):
    wanted, weights, _ = run(name, policy, stage=stage)
    found, same, engine = run(name, policy, HOST, stage=stage)
    assert found == wanted
    assert same == weights
    slots = {"full": 5, "every:2": 3, "selective": 5}[policy]
    assert engine.kept_inputs.slots.footing == (slots * 4096, 3 * 2 * 9 * 32 * 4)
