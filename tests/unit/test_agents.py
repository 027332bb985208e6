"""AGENTS.md: its commands can be typed, and what it points at is there."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "AGENTS.md").read_text()
(BLOCK,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [words for line in BLOCK.splitlines() if (words := shlex.split(line, comments=True))]
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def of_program(name):
    return [words for words in COMMANDS if words[0] == name or words[0].endswith(f"/{name}")]


def test_the_page_fits_on_two_screens():
    assert len(PAGE.splitlines()) <= 60
    assert len(COMMANDS) == sum(len(of_program(name)) for name in ("make", "python", "zero3d"))


def test_its_targets_and_rooms_are_there():
    assert len(of_program("make")) >= 2
    for _, target, *settings in of_program("make"):
        assert target in TARGETS
        assert all((ROOT / "src" / "zero3d" / setting.removeprefix("ROOM=")).is_dir() for setting in settings)


@pytest.mark.parametrize("words", of_program("python"), ids=" ".join)
def test_its_programs_take_what_it_gives_them(words):
    if words[1] == "-m":
        assert words[2] == "pytest"
        assert all((ROOT / path).exists() for path in words[3:])
        return
    told = subprocess.run([sys.executable, *words[1:2], "--help"], cwd=ROOT, capture_output=True, text=True, check=True)
    verbs = re.search(r"\{([a-z,]+)\}", told.stdout)
    if verbs is not None and words[2] != "--help":
        assert words[2] in verbs[1].split(",")
        command = [sys.executable, *words[1:3], "--help"]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert all(word in told.stdout for word in words[2:] if word.startswith("--"))


@pytest.mark.parametrize("words", of_program("zero3d"), ids=" ".join)
def test_its_verbs_run(words, zero3d_in_fork, tmp_path):
    done = zero3d_in_fork(tmp_path, *words[1:])
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_its_paths_are_there():
    paths = re.findall(r"`((?:src|docs|tests|benchmarks)/[^`*]*)`", PAGE) + re.findall(r"\]\(([^)]+)\)", PAGE)
    assert len(paths) > 12
    assert [path for path in paths if not (ROOT / path).exists()] == []
