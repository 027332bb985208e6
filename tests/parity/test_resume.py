"""A run that was interrupted goes on as if it had not been: same order, same numbers, each step told once."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from training import ROWS, field, metrics, save_model, save_rows, train, tree

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "epoch", "applied")
STOPPED = 3  # 12 of 14 rows are taken then: the middle of an epoch


def told(records):
    return [{name: record[name] for name in SAME} for record in records]


def steps_in(made):
    return sorted(entry.name for entry in (Path(made["output"]) / "checkpoints").glob("step-*"))


@pytest.fixture
def folder(tmp_path):
    """GPT-2 with dropout, and rows."""
    off = {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
    save_model(tmp_path / "model", "gpt2", **off)
    save_model(tmp_path / "plain", "llama")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_after_sigterm_every_number_is_that_of_the_uninterrupted_run(ranks, folder, stage):
    options = {"zero": {"stage": stage}, "data": {"shuffle": True}}
    whole = tree(folder, "whole", **options)
    parted = tree(folder, "parted", **options)
    assert STOPPED * 4 < ROWS < 5 * 4
    expected = ranks(2, train, whole)[0]
    said = ranks(2, train, parted, None, STOPPED)  # both ranks get the signal, as a job's processes do
    assert said == [f"step 3 of 5 is saved in {parted['output']}/checkpoints/step-3"] * 2
    assert steps_in(parted) == ["step-3"]
    records = ranks(2, train, parted, "auto")[0]
    assert told(records) == told(expected)
    assert told(metrics(parted)) == told(expected)
    assert len({record["loss"] for record in expected}) == 5


def test_a_signal_at_one_rank_stops_all(ranks, folder):
    made = tree(folder, saved="plain")
    said = ranks(2, only_rank_1, made)
    assert said[0] == said[1] == f"step 2 of 5 is saved in {made['output']}/checkpoints/step-2"


def only_rank_1(made):
    import torch.distributed as dist

    return train(made, stop_in=2 if dist.get_rank() == 1 else None)


@pytest.mark.long
@pytest.mark.parametrize(
    ("shapes", "data"),
    [
        (((2, 3), (1, 0)), {"shuffle": True}),
        pytest.param(((2, 3), (1, 0), (4, 2)), {"shuffle": True}, marks=pytest.mark.long),
        pytest.param(((1, 1), (4, 3), (2, 0)), {"shuffle": True}, marks=pytest.mark.long),
    ],
)
def test_another_number_of_ranks_and_another_stage_see_the_same_samples(ranks, folder, shapes, data):
    portions = {"train": {"steps": 5, "batch": 4}, "saved": "plain"}
    expected = ranks(1, train, tree(folder, "whole", data=data, **portions))[0]
    for (dp, stage), stop in zip(shapes, (2, 4, None)[-len(shapes) :], strict=True):
        made = tree(folder, "parted", zero={"stage": stage}, data=data, **portions)
        made["train"]["accumulate"] = None
        records = ranks(dp, train, made, "auto", stop)[0]
    assert field(records, "loss") == pytest.approx(field(expected, "loss"), rel=1e-6, abs=0)
    assert field(records, "grad_norm") == pytest.approx(field(expected, "grad_norm"), rel=1e-5, abs=0)
    for name in ("step", "lr", "epoch", "tokens"):
        assert field(metrics(made), name) == field(expected, name)


def test_auto_with_nothing_there_starts_afresh(ranks, folder):
    records = ranks(1, train, tree(folder, saved="plain", train={"steps": 2}), "auto")[0]
    assert field(records, "step") == [1, 2]


def test_auto_after_the_end_trains_nothing_and_tells_the_same(ranks, folder):
    made = tree(folder, saved="plain", train={"steps": 2}, data={"validation": 0.2})
    first = ranks(1, train, made)[0]
    assert told(ranks(1, train, made, "auto")[0]) == told(first)
    assert told(metrics(made)) == told(first)


# --- which checkpoints are left -----------------------------------------------------------------


@pytest.fixture
def evaluated(folder):
    """Evaluated and saved after every step; the learning rate makes the held-out loss turn up again."""
    save_rows(folder / "held_out.npy", rows=4, seed=1)
    sections = {
        "data": {"validation": [str(folder / "held_out.npy")]},
        "optimizer": {"lr": 0.1},
        "train": {"steps": 6, "batch": 4},
        "schedule": {"name": "constant"},
        "evaluate": {"every": 1},
        "checkpoint": {"every": 1, "keep": 2, "export": False},
    }
    return tree(folder, saved="plain", **sections)


def test_the_last_and_the_best_checkpoints_are_kept(ranks, evaluated):
    records = ranks(1, train, evaluated)[0]
    losses = field(records, "validation_loss")
    best = losses.index(min(losses)) + 1
    assert best < 5, "the best one is none of the last two"
    assert steps_in(evaluated) == [f"step-{best}", "step-5", "step-6"]
    link = Path(evaluated["output"]) / "checkpoints" / "best"
    assert os.readlink(link) == f"step-{best}"
    assert json.loads((link / "manifest.json").read_text())["step"] == best


@pytest.mark.long
def test_going_on_from_the_best_leaves_the_course_after_it(ranks, evaluated):
    first = ranks(1, train, evaluated)[0]
    losses = field(first, "validation_loss")
    best = losses.index(min(losses)) + 1
    evaluated["schedule"] = {"name": "linear"}
    said = ranks(1, train, evaluated, str(Path(evaluated["output"]) / "checkpoints" / "best"), best + 1)
    assert said == [f"step {best + 1} of 6 is saved in {evaluated['output']}/checkpoints/step-{best + 1}"]
    assert f"step-{best + 1}" in steps_in(evaluated)
    assert "step-6" not in steps_in(evaluated), "auto would take it"
    records = ranks(1, train, evaluated, "auto")[0]
    assert field(metrics(evaluated), "step") == [1, 2, 3, 4, 5, 6]
    assert told(records)[:best] == told(first)[:best]
    assert told(records)[best:] != told(first)[best:]


# --- through the command line -------------------------------------------------------------------


@pytest.mark.long  # the same without the command: test_after_sigterm_every_number_is_that_of_the_uninterrupted_run
def test_sigterm_at_the_command_then_resume_auto(ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    made = tree(tmp_path, train={"steps": 40})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    command = [sys.executable, "-m", "zero3d.tools.cli.main", "train", "run.yaml", "--ranks", "2"]
    process = subprocess.Popen(
        [*command, "log.every=1"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    line = ""
    while not line.startswith("step  4/40"):
        assert select.select([process.stdout], [], [], 300)[0], "nothing was said for five minutes"
        line = process.stdout.readline()
        assert line, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode == 143
    assert "stopped by SIGTERM; resume with: zero3d train run.yaml log.every=1 --ranks=2 --resume auto" in said
    saved = steps_in(made)
    stopped = len(metrics(made))
    assert saved == [f"step-{stopped}"]
    assert stopped < 40
    again = ranks(2, train, made, "auto")[0]
    assert field(again, "step") == list(range(1, 41))
    alone = tree(tmp_path, "alone", train={"steps": 40})
    ranks(2, train, alone)
    assert told(metrics(made)) == told(metrics(alone))
