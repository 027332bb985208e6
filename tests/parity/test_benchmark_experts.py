"""What benchmarks/experts.py compares is the same training: the losses of all ways agree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "experts.py"


@pytest.mark.long
def test_all_ways_have_one_loss(tmp_path):
    small = ["--ranks", "2", "--rounds", "1", "--tokens", "32", "--size", "64", "--experts", "4", "8"]
    out = tmp_path / "out.json"
    subprocess.run([sys.executable, SCRIPT, *small, "--json", out], check=True)
    result = json.loads(out.read_text())
    losses = result["losses"]
    assert set(losses) >= {"dp", "ep-exact", "ep-fast"}
    assert list(losses.values()) == pytest.approx([losses["dp"]] * len(losses), rel=1e-5)
    assert all(len(times) == 2 for times in result["layers"].values())
