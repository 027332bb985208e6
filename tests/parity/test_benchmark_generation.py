"""What benchmarks/generation.py compares writes the same tokens, and sends what it says."""

from importlib.util import find_spec

import pytest

SMALL = ["--rounds", "2", "--model", "layers=2,d=64,vocab=64", "--rows", "2", "--prompt", "4", "--new", "5"]


@pytest.mark.long
@pytest.mark.skipif(find_spec("trl") is None, reason="needs the extra trl")
def test_every_variant_has_turns_and_writes_the_same_tokens(benchmark_in_fork):
    result = benchmark_in_fork("generation", *SMALL, "--no-deepspeed")
    assert {name: len(times) for name, times in result["seconds"].items()} == dict.fromkeys(
        ("zero3d-2", "zero3d-3", "zero3d-3-units"), 2
    )
    assert result["same_tokens"]
    assert result["sent"]["zero3d-2"] == 0
    assert result["sent"]["zero3d-3-units"] == 5 * result["sent"]["zero3d-3"] > 0
