"""Moments of 16 bits: the same at every place, executor and cut, over dp in exact mode, and unbiased."""

import pytest
import torch
from buckets import buckets_of
from tiers import INFINITE, PLACES, Case, engine_of, step, trained
from torch import nn

import zero3d

MOMENTS = {"moments": "bf16"}
STEPS = (0, INFINITE, 2)  # the second is not applied


def of(place):
    return {**PLACES[place], **MOMENTS}


CUTS = (("host", 1024), ("host, device updates", 4096), ("disk", 528), ("host", 1 << 18),
        ("disk, device updates", 4096), ("part on host", 1024))  # fmt: skip


@pytest.mark.parametrize(("stage", "master", "cuts"), [
    (3, "split", 3), *(pytest.param(*case, 6, marks=pytest.mark.long) for case in ((0, "split"), (2, "fp32"), (3, "split"))),
])  # fmt: skip
def test_16_bit_moments_are_the_same_at_every_place_and_in_every_cut(tmp_path, stage, master, cuts):
    case, found = Case(stage=stage, master=master), {}
    for place, bucket in CUTS[:cuts]:
        run = trained(case, of(place), STEPS, bucket)
        assert not run.unplanned, (place, bucket, run.unplanned)
        found[place, bucket] = run.bits
    wanted = found["host", 1024]
    assert all(bits == wanted for bits in found.values()), {key: bits["hash"] for key, bits in found.items()}
    assert wanted["hash"] != trained(case, PLACES["host"], STEPS).bits["hash"]


def over_dp(case, place):
    with buckets_of(1024):
        engine = engine_of(case, of(place))
        for number in STEPS:
            step(engine, case, number)
        return engine.fingerprint()


@pytest.mark.parametrize("dps", [(1, 2), pytest.param((1, 2, 4), marks=pytest.mark.long)], ids=str)
def test_16_bit_moments_are_the_same_at_every_dp_in_exact_mode(ranks, dps):
    hashes = set()
    for dp in dps:
        stage, place = {1: (0, "host"), 2: (3, "all on host"), 4: (2, "host, device updates")}[dp]
        hashes |= set(ranks(dp, over_dp, Case(dp, stage, moments=(4 // dp, "auto"), exact=True), place))
    assert len(hashes) == 1


class Free(nn.Module):
    """Parameters whose gradient the caller gives."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(4096))

    def forward(self, given):
        return (self.w * given).sum()


def gone(executor, moments, steps, **changes):
    """Where parameters are after steps whose gradients are a slow drift in much noise."""
    offload = {"optimizer": "host", "executor": executor, "moments": moments}
    engine = zero3d.Engine(
        Free(), stage=2, precision="fp32", clip_norm=None, offload=offload,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.0, fused=True, **changes),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(3)
    drift = torch.randn(4096, generator=generator)
    for _ in range(steps):
        engine.backward(engine(drift * 0.3 + torch.randn(4096, generator=generator)))
        engine.step()
    with engine.full_params():
        return engine.module.w.detach().double().clone()


@pytest.mark.long
@pytest.mark.parametrize("executor", ["host", "device"])
def test_after_6000_steps_parameters_are_where_32_bit_moments_bring_them(executor):
    far = gone("host", "fp32", 6000)
    found = gone(executor, "bf16", 6000)
    share = float((found * far).sum() / far.square().sum())
    assert abs(share - 1) < 0.01
    assert float((found - far).norm() / far.norm()) < 0.05
