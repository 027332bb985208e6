"""`zero3d train` with zero.exact=true: one curve at any dp, dropout and held-out loss included, across resumes."""

import json
from functools import cache
from pathlib import Path

import pytest
from training import field, save_model, save_rows, train, tree

SAME = ("step", "loss", "grad_norm", "lr", "tokens", "epoch", "applied", "validation_loss")


STEPS = 4  # of 8 rows each, of 14


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """GPT-2 with dropout, and rows."""
    folder = tmp_path_factory.mktemp("exact")
    save_model(folder / "model", "gpt2", resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1)
    save_rows(folder / "rows.npy")
    save_rows(folder / "held.npy", rows=7, seed=1)
    return folder


@pytest.fixture(scope="module")
def records(ranks, folder):
    """(dp, stage, moment of reduction) -> what an uninterrupted run tells, each once."""

    @cache
    def look(dp, stage, reduce):
        return told(ranks(dp, train, exact(folder, f"{dp}-{stage}-{reduce}", stage, reduce=reduce))[0])

    return look


def exact(folder, output, stage=3, **zero):
    made = tree(
        folder, output, zero={"stage": stage, "exact": True} | zero, evaluate={"every": 2}, data={"shuffle": True}
    )
    made["data"]["validation"] = [str(Path(folder) / "held.npy")]
    made["train"] = {"steps": STEPS, "batch": 8, "micro_batch": 1}
    return made


def told(records):
    return [{name: record[name] for name in SAME if name in record} for record in records]


@pytest.mark.parametrize(("stage", "reduce", "dps"), [
    (3, "auto", (1, 2)),
    *(pytest.param(*case, (1, 2, 4), marks=pytest.mark.long) for case in ((3, "auto"), (1, "every_step"))),
], ids=str)  # fmt: skip
def test_a_run_is_the_same_at_dp_1_2_and_4(records, stage, reduce, dps):
    one, *others = (records(dp, stage, reduce) for dp in dps)
    assert others == [one] * (len(dps) - 1)
    assert len(set(field(one, "loss"))) == STEPS


@pytest.mark.long
def test_a_run_goes_on_at_other_dp_and_stages_as_if_it_had_not_been_interrupted(ranks, folder, records):
    for (dp, stage), stop in zip(((4, 3), (1, 0), (2, 2)), (1, 3, None), strict=True):
        parted = ranks(dp, train, exact(folder, "parted", stage), "auto", stop)[0]
    assert told(parted) == records(2, 3, "auto")
    (newest,) = (folder / "parted" / "checkpoints").glob(f"step-{STEPS}")
    manifest = json.loads((newest / "manifest.json").read_text())
    assert manifest["exact"]["covers"] == {"dp": [1, 2, 4, 8], "tp": 1, "pp": 1, "rows": 1}
