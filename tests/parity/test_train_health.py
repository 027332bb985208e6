"""Training runs whose steps are not finite: how they end, what they leave, and what they never write."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from models import hf
from training import metrics, save_model, save_rows, train, tree

from zero3d.config import load
from zero3d.errors import NonFiniteError
from zero3d.train.folder import Folder
from zero3d.train.report import summary

BEYOND = 3e38  # a norm's weight: finite itself, and what it scales is not


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


def spoil(folder):
    """A model that is finite and computes what is not."""
    model = hf("llama", inner=96)
    with torch.no_grad():
        model.model.norm.weight.fill_(BEYOND)
    model.save_pretrained(folder / "model")


def steps_saved(made):
    return sorted(path.name for path in (Path(made["output"]) / "checkpoints").glob("step-*"))


def given_up(made, *start):
    with pytest.raises(NonFiniteError) as error:
        train(made, *start)
    assert error.value.exit_code == 1
    return str(error.value)


def test_a_run_whose_every_step_is_not_finite_fails_and_exports_nothing(folder):
    spoil(folder)
    made = tree(folder, checkpoint={"export": True})
    said = given_up(made)
    assert said.startswith("all 5 steps of the run had gradients that are NaN or infinite. First in the last one: unit")
    assert "on rank 0. No step was applied and nothing saved." in said
    assert [line["applied"] for line in metrics(made)] == [False] * 5
    assert steps_saved(made) == []
    assert not (folder / "out" / "hf").exists()


@pytest.mark.parametrize(("health", "run", "said"), [
    ({"max_skips": 3}, 4, "3 steps in a row had gradients that are NaN or infinite (health.max_skips=3), up to step 4."),
    ({"nonfinite": "stop"}, 2, "step 2 had gradients that are NaN or infinite (health.nonfinite=stop)."),
], ids=["skip", "stop"])  # fmt: skip
def test_a_run_that_diverges_ends_after_so_many_steps_and_leaves_a_state_to_go_on_from(folder, health, run, said):
    made = tree(folder, optimizer={"lr": 1e30}, schedule={"warmup": 0}, health=health)
    told = given_up(made)
    assert told.startswith(f"{said} First in the last one: unit ")
    assert "--resume auto" in told
    assert [line["applied"] for line in metrics(made)] == [True] + [False] * (run - 1)
    assert steps_saved(made) == ["step-1"]


def test_the_last_good_checkpoint_stays_as_it_is_and_the_run_goes_on_from_it(folder):
    good = tree(folder, train={"steps": 2, "batch": 4, "accumulate": 2})
    train(good)
    held = {path: path.read_bytes() for path in (folder / "out" / "checkpoints").rglob("*") if path.is_file()}
    bad = tree(folder, optimizer={"lr": 1e30}, schedule={"warmup": 0}, health={"max_skips": 2})
    told = given_up(bad, "auto")
    assert f"{folder}/out/checkpoints/step-2 is there." in told
    assert f"zero3d train {folder}/out/config.yaml --resume auto" in told
    assert {path: path.read_bytes() for path in held} == held
    went_on = train(good | {"train": {**good["train"], "steps": 4}}, "auto")
    assert [(line["step"], line["applied"]) for line in went_on] == [(step, True) for step in (1, 2, 3, 4)]


def test_fp16_finds_its_loss_scale_and_ends_only_where_there_is_none(folder):
    falls = {"precision": "fp16", "loss_scale": {"initial": 2.0**40, "hysteresis": 1}}
    made = tree(folder, health={"nonfinite": "stop"}, **falls)
    assert [record["applied"] for record in train(made)] == [False] * 5  # and no failure
    made = tree(folder, output="low", health={"max_skips": 9}, precision="fp16",
                loss_scale={"initial": 2.0**40, "minimum": 2.0**39, "hysteresis": 1})  # fmt: skip
    told = given_up(made)
    assert told.startswith("fp16 gradients overflow at the minimum loss scale")
    assert "First in the last one: unit" in told
    assert "on rank 0" in told
    assert "bf16" in told


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_held_out_loss_that_is_not_finite_is_never_the_best(folder, monkeypatch, value):
    from zero3d.engine import Engine

    made = tree(folder, data={"validation": 0.3}, train={"steps": 2}, evaluate={"every": 1})
    losses = iter([3.0, value, value])
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: torch.tensor(next(losses)))
    train(made)
    assert (folder / "out" / "checkpoints" / "best").readlink() == Path("step-1")


def test_weights_of_a_folder_that_are_not_finite_are_refused_by_name(folder, ranks):
    model = hf("llama", inner=96)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[-1, -1] = float("inf")
    model.save_pretrained(folder / "model")
    made = tree(folder)
    errors = [error for _, error in ranks(2, train, made, check=False)]
    assert ["model.layers.1.mlp.down_proj.weight in fp32" in str(error) for error in errors] == [True] * 2, errors
    assert not (folder / "out").exists()


def test_an_export_that_computes_no_number_is_not_the_same():
    result = SimpleNamespace(
        steps=[], history=[], seconds=1.0, peak_memory=1, held_out_loss=2.5, reloaded_loss=float("nan"), fingerprint="",
        config=load({"checkpoint": {"verify": True}}), folder=Folder(Path("out")), checkpoint=Path("out/step-1"),
    )  # fmt: skip
    assert any(
        "loaded with AutoModelForCausalLM.from_pretrained: nan, NOT the same" in line for line in summary(result)
    )


@pytest.mark.long
def test_the_command_ends_with_exit_code_1_and_tells_it_once(folder):
    spoil(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder, health={"max_skips": 2})))
    command = [sys.executable, "-m", "zero3d.cli.main", "train", "run.yaml", "--ranks=2"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, env=dict(os.environ))
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("NonFiniteError: 2 steps in a row had gradients that are NaN or infinite") == 1
    assert "Traceback" not in done.stderr
