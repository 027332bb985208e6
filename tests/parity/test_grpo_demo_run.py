"""`make demo-grpo` as a user runs it: weights from two ranks to a sampler after every step, until the task is learnt."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "grpo_demo" / "demo.py"


@pytest.mark.long
def test_a_tiny_model_learns_to_sort_with_a_sampler_in_a_process_of_its_own(tmp_path):
    words = [sys.executable, str(DEMO), "demo", "0"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (exact,) = re.search(r"^exact match: (\d+)%", done.stdout, re.M).groups()
    assert int(exact) >= 80
    (ratio,) = re.search(r"largest \|ratio - 1\| .*: (\S+)$", done.stdout, re.M).groups()
    assert float(ratio) <= 1e-5
    assert (tmp_path / "demo" / "rewards.png").stat().st_size > 10_000
