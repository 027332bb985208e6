"""Gradients have memory from their first use in a step to their unit's update, and none between steps."""

import sys
from pathlib import Path

import pytest
from buckets import buckets_of
from models import adamw, batch, build, loss_of

import zero3d

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import Model, alone_in, collectives_of, lonely_mesh, modelled

LATER = {"optimizer": "host", "executor": "device"}  # updates are made behind `step()`


def engine_of(model=None, **options):
    """An engine whose units have several buckets each."""
    with buckets_of(2048):
        made = {"stage": 2, "precision": "bf16", "clip_norm": 0.5, "optimizer": adamw} | options
        return zero3d.Engine(model or build("net", width=40), **made)


def backward(engine, number, last=True):
    engine.backward(loss_of(engine, batch(number)), last=last)


def held(engine):
    """Bytes of gradients that are there now."""
    return engine.arena.live("gradients")


# --- what dies ----------------------------------------------------------------------------------


def die(engine, number):
    """A backward that ends in an error in the first of the model's layers."""

    def fail(*_):
        raise RuntimeError("of the test")

    hook = engine.module.layers[0].register_full_backward_hook(fail)
    loss = loss_of(engine, batch(number))
    with pytest.raises(RuntimeError, match="of the test"):
        engine.backward(loss)
    hook.remove()


@pytest.mark.parametrize(("stage", "options"), [(0, {}), (2, {"shard": 2}), (3, {"exact": True})])
def test_memory_of_a_backward_that_died_is_not_given_back_under_what_still_writes_there(stage, options):
    """Reductions on the side stream; sums over copies of shards, which are waited for by the next backward."""
    with alone_in(4), collectives_of(Model()):
        mesh = lonely_mesh(4, shard=options.get("shard"))
        engine = engine_of(stage=stage, mesh=mesh, exact=options.get("exact", False))
        with modelled(engine) as model:
            die(engine, 0)
            under_way = [unit for unit, _ in engine.reductions._over_copies]
            assert bool(under_way) == ("shard" in options)
            engine.zero_grad()
            assert all(unit.gradients.is_there == (unit in under_way) for unit in engine.units)
            backward(engine, 1)
            engine.step()
    assert not model.races
    assert held(engine) == 0


# --- freezing -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("stage", "shard"), [(0, None), (1, 1), (3, 2)])
def test_what_is_unfrozen_behind_the_last_backward_of_a_step_has_gradients_of_zero(stage, shard):
    with alone_in(4), collectives_of(Model()):
        model = build("net", width=40)
        model.layers[0].requires_grad_(False)
        engine = engine_of(model, stage=stage, mesh=lonely_mesh(4, shard=shard))
        backward(engine, 0)
        with engine.full_params():
            model.layers[0].requires_grad_(True)
        unit = next(unit for unit in engine.units if unit.name == "layers.0")
        engine.grad_norm()
        assert unit.gradients.is_there
        assert not any(piece.any() for piece in unit.gradients.reduced.owned_pieces())
        assert engine.step().applied
        assert held(engine) == 0


# --- updates behind the step --------------------------------------------------------------------


def widened(stage, offload):
    """Two steps, in the first of which two backwards behind its reduction have a wider buffer of local gradients."""
    engine = engine_of(stage=stage, reduce="every_step", offload=offload)
    for last in (True, False, True):
        backward(engine, int(last), last)
    for number in (2, 3):
        assert engine.step().applied
        backward(engine, number)
    engine.zero_grad()
    return engine.fingerprint(), held(engine)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_shard_moves_into_a_wider_buffer_when_a_deferred_update_has_read_it(stage):
    assert widened(stage, LATER) == widened(stage, {})
