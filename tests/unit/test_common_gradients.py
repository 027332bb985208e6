"""Norms that tp ranks should have alike are compared in the first step; no ranks."""

from types import SimpleNamespace

import pytest

from zero3d.replica import Replica, Slices

CUT, OVER = float("nan"), float("inf")


@pytest.mark.parametrize(("norms", "found"), [
    ([[1.0, CUT, 2.0, 0.0], [1.0, CUT, 2.0, 0.0]], None),  # the last one is padding
    ([[1.0, CUT, 2.0, 0.0], [1.0, CUT, 2.5, 0.0]], 9),
    ([[1.0, CUT, 2.0, 0.0], [1.001, CUT, OVER, 0.0]], None),  # rounding, and an overflow
    ([[1.0, CUT, 0.0, 0.0], [2.0, CUT, 0.3, 0.0]], 4),
])  # fmt: skip
def test_the_first_parameter_that_tp_ranks_disagree_on_is_found(norms, found):
    replica = Replica(SimpleNamespace(), SimpleNamespace(), Slices(SimpleNamespace(size=2, rank=0)))
    places = [[4.0, 5.0, 9.0, -1.0]] * 2
    assert replica._compare(places, norms) == found
