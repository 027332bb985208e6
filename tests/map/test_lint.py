"""Lint and types: a job in the same queue as all tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("command", ["mypy", "ruff check .", "ruff format --check ."])
def test_it_finds_nothing(command):
    name, *words = command.split()
    done = subprocess.run([Path(sys.executable).with_name(name), *words], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
