"""Stochastic rounding to bf16: by which noise, unbiased, and what it keeps."""

import struct
from hashlib import blake2b
from itertools import combinations

import pytest
import torch

from zero3d.offload.host_adam import AdamRule
from zero3d.offload.rounding import TILE, Draw, noise_table, round_to_bf16

TABLE = noise_table(torch.device("cpu"))
BF16_LARGEST = 3.3895313892515355e38


FIRST_STEP = Draw(seed=0, step=1, moment=0)


def rounded(values, draw=FIRST_STEP, first=0):
    out = torch.empty(len(values), dtype=torch.bfloat16)
    round_to_bf16(values.clone(), out, draw, first, TABLE, torch.empty(len(values)))
    return out


def noise_of(draw, first, count):
    """The noise of consecutive elements, as it shows: a value rounds up where its low half and the noise carry."""
    bits, noise = torch.arange(16), torch.zeros(count, dtype=torch.int64)
    for bit in bits.flip(0).tolist():  # the largest noise that does not carry, bit by bit
        low = (1 << 16) - (noise | 1 << bit)  # carries from this noise on
        values = ((0x3F80 << 16) | low).to(torch.int32).view(torch.float32)
        up = rounded(values, draw, first).view(torch.int16) != 0x3F80
        noise[up] |= 1 << bit
    return noise


def bits(high, low=0):
    return ((torch.as_tensor(high, dtype=torch.int32) << 16) | low).view(torch.float32)


EVERY_HIGH = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)


def test_the_noise_is_the_documented_function_of_seed_step_moment_and_index():
    draw, first = Draw(seed=7, step=12345, moment=1), 5 * TILE - 3
    found = noise_of(draw, first, 6)
    for place, value in enumerate(found.tolist()):
        tile, index = divmod(first + place, TILE)
        a, b = struct.unpack("<2i", blake2b(f"(7, 12345, 1, {tile})".encode(), digest_size=8).digest())
        scattered = index
        for _ in range(3):
            scattered = (scattered ^ scattered >> 15) * 0x9E3779B1 % 2**32
        assert value == ((a * scattered + b) % 2**32 >> 16) ^ 1 << 15  # + 2^15 of a signed number


def test_no_two_numbers_of_the_table_are_alike():
    assert len(TABLE.unique()) == TILE


def test_it_rounds_to_one_of_two_neighbours_and_keeps_what_bf16_has():
    every = bits(EVERY_HIGH)
    kept = rounded(every)
    same = kept.view(torch.int16) == EVERY_HIGH.to(torch.int16)
    assert bool((same | every.isnan()).all())
    assert torch.equal(kept.isnan(), every.isnan())
    for low in (0x0001, 0x7FFF, 0x8000, 0xFFFF):
        values = bits(EVERY_HIGH, low)
        finite = values.isfinite() & (values.abs() < BF16_LARGEST)
        up = rounded(values).view(torch.int16).to(torch.int32) - EVERY_HIGH
        assert set(up[finite].tolist()) <= {0, 1}


@pytest.mark.parametrize("low", [0x0001, 0x0040, 0x7FFF, 0x8000, 0xFFFF], ids=hex)
def test_nan_stays_nan_and_the_largest_finite_values_stay_finite(low):
    values = bits(EVERY_HIGH, low)
    for step in range(3):
        out = rounded(values, Draw(0, step, 0))
        assert torch.equal(out.isnan(), values.isnan())
        assert torch.equal(out.isinf(), values.isinf())
        largest = values.isfinite() & (values.abs() >= BF16_LARGEST)
        assert out[largest].float().abs().tolist() == [BF16_LARGEST, BF16_LARGEST]


def test_infinities_are_kept_and_their_neighbours_in_the_tensor_are_rounded_as_without_them():
    values = torch.randn(1000).abs()
    plain = rounded(values)
    values[[3, 500]] = torch.tensor([torch.inf, -torch.inf])
    out = rounded(values)
    assert out[[3, 500]].tolist() == [torch.inf, -torch.inf]
    others = torch.ones(1000, dtype=torch.bool).index_fill_(0, torch.tensor([3, 500]), False)
    assert torch.equal(out[others], plain[others])


