"""Moments of 16 bits: the same at every place, executor and cut, over dp in exact mode, and unbiased; gradients of 16."""

from math import inf, isfinite, nan

import pytest
import torch
from buckets import buckets_of
from models import adamw, batch, build, loss_of
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


# --- gradients in 16 bits ------------------------------------------------------------------------

NARROW = {"optimizer": "host", "gradients": "host", "gradient_dtype": "bf16"}
CLOSE = 2**-8  # of losses: bf16 keeps 8 binary digits
NEARER = 2**-12  # of norms, over which rounding averages


def far(one, other, name):
    """The largest distance of losses or norms of two runs, relative."""
    pairs = zip(one[name], other[name], strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs if isfinite(a) and isfinite(b))


def figures(case, place, steps=STEPS):
    run = trained(case, place, steps)
    assert not run.unplanned, run.unplanned
    losses, norms = (eval(run.bits[name], {"inf": inf, "nan": nan}) for name in ("losses", "norms"))
    return run.bits | {"losses": [each for step in losses for each in step], "norms": norms}


def check_narrow(case, places):
    """Losses and norms near those of fp32, the same steps left out, and the same bits at all of these places."""
    wide, *narrow = [figures(case, place) for place in ({**NARROW, "gradient_dtype": "fp32"}, *places)]
    assert all(found["reasons"] == wide["reasons"] for found in narrow)
    assert all(0 < far(found, wide, "losses") < CLOSE for found in narrow)
    assert all(0 < far(found, wide, "norms") < NEARER for found in narrow)
    assert len({found["hash"] for found in narrow}) == 1
    return narrow[0]["hash"]


def test_gradients_of_16_bits_on_the_host_train_nearly_as_those_of_32():
    places = (NARROW, NARROW | {"executor": "device"}, NARROW | {"fraction": 0.5})
    check_narrow(Case(1, 2, moments=(4, "auto")), places)


def test_gradients_of_16_bits_do_so_over_ranks_and_with_weights_on_the_host(ranks):
    case, hashes = Case(2, 3, precision="fp32", moments=(2, "auto"), grouped=True), set()
    hashes |= set(ranks(2, check_narrow, case, (NARROW, NARROW | {"params": "host", "executor": "device"})))
    assert len(hashes) == 1


def test_gradients_of_16_bits_are_updated_as_a_mean_over_targets():
    """AdamW's steps would hardly show a factor; its moments do."""
    found = []
    for dtype in ("fp32", "bf16"):
        engine = zero3d.Engine(
            build("net"), stage=2, clip_norm=None, optimizer=adamw, offload=NARROW | {"gradient_dtype": dtype}
        )
        engine.backward(loss_of(engine, batch(0)), weight=5)
        engine.step()
        moments = [engine.optimizer.states_of(owned)["exp_avg"] for owned in engine.optimizer.pieces]
        found.append(float(torch.cat([each.flatten().float() for each in moments]).norm()))
    assert found[1] == pytest.approx(found[0], rel=CLOSE)


def kept(dtype):
    """Bytes of gradients on the host, in a model of which nothing is padding but the ends of units."""
    engine = engine_of(Case(1, 2), NARROW | {"gradient_dtype": dtype})
    return sum(row.measured for row in engine.memory if (row.category, row.place) == ("gradients", "host"))


def test_gradients_of_16_bits_take_half_of_the_memory_of_the_host():
    assert kept("bf16") * 2 == kept("fp32") > 0
