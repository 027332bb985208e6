"""The one cast, and what it must keep."""

import math

import pytest
import torch

from zero3d.errors import ConfigError, Zero3dError
from zero3d.precision import LossScale, LossScaling, Precision, to_compute


def half_away(value):
    """Reference: bf16 neighbours of a float32, the nearer one, ties away from zero."""
    exact = torch.tensor([value], dtype=torch.float32).view(torch.int32).item()
    low = exact & ~0xFFFF
    rest = exact & 0xFFFF
    chosen = low + 0x10000 if rest >= 0x8000 else low
    chosen = chosen - (1 << 32) if chosen >= 1 << 31 else chosen
    return torch.tensor([chosen], dtype=torch.int32).view(torch.float32).item()


def test_ties_round_away_from_zero_and_nothing_else_changes():
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3000, generator=generator) * torch.logspace(-30, 30, 3000)
    bits = values.view(torch.int32)
    ties = ((bits & ~0xFFFF) | 0x8000).view(torch.float32)
    near = ((bits & ~0xFFFF) | 0x7FFF).view(torch.float32)
    for tensor in (values, ties, near):
        expected = torch.tensor([half_away(float(v)) for v in tensor])
        assert torch.equal(to_compute(tensor, torch.bfloat16).float(), expected)
    assert not torch.equal(to_compute(ties, torch.bfloat16), ties.bfloat16())  # torch rounds half to even


def test_infinities_nans_zeros_and_large_tensors():
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 3.4028235e38])
    cast = to_compute(special, torch.bfloat16)
    assert cast[:2].tolist() == [math.inf, -math.inf]
    assert cast[2].isnan()
    assert math.copysign(1, cast[4]) == -1
    assert cast[5] == math.inf
    big = torch.randn(1 << 19)
    assert torch.equal(to_compute(big, torch.bfloat16), to_compute(big.view(2, -1), torch.bfloat16).flatten())
    assert torch.equal(to_compute(big, torch.float16), big.half())


def test_every_bf16_value_survives_a_round_trip():
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    again = to_compute(every.float(), torch.bfloat16)
    same = again.view(torch.int16) == every.view(torch.int16)
    assert bool((same | every.isnan()).all())
    assert bool(again[every.isnan()].isnan().all())


def test_an_overflow_at_the_minimum_scale_is_an_error_that_names_the_way_out():
    scale = LossScale(Precision("fp16", LossScaling(initial=2.0, hysteresis=1, minimum=1.0)))
    scale.update(overflow=True)
    assert scale.value == 1.0
    with pytest.raises(Zero3dError, match="bf16"):
        scale.update(overflow=True)


def test_the_scale_resumes_where_it_was():
    rule = LossScaling(initial=8.0, window=3, hysteresis=2)
    straight, first = LossScale(Precision("fp16", rule)), LossScale(Precision("fp16", rule))
    overflows = [False, True, False, False, True, True, False, False, False, False]
    for overflow in overflows:
        straight.update(overflow)
    for overflow in overflows[:5]:
        first.update(overflow)
    second = LossScale(Precision("fp16", rule))
    second.restore(first.state())
    for overflow in overflows[5:]:
        second.update(overflow)
    assert second.state() == straight.state()


def test_unknown_precisions_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'fp16'"):
        Precision.of("f16")
