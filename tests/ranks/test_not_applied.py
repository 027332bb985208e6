"""Steps that are not applied, on several ranks: whose gradient was not finite, and no targets on some of them."""

import pytest
import torch
import torch.distributed as dist
from meshes import model_of
from models import adamw, batch, bits, build, loss_of
from pipelines import build as deep, engine_of, micro_batches

import zero3d
from zero3d.errors import NonFiniteError


def spoil(model, name, rank):
    """On one rank this parameter's gradient is infinite; where it is, as in a pipeline."""
    for its, weight in model.named_parameters():
        if its.endswith(name) and dist.get_rank() == rank:
            weight.register_hook(lambda grad: grad * float("inf"))


def failure(engine):
    try:
        engine.health.fail("1 step was not finite.", "Look.")
    except NonFiniteError as error:
        return str(error), error.from_rank
    return None


def traced(name, rank, degrees=(2, 1, 1), schedule=None, stage=3):
    """What each rank says after a step in which one parameter's gradient is infinite on one rank; and the count."""
    dp, tp, pp = degrees
    mesh = zero3d.Mesh(dp=dp, tp=tp, pp=pp)
    model = model_of("llama", degrees) if tp > 1 else deep("llama", 4)
    engine = engine_of(model, mesh, stage=stage, schedule=schedule)
    spoil(engine.module, name, rank)
    with engine.health.tracing():
        engine.train_batch(micro_batches(0, mesh.place.dp))
    assert engine.last_step.reason == "overflow"
    told = failure(engine)
    engine.train_batch(micro_batches(1, mesh.place.dp))  # a pipeline is not broken by it
    return (*told, engine.health.in_a_row)


@pytest.mark.parametrize(("name", "rank", "degrees", "schedule"), [
    pytest.param("model.layers.1.mlp.up_proj.weight", 1, (2, 1, 1), None, marks=pytest.mark.long),
    ("model.layers.3.self_attn.q_proj.weight", 1, (1, 1, 2), "1f1b"),  # then on part 0, too
    ("model.layers.0.mlp.up_proj.weight", 0, (1, 1, 2), "zero-bubble"),  # taken without a hook
    pytest.param("model.layers.1.mlp.down_proj.weight", 0, (1, 2, 1), None, marks=pytest.mark.long),
])  # fmt: skip
def test_the_rank_and_the_unit_are_named_on_all_ranks(ranks, name, rank, degrees, schedule):
    for place, (said, from_rank, count) in enumerate(ranks(2, traced, name, rank, degrees, schedule)):
        unit = name.rpartition(".self_attn" if "self_attn" in name else ".mlp")[0]
        assert f"First in the last one: unit {unit!r}, parameter {name} on rank {rank}. Look." in said
        assert from_rank == (None if place == rank else rank)
        assert count == 2


# --- steps without targets ------------------------------------------------------------------------


def stepped(stage, weights, steps=(0, 1, 2), second=None):
    """Reasons, weights and states after steps, in whose second rank r's micro-batch has weight `weights[r]`."""
    rank = dist.get_rank()
    engine = zero3d.Engine(build("net"), stage=stage, precision="fp32", optimizer=adamw, clip_norm=0.5)
    reasons = []
    for step in steps:
        ids = batch(step, rank if step != 1 or second is None else second)
        engine.backward(loss_of(engine, ids), weights[rank] if step == 1 else None)
        reasons.append(engine.step().reason)
    with engine.full_params():
        return reasons, (bits(engine.module.parameters()), engine.fingerprint(), engine.steps)


def without_targets(stage):
    """Pairs that must be equal: no weight anywhere, and no such step; none on rank 0, and rank 1's batch on both."""
    nowhere, left_out = stepped(stage, (0.0, 0.0)), stepped(stage, (), steps=(0, 2))
    one_sided, others = stepped(stage, (0.0, 4.0)), stepped(stage, (None, None), second=1)
    return nowhere, left_out, one_sided, others


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.long) for stage in (1, 2)), 3])
def test_a_weight_of_0_everywhere_moves_nothing_and_on_one_rank_leaves_the_others_step(ranks, stage):
    for nowhere, left_out, one_sided, others in ranks(2, without_targets, stage):
        assert nowhere == (["applied", "no targets", "applied"], left_out[1])
        assert one_sided == others
        assert others[0] == ["applied"] * 3


def nan_without_targets(stage):
    """A mean over no target is NaN, and its gradient must not be."""
    rank, engine = dist.get_rank(), zero3d.Engine(build("llama"), stage=stage, precision="fp32", optimizer=adamw)
    ids = batch(0, rank)
    labels = torch.full_like(ids, -100) if rank == 0 else ids
    loss = float(engine.train_batch([{"input_ids": ids, "labels": labels}]))
    return loss, engine.last_step.reason, float(engine.last_step.grad_norm)


def test_a_rank_without_targets_adds_nothing(ranks):
    plain, ids = build("llama"), batch(0, 1)
    loss = plain(input_ids=ids, labels=ids).loss
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters()]).norm()
    for found, reason, its_norm in ranks(2, nan_without_targets, 3):
        assert reason == "applied"
        assert found == pytest.approx(float(loss.detach()), rel=1e-6)
        assert its_norm == pytest.approx(float(norm), rel=1e-5)
