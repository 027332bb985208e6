"""What benchmarks/sequence.py compares is the same training: the losses of all that run agree."""

import pytest


@pytest.mark.long
def test_all_variants_have_one_loss_and_a_peer_that_fails_its_error(benchmark_in_fork):
    small = ["--variants", "one,sp,torch-cp", "--rounds", "1", "--tokens", "64", "--memory-tokens", "512"]
    result = benchmark_in_fork("sequence", *small)
    one, own, ring = (result["variants"][name] for name in ("one", "sp", "torch-cp"))
    assert own["losses"] == pytest.approx(one["losses"], rel=1e-5)
    assert ring.get("losses") == pytest.approx(one["losses"], rel=1e-4) or "sharding strategy" in ring["error"]
    assert all(found["most"] > found["held"] > 0 for found in result["memory"].values())
