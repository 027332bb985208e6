"""A rank that computes on its host's second device makes nothing on the first, where another rank's memory is.

There are two stand-in accelerators. While the engine is used the current device is the first one, as it is in every new
thread: whoever names no device, or one without its number, is found there.
"""

import os
import sys
from collections import Counter, defaultdict
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from meshes import micro_batches, sum_of
from models import adamw
from tensors import tiny

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
ON_HOST = {"optimizer": "host", "gradients": "host", "executor": "host"}


def trained(options, plant=""):
    """What training on the second of two devices makes on the first and on the second one."""
    from instruments import accelerator, groups, planted

    import zero3d

    os.environ.update(LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    device = accelerator.register(devices=2)
    accelerator.Log.made = made = defaultdict(Counter)
    with groups.alike(2, rank=1, device=accelerator.NAME), getattr(planted, plant, nullcontext)():
        mesh = zero3d.Mesh()
        assert mesh.device == device == torch.device(accelerator.NAME, 1)
        assert torch.accelerator.current_device_index() == 1
        torch.accelerator.set_device_index(0)
        engine = zero3d.Engine(
            tiny("llama"), mesh=mesh, precision="bf16", optimizer=adamw, loss=sum_of, accumulate=2, **options
        )

        def given(number):
            return [{key: values.to(device) for key, values in each.items()} for each in micro_batches(number, 2)]

        for number in range(2):
            engine.train_batch(given(number), wait=False)
        engine.evaluate(given(0))
        with engine.full_params():
            [p.sum() for p in engine.module.parameters()]
        for bucket in engine.stream_weights(bucket_bytes=8192):
            assert bucket
        engine.release()
    return dict(made[0]), dict(made[1])


def kinds(made):
    return {what.partition(" by ")[0] for what in made}


@pytest.mark.parametrize("options", [
    {"stage": 3, "gather_wire": "int8"},
    *(pytest.param(options, marks=pytest.mark.long) for options in (
        {"stage": 3, "offload": {"optimizer": "host", "params": "host", "executor": "device"}},
        {"stage": 3, "weight_shards": "cast"}, {"stage": 2, "offload": ON_HOST}, {"stage": 1, "exact": True, "ema": 0.9}, {"stage": 0},
    )),
], ids=str)  # fmt: skip
def test_a_rank_of_the_second_device_makes_nothing_on_the_first(alone, options):
    first, second = alone(trained, options)
    assert first == {}
    assert kinds(second) == {"tensor", "stream", "event", "pinned memory"}


@pytest.mark.long
@pytest.mark.parametrize(("plant", "made"), [("stream_without_device", "stream"), ("device_without_number", "tensor")])
def test_what_names_no_device_or_one_without_its_number_is_found_on_the_first(alone, plant, made):
    first, _ = alone(trained, {"stage": 3}, plant)
    assert made in kinds(first)
