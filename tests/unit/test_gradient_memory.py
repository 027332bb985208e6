"""Gradients have memory from their first use in a step to their unit's update, and none between steps."""

import pytest
from buckets import buckets_of
from models import adamw, batch, build, loss_of

import zero3d

LATER = {"optimizer": "host", "executor": "device"}  # updates are made behind `step()`


def engine_of(**options):
    """An engine whose units have several buckets each."""
    with buckets_of(2048):
        made = {"stage": 2, "precision": "bf16", "clip_norm": 0.5, "optimizer": adamw} | options
        return zero3d.Engine(build("net", width=40), **made)


def backward(engine, number, last=True):
    engine.backward(loss_of(engine, batch(number)), last=last)


def held(engine):
    """Bytes of gradients that are there now."""
    return engine.arena.live("gradients")


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
