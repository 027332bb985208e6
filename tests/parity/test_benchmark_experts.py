"""What benchmarks/experts.py compares is the same training: the losses of all ways agree."""

import pytest


@pytest.mark.long
def test_all_ways_have_one_loss(benchmark_in_fork):
    small = ["--ranks", "2", "--rounds", "1", "--tokens", "32", "--size", "64", "--experts", "4", "8"]
    result = benchmark_in_fork("experts", *small)
    losses = result["losses"]
    assert set(losses) >= {"dp", "ep-exact", "ep-fast"}
    assert list(losses.values()) == pytest.approx([losses["dp"]] * len(losses), rel=1e-5)
    assert all(len(times) == 2 for times in result["layers"].values())
