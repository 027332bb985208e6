"""`make demo-llava` and `make demo-qlora` as a user runs them: two runs on 2 ranks, more than nine in ten, a picture."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "llava_demo" / "demo.py"


@pytest.mark.long
@pytest.mark.parametrize("more", [[], ["model.quantize=nf4"]], ids=["16 bits", "4 bits"])
def test_adapters_teach_a_tiny_llava_new_shapes(tmp_path, more):
    words = [sys.executable, str(DEMO), "demo", *more]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    colour, shape = (
        int(share) for share in re.search(r"new shapes.*colour (\d+)%, shape (\d+)%", done.stdout).groups()
    )
    assert min(colour, shape) > 90
    assert (tmp_path / "demo" / "samples.png").stat().st_size > 10_000
