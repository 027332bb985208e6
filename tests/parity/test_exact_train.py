"""`zero3d train` with zero.exact=true: one curve at any dp, dropout and held-out loss included, across resumes."""

import json
from pathlib import Path

import pytest
from training import field, save_model, save_rows, train, tree

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "epoch", "applied", "validation_loss")


@pytest.fixture
def folder(tmp_path):
    """GPT-2 with dropout, and rows."""
    save_model(tmp_path / "model", "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    save_rows(tmp_path / "rows.npy")
    save_rows(tmp_path / "held.npy", rows=7, seed=1)
    return tmp_path


def exact(folder, output, stage=3, **zero):
    made = tree(
        folder, output, zero={"stage": stage, "exact": True} | zero, evaluate={"every": 2}, data={"shuffle": True}
    )
    made["data"]["validation"] = [str(Path(folder) / "held.npy")]
    made["train"] = {"steps": 6, "batch": 8, "micro_batch": 1}
    return made


def told(records):
    return [{name: record[name] for name in SAME if name in record} for record in records]


@pytest.mark.parametrize(("stage", "reduce"), [(3, "auto"), (1, "every_step")])
def test_a_run_is_the_same_at_dp_1_2_and_4(ranks, folder, stage, reduce):
    one, two, four = (told(ranks(dp, train, exact(folder, str(dp), stage, reduce=reduce))[0]) for dp in (1, 2, 4))
    assert two == one
    assert four == one
    assert len(set(field(one, "loss"))) == 6


def test_a_run_goes_on_at_other_dp_and_stages_as_if_it_had_not_been_interrupted(ranks, folder):
    whole = told(ranks(2, train, exact(folder, "whole"))[0])
    for (dp, stage), stop in zip(((4, 3), (1, 0), (2, 2)), (3, 5, None), strict=True):
        records = ranks(dp, train, exact(folder, "parted", stage), "auto", stop)[0]
    assert told(records) == whole
    (newest,) = (folder / "parted" / "checkpoints").glob("step-6")
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["exact"]["covers"] == {"dp": [1, 2, 4, 8], "tp": 1, "pp": 1, "rows": 1}
