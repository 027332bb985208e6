"""Norms that tp ranks should have alike are compared in every step; no ranks."""

import pytest
import torch

from zero3d.zero.model_group import find_uneven

NAN, OVER = float("nan"), float("inf")
COMMON = [4.0, -1.0, 9.0, -1.0]  # the second one is cut, the last one padding


@pytest.mark.parametrize(("norms", "found"), [
    ([[1.0, 5.0, 2.0, 0.0], [1.0, 7.0, 2.0, 0.0]], -1),
    ([[1.0, 5.0, 2.0, 0.0], [1.0, 7.0, 2.5, 0.0]], 9),
    ([[0.0, 5.0, 2.0, 0.0], [0.3, 7.0, 2.0, 0.0]], 4),
    ([[1.0, 5.0, 2.0, 0.0], [1.001, NAN, OVER, 0.0]], -1),  # rounding, and an overflow
    ([[NAN, 5.0, 2.0, 0.0], [1.0, 7.0, 2.5, 0.0]], 9),
])  # fmt: skip
def test_a_parameter_that_tp_ranks_disagree_on_is_found(norms, found):
    even = torch.ones(2, 4, dtype=torch.float64)
    stages = torch.stack([even, torch.tensor(norms, dtype=torch.float64)])
    assert find_uneven(stages, torch.tensor([[0.0, 1.0, 2.0, 3.0], COMMON], dtype=torch.float64)) == found
