"""What `zero3d plan --emit` writes is accepted by `zero3d train` as it is, runs, and means the plan it came from."""

import json
import math
from pathlib import Path

import pytest
import yaml
from models import hf
from training import start

from zero3d.tools.cli.main import main
from zero3d.tools.plan.emit import train_config
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.model_spec import open_spec

LENGTH, TOKENS = 32, 256
CLUSTER = ["--gpus", "2", "--nodes", "1", "--gpu", "cpu"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama's folder, and some text."""
    folder = tmp_path_factory.mktemp("emitted")
    hf("llama", inner=96, vocab=320).save_pretrained(folder / "model")
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text("some words to learn, and a few more of them\n" * 60)
    return folder


def planned(capsys, *words):
    """Its JSON."""
    assert main(["plan", *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def two_steps(file, folder):
    """One rank of `zero3d train FILE`, the text and the folders its own; the losses."""
    from rich.console import Console

    from zero3d.config import load
    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    said = {"train.steps": 2, "data.train": f"{folder}/text", "data.cache": f"{folder}/cache"}
    said |= {"output": f"{file}-out", "checkpoint.export": "false"}
    result = run(load(file, [f"{key}={value}" for key, value in said.items()]), start(), Progress(Console(quiet=True)))
    return [record["loss"] for record in result.history]


def trains(ranks, file, folder):
    first, second = ranks(2, two_steps, file, folder)
    assert first == second
    assert len(first) == 2
    assert all(map(math.isfinite, first))


def test_the_best_plans_file_trains_unchanged_and_is_explained_as_it_was_planned(ranks, saved, capsys):
    file = saved / "train.yaml"
    words = [saved / "model", *CLUSTER, "--seq", LENGTH, "--tokens-per-batch", TOKENS, "--emit", file]
    best = planned(capsys, *words)["recommended"]
    before = file.read_bytes()
    trains(ranks, file, saved)
    assert file.read_bytes() == before
    explained = planned(capsys, "explain", file, *CLUSTER)
    assert {key: explained[key] for key in ("plan", "memory", "seconds", "traffic")} == {
        key: best[key] for key in ("plan", "memory", "seconds", "traffic")
    }


@pytest.mark.long
@pytest.mark.parametrize("degree", ["tp", "pp"])
def test_files_of_other_plans_in_the_table_train_too(ranks, saved, capsys, degree):
    words = [saved / "model", *CLUSTER, "--seq", LENGTH, "--tokens-per-batch", TOKENS]
    plan = next(row["plan"] for row in planned(capsys, *words)["plans"] if row["plan"][degree] == 2)
    path, file = str(saved / "model"), Path(saved / f"{degree}.yaml")
    tree = train_config(open_spec(path, LENGTH), ParallelPlan(**plan), path, "bytes")
    file.write_text(yaml.safe_dump(tree))
    trains(ranks, file, saved)
