"""Each verb of `zero3d` once as a user starts it, by the installed script: what tests in forks leave out (commands.py)."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from zero3d.tools.cli.main import parse
from zero3d.tools.cli.verbs import VERBS

STARTED = {
    "config": (["explain", "zero.stage"], 0, "zero.stage"),
    "plan": (["--theory", "--params", "7.5e9", "--gpus", "64"], 0, "31.4"),
    "calibrate": (["--help"], 0, "usage: zero3d calibrate"),
    "simulate": (["zero.stage=4"], 2, "zero.stage takes a whole number from 0 to 3"),
    "train": (
        ["zero.stage=4"],
        2,
        "zero.stage takes a whole number from 0 to 3",
    ),  # and a whole run: tests/parity/test_demo.py
    "compare": (["zero.stage=0,4"], 2, "zero.stage takes a whole number from 0 to 3"),
    "ckpt": (["ls", "."], 2, "CheckpointError: no checkpoint in ."),
    "doctor": (["--only", "space"], 0, "space"),
    "report": (["."], 2, "has no config.yaml, metrics.jsonl or report.json of a run"),
    "generate": ([".", "a"], 2, "has no config.yaml of a run and no config.json"),
    "launch": (["k8s", "run.yaml"], 0, "zero3d"),
    "models": (["llam"], 2, "Did you mean 'llama'?"),
    "completion": (["bash"], 0, "_zero3d_words"),
}


def test_every_verb_is_started():
    assert STARTED.keys() == VERBS.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_help_has_examples_that_can_be_typed(verb, capsys):
    with pytest.raises(SystemExit):
        parse([verb, "--help"])
    _, _, shown = capsys.readouterr().out.partition("\nexamples:\n")
    lines = shown.rstrip().splitlines()
    assert len(lines) >= 3
    for line in lines:
        words, does = re.split(r"\s{2,}", line.strip())
        assert parse(shlex.split(words)[1:]).verb
        assert does
        assert len(line) <= 80


RARE = ("calibrate", "generate", "simulate", "compare", "ckpt", "completion")  # whose starts are those of others


@pytest.mark.parametrize(
    "verb", [pytest.param(verb, marks=pytest.mark.long if verb in RARE else ()) for verb in STARTED]
)
def test_a_verb_starts(tmp_path, verb):
    (tmp_path / "run.yaml").write_text("output: out\n")
    words, code, said = STARTED[verb]
    script = Path(sys.executable).with_name("zero3d")
    done = subprocess.run([script, verb, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
