"""The page of a run's course: its file and its code run as they are shown, and every key and event in it exists."""

import json
import re
from pathlib import Path

import pytest
from corpora import APPENDS, save_tokenizer
from training import run_in, save_model

from zero3d.config import load
from zero3d.config.keys import KEYS
from zero3d.train.callbacks import EVENTS
from zero3d.zero.step_parts import PARTS

PAGE = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
BLOCKS = dict(reversed(re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.M | re.S)))  # the first of each kind
SHORT = ["train.steps=6", "train.batch=4", "evaluate.every=2", "checkpoint.every=2", "data.length=32"]


@pytest.fixture
def folder(tmp_path):
    """What the page names: course.yaml, my_run.py, models/llama, text."""
    save_model(tmp_path / "models" / "llama", vocab=61, max_position_embeddings=512)
    save_tokenizer(tmp_path / "models" / "llama", APPENDS)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i:02}.txt").write_text("what is one and one two four I think " * (10 + i))
    for kind, name in (("yaml", "course.yaml"), ("python", "my_run.py")):
        (tmp_path / name).write_text(BLOCKS[kind])
    return tmp_path


@pytest.mark.long
def test_the_file_and_the_code_of_the_page_run_as_they_are_shown(ranks, folder):
    result = ranks(2, run_in, str(folder), ["course.yaml", *SHORT])[0]
    records = [json.loads(line) for line in (folder / "runs" / "course" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [record["step"] for record in records if "exact_match" in record]
    assert evaluated == [2, 4, 6]
    assert {"validation_loss", "ema_validation_loss", "perplexity"} <= records[-1].keys()
    assert result["values"].keys() == {"exact_match"}
    assert list((folder / "runs" / "course" / "tensorboard").glob("events.*"))
    notes = (folder / "notes.txt").read_text().splitlines()
    assert notes[0] == "begun after step 0 of 6"
    assert [line for line in notes if line.startswith("saved")] == ["saved step-2", "saved step-4", "saved step-6"]
    assert sum(line.endswith("right") for line in notes) == 3


def test_keys_events_schedules_and_trackers_of_the_page_are_those_that_there_are(tmp_path):
    (tmp_path / "course.yaml").write_text(BLOCKS["yaml"])
    load(tmp_path / "course.yaml")
    named = set(re.findall(r"`((?:schedule|evaluate|train|checkpoint|data|log|health|offload)\.\w+)", PAGE))
    assert named <= KEYS.keys()
    assert {"evaluate.function", "evaluate.patience", "train.ema"} <= named
    table = dict(re.findall(r"^\| `(on_\w+)\(([^)]*)\)`", PAGE, re.M))
    assert table == {event: ", ".join(arguments) for event, arguments in EVENTS.items()}
    assert tuple(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == (
        *KEYS["optimizer.name"].choices, *KEYS["schedule.name"].choices, *KEYS["log.to"].choices, *PARTS
    )  # fmt: skip
    assert PARTS.items() <= dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", PAGE, re.M)).items()
