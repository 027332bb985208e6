"""`make demo-vlm` as a user runs it: the same losses in four ways, models that know what they have learnt, a picture."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "vlm_demo" / "demo.py"


@pytest.mark.long
def test_a_tiny_qwen3_vl_is_trained_in_four_ways_and_learns_new_shapes(tmp_path):
    done = subprocess.run(
        [sys.executable, str(DEMO), "demo"], cwd=tmp_path, capture_output=True, text=True, timeout=1500
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    apart = [float(number) for number in re.findall(r"at most (\S+) from those of ZeRO-2", done.stdout)]
    assert len(apart) == 3
    assert max(apart) <= 1e-5
    shares = [int(share) for share in re.findall(r"(\d+)%", done.stdout)]
    assert len(shares) == 16
    assert (tmp_path / "demo" / "learnt.png").stat().st_size > 10_000
