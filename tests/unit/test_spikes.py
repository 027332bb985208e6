"""A loss far above the recent ones is told once; curves as runs have them are not."""

import math
import random

import pytest

from zero3d.train.spikes import ENOUGH, SpikeWatch, find_spike


def told(losses):
    watch = SpikeWatch()
    return [i for i, loss in enumerate(losses) if watch.look(loss) is not None]


def curve(steps, seed=0, noise=0.05, start=10.0, end=2.5, rate=60.0):
    """A warm-up and a long fall, with noise."""
    draw = random.Random(seed)
    return [end + (start - end) * math.exp(-i / rate) + draw.gauss(0.0, noise) for i in range(steps)]


@pytest.mark.parametrize("noise", [0.0, 0.01, 0.1, 0.5])
@pytest.mark.parametrize("rate", [5.0, 60.0, 1000.0])
def test_a_warm_up_and_a_noisy_fall_are_no_spikes(noise, rate):
    for seed in range(2):
        assert told(curve(2000, seed, noise, rate=rate)) == []


@pytest.mark.long
def test_neither_are_more_of_them():
    for noise in (0.0, 0.01, 0.1, 0.5):
        for rate in (5.0, 60.0, 1000.0):
            for seed in range(2, 20):
                assert told(curve(2000, seed, noise, rate=rate)) == []


def test_heavy_tails_and_slow_rises_are_no_spikes():
    draw = random.Random(1)
    assert told([3.0 + 0.1 * draw.expovariate(1.0) for _ in range(5000)]) == []
    assert told([2.0 + i / 500 + draw.gauss(0.0, 0.02) for i in range(2000)]) == []
    assert told([0.001 * (1 + draw.random()) for _ in range(500)]) == []  # a text learnt by heart


def test_a_spike_is_told_once_for_as_long_as_it_lasts():
    losses = curve(400)
    losses[300:310] = [7.0] * 10
    losses[350] = 9.0
    assert told(losses) == [300, 350]


def test_a_spike_says_what_was_usual():
    spike = find_spike([2.0, 2.1] * 20, 4.0)
    assert spike is not None
    assert spike == (4.0, pytest.approx(2.05), 40)
    assert find_spike([2.0, 2.1] * 20, 2.2) is None


def test_nothing_is_told_at_the_start_or_of_what_is_not_finite():
    assert told([2.0] * (ENOUGH - 1) + [50.0]) == []
    assert told([2.0] * 40 + [math.nan, math.inf, 50.0]) == [42]


def test_a_new_level_is_told_once_and_becomes_the_usual_one():
    losses = [2.0 + 0.01 * (i % 3) for i in range(100)] + [5.0 + 0.01 * (i % 3) for i in range(200)]
    assert told(losses) == [100]
