"""Upper bounds of the memory table on accelerators: no buffer of an engine on NCCL's algorithms is above its own."""

import sys
from itertools import product
from pathlib import Path
from unittest import mock

import pytest
from meshes import engine_of, micro_batches
from models import adamw
from pipelines import covering
from tensors import tiny

from zero3d.engine.auto_offload import bytes_needed
from zero3d.engine.transients import transient_bounds
from zero3d.memory.arena import STATES
from zero3d.tools.plan.memory import instants
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.model_spec import trace

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments.races import Model, alone_in, collectives_of, lonely_mesh


def held(engine, count):
    """The most that was held of each kind, and of all together by what auto-offload counts, and the bound."""
    bounds, need = transient_bounds(engine._parts, count), bytes_needed(engine._parts)
    together = sum(int(engine.arena.at_peak(kind)) for kind in (*STATES, *bounds) if kind != "padding")
    return {kind: (int(engine.arena.peak(kind)), bound) for kind, bound in bounds.items()} | {
        "together": (together, need.states + sum(need.others.values()))
    }


def peaks(n, stage, count, **options):
    """Of two steps; then of the backwards of another step, without the scratch of casts."""
    options = {"precision": "bf16", "optimizer": adamw} | options
    with alone_in(n), collectives_of(Model()):
        engine = engine_of(tiny("llama", layers=4), lonely_mesh(n), stage=stage, accumulate=count, **options)
        for number in range(2):
            engine.train_batch(micro_batches(number, count))
        steps = held(engine, count)
        engine.arena.reset_peaks()
        for given in micro_batches(2, count):
            engine.backward(engine(**given).loss)
        scratch = {"cast_scratch": lambda *_: 0, "update_scratch": lambda *_: 0}
        with mock.patch.multiple("zero3d.account.transients", **scratch):
            return steps, held(engine, count)


OPTIONS = {
    "default": {}, "native": {"reduce_scatter": "native"}, "in bf16": {"reduce_dtype": "bf16"},
    "fp32": {"precision": "fp32"}, "exact": {"exact": True}, "split": {"master": "split"},
}  # fmt: skip


SETTINGS = ((1, 4), (0, 1, 3), (1, 2), tuple(OPTIONS))
PAIRS = set(covering(SETTINGS))
CASES = [
    pytest.param(*case, marks=() if case in PAIRS and case[0] > 1 else pytest.mark.long) for case in product(*SETTINGS)
]


@pytest.mark.parametrize(("n", "stage", "count", "options"), CASES)
def test_no_buffer_exceeds_its_bound_and_what_travels_reaches_it(n, stage, count, options):
    steps, backwards = peaks(n, stage, count, **OPTIONS[options])
    for found in (steps, backwards):
        assert {kind: both for kind, both in found.items() if both[0] > both[1]} == {}
    peak, bound = backwards["wire"]
    assert peak == bound or (options == "exact" and (n == 1 or 2 * peak >= bound))  # whose tree is not always full


MOVING = ("gathered", "bucket", "wire")


@pytest.mark.parametrize(("stage", "count"), [(0, 1), (1, 2), (3, 2)])
def test_what_auto_counts_for_an_engine_is_what_a_plan_has_at_its_instants_without_activations(stage, count):
    with alone_in(2), collectives_of(Model()):
        options = {"stage": stage, "accumulate": count, "precision": "bf16", "optimizer": adamw}
        need = bytes_needed(engine_of(tiny("llama"), lonely_mesh(2), **options)._parts)
    planned = dict(instants(trace(tiny("llama"), 16), ParallelPlan(dp=2, stage=stage, accumulate=count)))
    step = planned.pop("optimizer step")
    counted = need.instants["optimizer step"]
    assert (counted["weights"], counted["gradients"], counted["scratch"]) == (
        step["parameters"], step["gradients"], step["wire"],
    )  # fmt: skip
    assert need.states == step["optimizer"]
    held = [sum(parts[name] for name in ("parameters", "gradients", *MOVING)) for parts in planned.values()]
    assert max(held) <= sum(need.instants["backward"].values())


def through_a_ring():
    """The most that was lent on a stand-in accelerator while an optimizer's records passed, and the bounds."""
    import torch
    from buckets import buckets_of
    from instruments import accelerator
    from instruments.host_races import AcceleratedMesh, on_accelerator

    device, found = accelerator.register(), {}
    optimizers = {
        "amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True), "adamw": torch.optim.AdamW,
        "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9), "sgd": torch.optim.SGD,
    }  # fmt: skip
    for name, optimizer in optimizers.items():
        with buckets_of(4096), alone_in(1), on_accelerator() as model:
            engine = engine_of(
                tiny("llama"), AcceleratedMesh(model), stage=2, precision="bf16", optimizer=optimizer,
                offload={"optimizer": "host", "executor": "device"},
            )  # fmt: skip
            for number in range(2):
                given = {key: values.to(device) for key, values in micro_batches(number, 1)[0].items()}
                engine.train_batch([given])
            found[name] = held(engine, 1)["wire"]
    return found


@pytest.mark.long
def test_the_ring_is_as_wide_as_the_records_of_the_optimizer(alone):
    found = alone(through_a_ring)
    assert {name: both for name, both in found.items() if both[0] > both[1]} == {}
    bounds = {name: bound for name, (_, bound) in found.items()}
    assert bounds["sgd"] < bounds["momentum"] < bounds["adamw"] < bounds["amsgrad"]
