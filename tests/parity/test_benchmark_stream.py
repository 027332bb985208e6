"""What benchmarks/stream.py compares sends the same bytes; its receivers take them."""

import pytest


@pytest.mark.long
def test_every_variant_has_turns_and_memory(benchmark_in_fork):
    result = benchmark_in_fork("stream", "--rounds", "2", "--model", "layers=2,d=64,vocab=64", "--bucket", "65536")
    assert result["parameters"] == 28
    assert result["bytes"] == 4 * (2 * (12 * 64 * 64 + 13 * 64) + 2 * 64 * 64 + 2 * 64)
    assert {name: len(times) for name, times in result["seconds"].items()} == dict.fromkeys(
        ("stream", "each", "raw", "bare", "gathers"), 2
    )
    assert all(found >= 2 * 65536 for found in result["memory"].values())