@pytest.mark.parametrize(
    "value", [-0.3337, *(pytest.param(value, marks=pytest.mark.long) for value in (1.001, 3e-41, 1e30))]
)
def test_the_mean_over_elements_and_over_steps_is_the_value(value):
    count = 1 << 18
    exact = torch.full((count,), value)
    width = abs(
        float(bits(int(exact.view(torch.int32)[0]) >> 16)) - float(bits((int(exact.view(torch.int32)[0]) >> 16) + 1))
    )
    bound = 4 * width / 2 / count**0.5  # four standard deviations of the mean, at most
    over_elements = rounded(exact).double().mean()
    over_steps = sum(rounded(exact[:64], Draw(0, step, 1), 999).double().sum() for step in range(count // 64)) / count
    assert abs(float(over_elements) - float(exact[0])) < bound
    assert abs(float(over_steps) - float(exact[0])) < bound


def test_noise_is_uniform_and_unrelated_between_neighbours_steps_moments_seeds_and_tiles():
    count = 1 << 16
    samples = {
        "one": noise_of(Draw(0, 1, 0), 0, count), "neighbour": noise_of(Draw(0, 1, 0), 1, count),
        "next step": noise_of(Draw(0, 2, 0), 0, count), "other moment": noise_of(Draw(0, 1, 1), 0, count),
        "other seed": noise_of(Draw(1, 1, 0), 0, count), "other tile": noise_of(Draw(0, 1, 0), TILE, count),
    }  # fmt: skip
    for name, noise in samples.items():
        counts = torch.histc(noise.float(), 64, 0, 1 << 16)
        chi = float(((counts - count / 64) ** 2 / (count / 64)).sum())
        assert 20 < chi < 130, name  # 63 on average, 11 is its deviation
    for (one, left), (other, right) in combinations(samples.items(), 2):
        related = float(torch.corrcoef(torch.stack([left, right]).double())[0, 1])
        assert abs(related) < 5 / count**0.5, (one, other, related)


@pytest.mark.parametrize("first", [0, 48, TILE - 160, 3 * TILE + 7, (1 << 40) - 5])
def test_the_bits_are_the_same_however_a_range_is_cut(first):
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = rounded(values, first=first)
    for size in (1, 16, 333, 999):
        starts = range(0, 1000, size)
        parts = [rounded(values[start : start + size], first=first + start) for start in starts]
        assert torch.equal(torch.cat(parts), whole)
    assert rounded(values[:0], first=first).numel() == 0


def reached(step_of, steps=6000, spike=300.0, spiked=30):
    """How far 256 parameters come from 0 to their target 1, after gradients that are first much too large.

    step_of  the step by which bf16 moments are rounded, of the step that it is; None leaves them fp32
    """
    parameters, moments, rule = torch.zeros(256), [torch.zeros(256), torch.zeros(256)], AdamRule(lr=6e-3)
    for step in range(1, steps + 1):
        grad = (parameters - 1) * (spike if step <= spiked else 1.0)
        rule.update(torch.tensor(float(step)), [[each] for each in (parameters, grad, *moments)])
        if step_of is not None:
            for place, moment in enumerate(moments):
                moment.copy_(rounded(moment, Draw(0, step_of(step), place)))
    return float(parameters.mean())


@pytest.mark.long
def test_moments_of_16_bits_bring_parameters_as_far_as_those_of_32_unless_the_noise_is_the_same_in_every_step():
    """The second moment of the spike decays by 0.001 a step, a quarter of what bf16 can tell apart."""
    exact = reached(None)
    assert exact > 0.98
    assert abs(reached(lambda step: step) - exact) < 0.002
    assert reached(lambda step: 1) < 0.75 * exact


def test_a_second_moment_decays_as_in_32_bits():
    """1,000 steps without gradients multiply it by 0.999 each time, where the nearest bf16 value would be itself."""
    decayed, wanted = torch.ones(4096), 0.999**1000
    assert torch.ones(1).mul(0.999).bfloat16() == 1
    for step in range(1000):
        decayed = rounded(decayed * 0.999, Draw(0, step, 1)).float()
    assert abs(float(decayed.mean()) / wanted - 1) < 0.01
