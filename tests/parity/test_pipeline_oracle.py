"""Contract 3 in float64, which separates logic from rounding: a pipeline equals one process with all data to 1e-10.

Also: gradients reduced after every micro-batch equal those summed for the whole schedule and reduced once.
"""

from collections import defaultdict
from contextlib import nullcontext

import pytest
import torch
from models import LiftCasts
from pipelines import SCHEDULES, build, covering, engine_of, layers_for, micro_batches, sum_of

import zero3d

FAMILIES = ("llama", "qwen3", "gpt2", "qwen3_moe")
DP, STEPS, COUNT = 2, 2, 3  # COUNT: micro-batches of a replica


def model_of(family, layers):
    """Its experts one by one: torch's grouped matrix product refuses float64."""
    model = build(family, layers)
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")
    return model


def all_data(step):
    """The micro-batches of two replicas, one after the other."""
    return [given for rank in range(DP) for given in micro_batches(step, rank, COUNT)]


def oracle(family, layers):
    """Losses and norms of one process, one engine-free loop: the mean over all tokens, clipped, stepped by SGD."""
    model = model_of(family, layers)
    for p in model.parameters():  # buffers keep their dtype, as in an engine
        p.data = p.data.double()
    optimizer = sgd(model.parameters())
    losses, norms = [], []
    with LiftCasts():
        for step in range(STEPS):
            sums = [sum_of(model(input_ids=given["input_ids"]), given) for given in all_data(step)]
            weight = sum(count for _, count in sums)
            loss = sum(total for total, _ in sums) / weight
            optimizer.zero_grad()
            loss.backward()
            losses.append(float(loss.detach()))
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
            optimizer.step()
    return losses, norms


def sgd(params):
    """No division by small gradients: what differs stays as small as it is."""
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def curves(family, layers, degrees, cases, precision="fp64"):
    """Losses and norms for every (stage, schedule, reduce)."""
    dp, pp = degrees
    runs = []
    for stage, schedule, reduce in cases:
        mesh = zero3d.Mesh(dp=dp, pp=pp)
        how = {"stage": stage, "schedule": schedule, "reduce": reduce, "release": "every_use"}
        engine = engine_of(model_of(family, layers), mesh, precision=precision, optimizer=sgd, **how)
        losses, norms = [], []
        with LiftCasts() if precision == "fp64" else nullcontext():
            for step in range(STEPS):
                given = micro_batches(step, mesh.place.dp, COUNT) if dp == DP else all_data(step)
                losses.append(float(engine.train_batch(given)))
                norms.append(float(engine.last_step.grad_norm))
        runs.append((losses, norms))
    return runs


def check(ranks, family, degrees, cases):
    layers = max(layers_for(degrees[1], schedule) for _, schedule, _ in cases)
    losses, norms = oracle(family, layers)
    assert norms[0] > 0.5  # clipping is active
    for runs in ranks(degrees[0] * degrees[1], curves, family, layers, degrees, cases):
        for case, run in zip(cases, runs, strict=True):
            assert run[0] == pytest.approx(losses, rel=1e-10), case
            assert run[1] == pytest.approx(norms, rel=1e-9), case


@pytest.mark.parametrize(("family", "degrees", "case"), [
    pytest.param("llama", (2, 2), (3, "zbv", "every_step"), marks=pytest.mark.long),
    pytest.param("qwen3", (2, 2), (2, "interleaved", "every_micro_batch"), marks=pytest.mark.long),
    ("gpt2", (1, 4), (3, "1f1b", "every_step")),
    pytest.param("qwen3_moe", (1, 4), (1, "gpipe", "every_step"), marks=pytest.mark.long),
    pytest.param("qwen3", (1, 4), (3, "1f1b", "every_step"), marks=pytest.mark.long), ("qwen3_moe", (2, 2), (3, "zero-bubble", "every_micro_batch")),
])  # fmt: skip
def test_a_pipeline_equals_one_process_in_float64_to_1e_10(ranks, family, degrees, case):
    check(ranks, family, degrees, [case])


BY_DEGREES = defaultdict(list)  # (family, degrees, chunks) -> cases, which together have every pair of settings
for family, degrees, stage, schedule in covering((FAMILIES, ((2, 2), (1, 4)), tuple(range(4)), SCHEDULES)):
    BY_DEGREES[family, degrees, layers_for(degrees[1], schedule)].append((stage, schedule, "every_step"))


@pytest.mark.long
@pytest.mark.parametrize(("family", "degrees", "layers"), BY_DEGREES, ids=str)
def test_every_stage_and_schedule_equals_one_process_in_float64(ranks, family, degrees, layers):
    check(ranks, family, degrees, BY_DEGREES[family, degrees, layers])


def check_reducing(ranks, stage, precision, bound, schedules):
    cases = [(stage, "1f1b", "every_step"), *((stage, schedule, "every_micro_batch") for schedule in schedules)]
    for once, *runs in ranks(4, curves, "net", 4, (2, 2), cases, precision):
        for case, run in zip(cases[1:], runs, strict=True):
            assert run[0] == pytest.approx(once[0], rel=bound), case
            assert run[1] == pytest.approx(once[1], rel=bound), case


REDUCING = [(2, "fp32", 1e-6, SCHEDULES[:2]), (3, "fp64", 1e-10, SCHEDULES[2:])]
OFTEN = (2, "fp32", 1e-6, SCHEDULES[1:2])


@pytest.mark.parametrize(("stage", "precision", "bound", "schedules"), [
    OFTEN, *(pytest.param(*case, marks=pytest.mark.long) for case in REDUCING),
])  # fmt: skip
def test_reducing_after_every_micro_batch_equals_reducing_once(ranks, stage, precision, bound, schedules):
    check_reducing(ranks, stage, precision, bound, schedules)


@pytest.mark.long
@pytest.mark.parametrize(("stage", "precision", "bound"), [case[:3] for case in REDUCING])
def test_reducing_after_every_micro_batch_does_so_under_every_schedule(ranks, stage, precision, bound):
    check_reducing(ranks, stage, precision, bound, SCHEDULES)
