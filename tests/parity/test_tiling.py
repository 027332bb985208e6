"""Losses and linear layers in tiles compute what whole ones do, on every mesh, and the same bits at every stage."""

import pytest
import torch
from meshes import STEPS, engine_of, mesh_of, micro_batches, model_of, oracle, own, step, world_of
from models import LiftCasts, bits

from zero3d.activations.recomputation import recompute


def trained(case, precision, *settings):
    """For each of some settings of an engine: [(loss, norm), ...] of its steps, and the ledger of the last one."""
    family, shape, stage, schedule, sequence, activations = case
    results = []
    for options in settings:
        model = model_of(family, shape)
        recompute(model, activations)
        made = {"stage": stage, "schedule": schedule, "sequence_parallel": sequence, "precision": precision}
        with LiftCasts():
            engine = engine_of(model, mesh_of(shape), **made | options)
            steps = []
            for number in range(STEPS):
                engine.traffic.reset()
                steps.append(step(engine, number))
        ledger = sorted((e.op, e.axis, e.unit, e.calls, e.elements, e.bytes) for e in engine.traffic)
        results.append((steps, ledger))
    return results


LOSSES = [("llama", (2, 1, 1), 3, None, False, "full"), ("qwen3", (1, 2, 1), 2, None, True, "none"),
          ("moe", (1, 2, 2), 3, "1f1b", False, "none"), ("gpt2", (2, 1, 2), 3, "zero-bubble", False, "none")]  # fmt: skip


@pytest.mark.parametrize("case", LOSSES)
def test_a_tiled_loss_is_one_process_loss_in_float64_and_sends_what_the_whole_one_does(ranks, case):
    family, shape, *_ = case
    expected = oracle(family, shape, "model's")
    for (_, of_plain), (found, ledger) in ranks(world_of(shape), trained, case, "fp64", {}, {"tiled_loss": True}):
        assert torch.allclose(torch.tensor(found), torch.tensor(expected), rtol=1e-10, atol=0)
        assert ledger == of_plain


def by_stage(options):
    """Losses, norms and a hash of weights of stages 0 to 3, and the held-out loss."""
    results = []
    for stage in range(4):
        engine = engine_of(model_of("llama", (2, 1, 1)), mesh_of((2, 1, 1)), precision="fp32", stage=stage, **options)
        steps = [step(engine, number) for number in range(STEPS)]
        held_out = float(engine.evaluate(own(micro_batches(9, 2), engine.mesh.place.dp, 2)))
        with engine.full_params():
            results.append((steps, held_out, bits(engine.module.parameters())))
    return results


def test_a_tiled_loss_has_the_same_bits_at_all_stages_and_is_near_the_whole_one(ranks):
    tiled, plain = ranks(2, by_stage, {"tiled_loss": True})[0], ranks(2, by_stage, {})[0]
    assert all(each == tiled[0] for each in tiled)
    (steps, held_out, _), (of_plain, held_out_plain, _) = tiled[0], plain[0]
    assert torch.allclose(torch.tensor(steps), torch.tensor(of_plain), rtol=1e-5, atol=0)
    assert held_out == pytest.approx(held_out_plain, rel=1e-5)
