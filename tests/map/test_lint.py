"""Lint and types: a job in the same queue as all tests."""

import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Which lines need a `type: ignore` hangs on what torch says of its types: it is kept for the release of constraints.txt.
PINNED = f"torch=={metadata.version('torch').partition('+')[0]}" in (ROOT / "constraints.txt").read_text().split()


@pytest.mark.parametrize("command", ["mypy", "ruff check .", "ruff format --check ."])
def test_it_finds_nothing(command):
    name, *words = command.split()
    if name == "mypy" and not PINNED:
        words.append("--no-warn-unused-ignores")
    done = subprocess.run([Path(sys.executable).with_name(name), *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
