"""The gradient norm before its step: `engine.grad_norm()`, after which a loop takes the step or leaves it out."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from meshes import engine_of as engine_on, mesh_of, model_of, share_of
from models import adamw, batch, bits, build, loss_of
from tiers import Case, engine_of, micro_batches_of, sum_of

import zero3d
from zero3d.memory.arena import Arena

STEPS = 6  # of which one is infinite, and in fp16 others overflow


def trained(case, offload, guarded):
    """Losses, norms, scales and hash of a run whose loop looks at the norm before, or takes every step."""
    engine = engine_of(case, offload)
    losses, norms, scales = [], [], []
    for number in range(STEPS):
        for given in micro_batches_of(case, number):
            loss, weight = sum_of(engine(given["ids"]), given)
            losses.append(float(loss.detach()))
            engine.backward(loss / weight, weight=weight)
        norm = float(engine.grad_norm()) if guarded else None
        if guarded and not torch.isfinite(torch.tensor(norm)):
            engine.zero_grad()
            assert engine.accumulation.count == 0
        else:
            found = float(engine.step().grad_norm)
            assert norm in (None, found)
            norm = found
        norms.append(norm)
        scales.append(engine.loss_scale.value)
    return repr((losses, norms)), scales, engine.steps, engine.health.in_a_row, engine.fingerprint()


def both(case, offload):
    return trained(case, offload, guarded=True), trained(case, offload, guarded=False)


@pytest.mark.parametrize(("case", "offload"), [
    (Case(dp=2, precision="fp16"), {}),
    (Case(dp=2, stage=1, moments=(2, "auto"), precision="fp32"), {}),
    (Case(dp=2, stage=2, exact=True, moments=(2, "every_step")), {}),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in (
        (Case(precision="fp16"), {}),
        (Case(dp=2, stage=0, precision="fp16", moments=(2, "auto")), {}),
        (Case(dp=2, stage=3, moments=(2, "auto"), exact=True), {}),
        (Case(dp=2, stage=2, precision="fp16", moments=(2, "every_step")), {}),
        (Case(dp=2, stage=3, master="split", grouped=True), {}),
        (Case(dp=2, stage=3, precision="fp16"), {"optimizer": "host"}),
        (Case(dp=2, stage=2, moments=(2, "auto")), {"optimizer": "host", "gradients": "host"}),
        (Case(dp=2, stage=3), {"optimizer": "host", "params": "host"}),
        (Case(dp=2, stage=1, optimizer="momentum"), {"optimizer": "host", "executor": "device"}),
    )),
])  # fmt: skip
def test_a_loop_that_leaves_out_what_is_not_finite_has_the_bits_of_steps_that_skip_it(ranks, case, offload):
    for guarded, skipping in ranks(case.dp, both, case, offload):
        assert guarded == skipping
        assert guarded[2] < STEPS
        assert case.precision != "fp16" or len(set(guarded[1])) > 1


def on_mesh(shape, family):
    """Losses and norms of steps on a mesh, with and without a look at the norm before."""
    found = []
    for looks in (True, False):
        engine = engine_on(model_of(family, shape), mesh_of(shape), stage=2, accumulate=1)
        values = []
        for number in range(3):
            (given,) = share_of(engine, number, shape[0])
            loss = engine(**given).loss
            engine.backward(loss)
            norm = engine.grad_norm() if looks else None
            result = engine.step()
            assert norm is None or norm.equal(result.grad_norm)
            values.append((float(loss), float(result.grad_norm)))
        found.append(values)
    return found


@pytest.mark.parametrize("family", ["llama", pytest.param("moe", marks=pytest.mark.long)])
def test_ranks_that_share_a_model_have_the_same_norm_before(ranks, family):
    for looked, plain in ranks(2, on_mesh, (1, 2, 1), family):
        assert looked == plain


def chosen(stage):
    """Weights after a loop that leaves out every other step by a limit of its own, and after one without those."""
    weights = []
    for steps in ((0, 1, 2, 3), (0, 2)):
        engine = zero3d.Engine(build("net"), stage=stage, precision="fp32", optimizer=adamw)
        for step in steps:
            engine.backward(loss_of(engine, batch(step, dist.get_rank())) * (9.0 if step % 2 else 1.0))
            if engine.grad_norm() < 5.0:
                engine.step()
            engine.zero_grad()
        with engine.full_params():
            weights.append((bits(engine.module.parameters()), engine.steps))
    return weights


@pytest.mark.parametrize("stage", [3, pytest.param(1, marks=pytest.mark.long)])
def test_a_step_that_is_left_out_is_as_if_it_had_not_been(ranks, stage):
    for found, wanted in ranks(2, chosen, stage):
        assert found == wanted
        assert found[1] == 2


def test_a_step_reads_the_device_once_whether_its_norm_was_asked_for_or_not():
    engine = zero3d.Engine(build("net"), stage=2, precision="fp32", optimizer=adamw)
    reads = []
    for looks in (False, True):
        engine.backward(loss_of(engine, batch(0)))
        with mock.patch.object(Arena, "on_host", autospec=True, side_effect=Arena.on_host) as read:
            looks and engine.grad_norm()
            engine.step()
        reads.append(read.call_count)
    assert reads == [1, 1]


def test_the_norm_is_nan_where_no_step_is_due_and_gradients_after_it_are_refused():
    engine = zero3d.Engine(build("net"), stage=2, precision="fp32", optimizer=adamw, accumulate=2)
    assert engine.grad_norm().isnan()
    engine.backward(loss_of(engine, batch(0)))
    assert engine.grad_norm().isnan()
    engine.backward(loss_of(engine, batch(1)))
    assert engine.grad_norm() > 0
    with pytest.raises(
        zero3d.ConfigError, match=r"a backward after the gradient norm of its step.*optimizer\.step\(\)"
    ):
        engine.backward(loss_of(engine, batch(2)))
    for k in range(2):  # the window begins anew
        engine.backward(loss_of(engine, batch(k)))
    assert engine.step().applied


def test_gradients_of_a_submodule_after_the_norm_are_refused():
    engine = zero3d.Engine(build("net"), stage=2, precision="fp32", optimizer=adamw)
    engine.backward(loss_of(engine, batch(0)))
    engine.grad_norm()
    engine.module.layers[0](torch.ones(2, 24)).sum().backward()
    with pytest.raises(zero3d.ConfigError, match="gradients of a submodule have come after the gradient norm"):
        engine.step()


def unlike(what):
    """What rank 1 does otherwise than rank 0: clip, or take a step that rank 0 leaves out."""
    engine = zero3d.Engine(build("net"), stage=3, precision="fp32", optimizer=adamw, clip_norm=None)
    for step in range(3):
        engine.backward(loss_of(engine, batch(step)))
        if what == "clips" and dist.get_rank() == 0:
            engine.clip_norm = 0.1
            engine.grad_norm()
        if what == "clips once the norm is known" and engine.grad_norm() and dist.get_rank() == 0:
            engine.clip_norm = 0.1
        if what == "leaves out" and engine.grad_norm() and dist.get_rank() == 0 and step == 1:
            engine.zero_grad()
        else:
            engine.step()
        engine.clip_norm = None


@pytest.mark.parametrize(("what", "words"), [
    *((what, "clip the norm of one step not at all and at 0.1.*clip_grad_norm_ where one does")
      for what in ("clips", "clips once the norm is known")),
    ("leaves out", "some ranks have left out 0 steps whose norm was known and others 1.*decide by that norm"),
])  # fmt: skip
def test_ranks_that_decide_differently_are_told(ranks, what, words):
    with pytest.raises(Exception, match=words):
        ranks(2, unlike, what)


def stages_unlike():
    """What the stages of a pipeline do that clip at unlike norms."""
    engine = zero3d.Engine(
        build("llama"), mesh=zero3d.Mesh(pp=2), stage=1, precision="fp32", optimizer=adamw,
        clip_norm=0.1 if dist.get_rank() else 1.0,
    )  # fmt: skip
    ids = torch.arange(8)[None]
    engine.train_batch([{"input_ids": ids, "labels": ids}] * 2)


def test_stages_of_a_pipeline_that_clip_differently_are_told(ranks):
    with pytest.raises(Exception, match=r"clip the norm of one step at 0\.1 and at 1: every rank must"):
        ranks(2, stages_unlike)


def run_by_caller(precision):
    """Weights where the caller back-propagates what it is given, and where the engine does."""
    found = []
    for run in (None, torch.Tensor.backward, lambda total: (total * 0.5 + total * 0.5).backward()):
        engine = zero3d.Engine(build("net"), stage=2, precision=precision, optimizer=adamw)
        for step in range(2):
            engine.backward_sum(loss_of(engine, batch(step, dist.get_rank())), run=run)
            engine.step()
        with engine.full_params():
            found.append((engine.steps, bits(engine.module.parameters())))
    return found


@pytest.mark.parametrize("precision", ["fp16", pytest.param("fp32", marks=pytest.mark.long)])
def test_a_caller_may_run_the_backward_itself(ranks, precision):
    for of_engine, *of_caller in ranks(2, run_by_caller, precision):
        assert of_caller == [of_engine, of_engine]


def logs_alone():
    """Weights, and what was moved, where rank 0 alone asks for the norm, and where nobody does."""
    found = []
    for asks in (True, False):
        engine = zero3d.Engine(build("net"), stage=3, precision="fp32", optimizer=adamw)
        for step in range(2):
            engine.backward(loss_of(engine, batch(step)))
            assert not asks or dist.get_rank() or float(engine.grad_norm()) > 0
            engine.step()
        moved = [tuple(entry) for entry in engine.traffic]
        with engine.full_params():
            found.append((moved, bits(engine.module.parameters())))
    return found


def test_a_rank_that_alone_looks_at_the_norm_waits_for_the_others_step(ranks):
    for asked, plain in ranks(2, logs_alone):
        assert asked == plain
