"""Averages of a curve: honest at both ends, where a window has one side only, and no single value pulls them."""

import itertools
import math
import random

import pytest

from zero3d.train.curve import as_text, last_average, limits, smooth

NAN = math.nan


def falling(steps, slope=-0.01, noise=0.0, seed=0):
    drawn = random.Random(seed)
    return [5.0 + slope * step + noise * drawn.gauss(0, 1) for step in range(steps)]


def test_a_line_is_its_own_average_up_to_both_ends():
    for steps in (1, 2, 3, 7, 60, 3000):
        line = falling(steps)
        assert smooth(line) == pytest.approx(line)


@pytest.mark.parametrize("steps", [31, 200, 3000])
def test_on_a_noisy_falling_line_both_ends_lie_near_it_and_nearer_than_the_raw_values(steps):
    """The root mean square over twenty runs, of noise 0.1; a window that lags would be off by half of its fall."""
    line = falling(steps, -3.0 / steps)
    runs = [falling(steps, -3.0 / steps, 0.1, seed) for seed in range(20)]
    averages = [smooth(run) for run in runs]
    for place in (0, -1):
        off = [average[place] - line[place] for average in averages]
        raw = [run[place] - line[place] for run in runs]
        assert math.hypot(*off) < 0.8 * math.hypot(*raw)
        assert abs(sum(off)) / len(off) < 0.05


def test_both_ends_go_on_straight_and_bend_nowhere():
    for seed in range(50):
        values = falling(100, -0.01, 0.2, seed)
        found, most, least = smooth(values), max(values), min(values)
        for end in (found[:11], found[-11:]):
            steps = [b - a for a, b in itertools.pairwise(end) if least < a < most and least < b < most]
            assert steps == pytest.approx([steps[0]] * len(steps), abs=1e-9)


def test_the_last_average_is_that_of_the_last_whole_window_and_not_where_a_trend_would_lead():
    average, many = last_average(falling(100))
    assert (average, many) == (pytest.approx(5.0 - 0.01 * 89), 21)
    spiked, _ = last_average([*falling(99), 100.0])
    assert spiked == pytest.approx(average, abs=0.011)
    assert last_average([2.0]) == (2.0, 1)
    assert last_average([2.0, NAN]) == (2.0, 1)
    assert math.isnan(last_average([NAN])[0])


def test_each_end_has_its_own_slope():
    turned = [abs(place - 50) / 10 for place in range(101)]
    found = smooth(turned)
    assert (found[0], found[-1]) == pytest.approx((5.0, 5.0))
    noise = [0.1, -0.1, 0.0] * 20  # a slope that it may have made is compared with that of its own end
    level, rising = [2.0 + each for each in noise], [2.0 + 0.03 * step + each for step, each in enumerate(noise)]
    assert smooth([*level, *rising])[-1] == pytest.approx(3.77, abs=0.08)
    assert smooth([*reversed(rising), *level])[0] == pytest.approx(3.77, abs=0.08)
    assert smooth([*rising, *level])[-1] == pytest.approx(2.0, abs=0.03)


@pytest.mark.parametrize("place", [0, 1, 20, -2, -1])
def test_a_single_spike_pulls_the_average_nowhere(place):
    values = falling(60, noise=0.05)
    spiked = [*values]
    spiked[place] = 100.0
    assert max(abs(a - b) for a, b in zip(smooth(values), smooth(spiked), strict=True)) < 0.1
    level = [1.0] * 31
    level[place] = 100.0
    assert smooth(level) == pytest.approx([1.0] * 31)


def test_the_average_does_not_bend_to_the_last_value():
    values = [*falling(100), 4.5]
    assert smooth(values)[-1] == pytest.approx(4.0, abs=0.02)


def test_values_that_are_not_finite_are_passed_over_and_no_average_is_made_of_none():
    assert smooth([1.0, 1.0, NAN, 50.0, 1.0, math.inf, 1.0])[1:-1] == [1.0] * 5
    assert smooth([]) == []
    found = smooth([NAN, NAN, *falling(50), math.inf])
    assert [math.isfinite(value) for value in found] == [False] * 2 + [True] * 50 + [False]
    assert math.isnan(smooth([NAN])[0])
    hole = smooth([1.0] * 40 + [NAN] * 40 + [1.0] * 40)
    assert hole[35] == hole[85] == 1.0
    assert math.isnan(hole[60])


def test_an_average_stays_within_the_values_of_its_window():
    values = [5.9] * 10 + [4.0] + falling(60, -0.02)
    assert max(smooth(values)) <= 5.9
    noisy = smooth([2.0 + (-1) ** step for step in range(41)])
    assert max(abs(value - 2.0) for value in noisy[10:-10]) < 0.2


def test_a_window_is_a_hundredth_of_a_long_run():
    step = [0.0] * 5000 + [1.0] * 5000
    rising = [place for place, value in enumerate(smooth(step)) if 0 < value < 1]
    assert 20 < len(rising) < 100


def test_a_panel_leaves_a_few_high_values_out_and_none_of_a_short_run():
    course = falling(1000, -0.002)
    assert limits(course) == (course[-1], course[0])
    spiked = [*course, 900.0]
    low, high = limits(spiked, smooth(spiked))
    assert (low, high < 6) == (course[-1], True)
    assert limits([1.0, 900.0, NAN]) == (1.0, 900.0)
    assert limits([NAN, math.inf]) is None
    early = [11.0] + [3.0] * 1000
    assert limits(early, smooth(early)) == (3.0, 3.0)
    diverged = [3.0] * 1000 + [11.0] * 40
    assert limits(diverged, smooth(diverged)) == (3.0, 11.0)


def test_the_terminal_s_curve_says_its_range():
    lines = [*as_text([3.0, 2.0, NAN, 1.0], width=10, height=4)]
    assert lines[0].startswith("  3.00 ┤")
    assert lines[3].startswith("  1.00 ┤")
    assert not [*as_text([NAN])]
    first, *_, last = (line.partition("┤")[2] for line in as_text([3.0, 2.0, 1.0], width=10, height=4) if "┤" in line)
    empty = "\u2800"
    assert (first[0] != empty, first[-1], last[0], last[-1] != empty) == (True, empty, empty, True)  # it falls
