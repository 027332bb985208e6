"""`zero3d plan train.yaml`: a run's own file is planned, and written with the plan; what it says of all else stays."""

import json
from functools import lru_cache

import pytest
import yaml

from zero3d.config import load
from zero3d.tools.cli import plan as plan_verb
from zero3d.tools.cli.main import main
from zero3d.tools.cli.planned_file import RunFile
from zero3d.tools.plan.footprint import tiles_loss
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim import model_spec

FILE = {
    "output": "runs/mine",
    "model": {"path": "demo"},
    "data": {"train": "mine.txt", "length": 128, "tokenizer": "bytes"},
    "train": {"steps": 10, "batch": 8, "micro_batch": 8},
    "optimizer": {"lr": 1e-3},
    "mesh": {"dp": 1, "pp": 2},
    "zero": {"stage": 3, "gather_wire": "int8"},
}
WORDS = ["--gpus", "2", "--gpu", "a6000"]
KNOWN = lru_cache(model_spec.open_spec)


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(model_spec, "open_spec", KNOWN)
    (tmp_path / "train.yaml").write_text(yaml.safe_dump(FILE))
    return tmp_path / "train.yaml"


def test_a_file_is_planned_with_its_batch_and_written_with_the_plan(file, capsys):
    assert main(["plan", "train.yaml", *WORDS, "--json", "--emit", "planned.yaml"]) == 0
    told = json.loads(capsys.readouterr().out)
    best = told["recommended"]["plan"]
    assert told["sequences"] == 8
    assert told["model"]["length"] == 128
    tree, config = yaml.safe_load((file.parent / "planned.yaml").read_text()), load(file.parent / "planned.yaml")
    assert tree["output"] == "runs/mine"
    assert tree["data"] == FILE["data"]
    assert tree["optimizer"] == FILE["optimizer"]
    assert config.train.steps == 10
    assert (config.train.batch, config.train.micro_batch) == (8, best["micro_batch"])
    assert (config.mesh.pp or 1, config.zero.stage, config.zero.gather_wire) == (best["pp"], best["stage"], "same")


def test_what_the_command_says_is_taken_and_how_long_the_file_trains_is_told(file, capsys):
    assert main(["plan", "train.yaml", *WORDS, "--seq", "64", "--tokens-per-batch", "1024"]) == 0
    out = capsys.readouterr().out
    assert "16 sequences = 1,024 tokens a step" in out
    assert "5.12K tokens: " in out  # 10 steps of 8 sequences of 64


@pytest.mark.parametrize(
    ("train", "packing", "word", "compiled"),
    [
        ({}, True, "--compile", True),
        ({"compile": True}, True, "--no-compile", False),
        ({"compile": True}, False, "", True),
        ({"compile": False}, True, "", False),
        ({}, True, "", None),
        ({}, False, "", False),
    ],
)
def test_blocks_are_compiled_as_is_said_or_where_packed_batches_have_one_shape(
    file, monkeypatch, train, packing, word, compiled
):
    tree = {**FILE, "data": {**FILE["data"], "packing": packing}, "train": {**FILE["train"], **train}}
    file.write_text(yaml.safe_dump(tree))
    asked = []

    def searched(model, cluster, target, *rest):
        asked.append(target.compile)
        chosen = target._replace(compile=bool(target.compile))
        return plan_verb.search(model, cluster, chosen, *rest[:2])

    monkeypatch.setattr(plan_verb, "_searched", searched)
    assert main(["plan", "train.yaml", *WORDS, "--emit", "planned.yaml", *([word] if word else [])]) == 0
    assert asked == [compiled]
    assert load(file.parent / "planned.yaml").train.compile is bool(compiled)


def test_a_file_in_another_precision_is_refused(file, capsys):
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "precision": "fp32"}))
    assert main(["plan", "train.yaml", *WORDS]) == 2
    assert "plans are searched in bf16, and the file's precision is fp32" in capsys.readouterr().err


def test_an_emitted_file_has_the_output_that_a_launcher_asks_for(file, capsys):
    assert main(["plan", "demo", *WORDS, "--seq", "128", "--tokens-per-batch", "1024", "--emit", "emitted.yaml"]) == 0
    assert load("emitted.yaml").output == "runs/demo"
    capsys.readouterr()
    assert main(["launch", "torchrun", "emitted.yaml"]) == 0
    assert "--nproc-per-node=2" in capsys.readouterr().out


def test_a_loss_that_the_file_keeps_whole_stays_so(file, capsys):
    file.write_text(yaml.safe_dump({**FILE, "train": {**FILE["train"], "tiled_loss": False}}))
    assert main(["plan", "train.yaml", *WORDS, "--emit", "planned.yaml"]) == 0
    assert load("planned.yaml").train.tiled_loss is False
    kept = RunFile.of("train.yaml").model(None, None)
    assert not tiles_loss(kept, ParallelPlan(micro_batch=10**6, tiled_loss="auto"))
