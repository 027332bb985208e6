"""What the benchmark of bases in 4 bits compares is the same training, and what it computes is what was asked for."""

import pytest

SMALL = ["--ranks", "2", "--rounds", "1", "--layers", "2", "--hidden", "128", "--intermediate", "256", "--seq", "16"]


@pytest.mark.long
def test_losses_on_four_bits_are_near_those_on_sixteen_and_those_of_peft(benchmark_in_fork):
    found = benchmark_in_fork("qlora", *SMALL)
    plain = found["losses"]["bf16"]
    assert len(set(plain)) == len(plain) == 3
    for name in ("nf4", "nf4-double"):
        assert found["losses"][name] == pytest.approx(plain, rel=1e-2)
        assert found["losses"][name] != plain
    assert found["alone_losses"]["nf4"] == pytest.approx(found["alone_losses"]["peft"], rel=1e-2)
    drawn = found["bytes"]["drawn"]
    assert drawn["nf4"]["gathered"] / drawn["nf4"]["weights"] == 0.5 + 1 / 16
    assert drawn["nf4-double"]["gathered"] / drawn["nf4-double"]["weights"] == pytest.approx(
        0.5 + 1 / 64 + 4 / 16384, rel=1e-3
    )
    assert found["held"]["nf4"]["counted"] < found["held"]["bf16"]["counted"]
