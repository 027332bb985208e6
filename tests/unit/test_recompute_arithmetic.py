"""The arithmetic of recomputation: one third, the square root."""

from fractions import Fraction

import pytest

from zero3d.activations.policy import Policy, best_segment, recompute_arithmetic
from zero3d.errors import ConfigError


def test_one_more_forward_is_a_third_of_a_step():
    assert recompute_arithmetic(24, "none") == (0, 24, 24, 0)
    assert recompute_arithmetic(24, "full") == (24, 1, 1, Fraction(1, 3))
    assert recompute_arithmetic(24, "every:5") == (5, 5, 5, Fraction(1, 3))
    assert recompute_arithmetic(3, "every:8") == (1, 3, 3, Fraction(1, 3))
    assert recompute_arithmetic(24, "selective") == (24, 24, 1, None)
    assert recompute_arithmetic(24, "selective", Fraction(3, 10)).extra_forward == Fraction(1, 10)


def test_the_best_segment_is_near_the_square_root():
    for layers in (1, 4, 16, 36, 64, 100):
        best = best_segment(layers)
        at_best = recompute_arithmetic(layers, f"every:{best}")
        assert best == round(layers**0.5)
        assert at_best.kept_inputs + at_best.interiors == 2 * best
    assert best_segment(64, interior=16) == 2
    assert Policy.of("every:12").every == 12


@pytest.mark.parametrize(("policy", "message"), [
    ("ful", "Did you mean 'full'"), ("selectiv", "Did you mean 'selective'"), ("evry:2", "Did you mean 'every:K'"),
    ("every:0", "whole number from 1"), ("every", "whole number from 1"), ("every:-1", "whole number"),
    ("full:2", "unknown"), ("", "pass one of none, full"),
])  # fmt: skip
def test_an_unknown_policy_is_refused_with_the_nearest(policy, message):
    with pytest.raises(ConfigError, match=message):
        Policy.of(policy)
