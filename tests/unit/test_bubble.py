"""Bubbles by event count."""

from fractions import Fraction

import pytest

from zero3d.errors import ConfigError
from zero3d.pipeline.actions import Action, bubble, makespan


def gpipe(p, m):
    forward = [("F", i) for i in range(m)]
    return {r: [Action(k, r, i) for k, i in forward + [("B", i) for i in range(m)]] for r in range(p)}


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 4), (4, 7), (8, 3)])
def test_gpipe_waits_p_minus_1_over_m(p, m):
    assert bubble(gpipe(p, m)) == Fraction(p - 1, m)
    assert makespan(gpipe(p, m)) == 3 * (m + p - 1)


def test_weights_can_fill_the_bubble():
    split = {
        0: [Action("F", 0, 0), Action("F", 0, 1), Action("B", 0, 0), Action("B", 0, 1)],
        1: [
            Action("F", 1, 0), Action("I", 1, 0), Action("F", 1, 1), Action("I", 1, 1),
            Action("W", 1, 0), Action("W", 1, 1),
        ],
    }  # fmt: skip
    whole = {0: split[0], 1: [Action(k, 1, i) for i in (0, 1) for k in ("F", "B")]}
    assert makespan(split) < makespan(whole)


def test_lists_that_wait_for_each_other_are_refused():
    with pytest.raises(ConfigError, match="wait for each other"):
        makespan({0: [Action("B", 0, 0), Action("F", 0, 0)]})
