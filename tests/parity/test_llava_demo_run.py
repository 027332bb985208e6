"""`make demo-llava` as a user runs it: two runs on 2 ranks, an accuracy of more than nine in ten, a picture."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "llava_demo" / "demo.py"


@pytest.mark.long
def test_adapters_teach_a_tiny_llava_new_shapes(tmp_path):
    words = [sys.executable, str(DEMO), "demo"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    colour, shape = (
        int(share) for share in re.search(r"new shapes.*colour (\d+)%, shape (\d+)%", done.stdout).groups()
    )
    assert min(colour, shape) > 90
    assert (tmp_path / "demo" / "samples.png").stat().st_size > 10_000
