"""Runs on several sources: the same samples whatever the ranks, and the held-out loss of each source."""

import math

import pytest
from training import field, metrics, run_in, save_model, save_rows, train, tree

from zero3d.config import load, to_yaml


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    for seed, name in enumerate(("web", "code")):
        save_rows(tmp_path / f"{name}.npy", seed=seed)
    return tmp_path


def weighted(folder, output, **sections):
    made = tree(folder, output, checkpoint={"every": 2, "export": False, "keep": 9}, evaluate={"every": 2}, **sections)
    sources = [{"path": str(folder / f"{name}.npy"), "weight": weight} for name, weight in (("web", 3), ("code", 1))]
    made["data"] |= {"train": sources, "validation": 0.25, "shuffle": True, **sections.get("data", {})}
    return made


@pytest.mark.long
def test_weighted_sources_are_the_same_at_another_dp_and_evaluated_one_by_one(ranks, folder):
    (alone,) = ranks(1, train, weighted(folder, "one"))
    assert field(alone, "epoch") == [4 * step / 20 for step in range(1, 6)]  # 14 rows each, 4 of which are held out
    after_2 = folder / "one" / "checkpoints" / "step-2"
    made = weighted(folder, "two")
    again = ranks(2, train, made, str(after_2))[0]
    assert field(again, "loss") == pytest.approx(field(alone, "loss")[2:], rel=1e-5)
    last = metrics(made)[-1]
    of_sources = [last["validation_loss/web"], last["validation_loss/code"]]
    assert of_sources[0] != of_sources[1]
    assert last["validation_loss"] == pytest.approx(sum(of_sources) / 2)  # they have as many targets
    assert last["perplexity"] == pytest.approx(math.exp(last["validation_loss"]))


@pytest.mark.long
def test_the_report_has_the_loss_of_each_source_and_a_function_of_ones_own_is_trained_on(ranks, folder):
    made = weighted(folder, "one", data={"packing": False, "group_by_length": True})
    made["data"]["train"] += [{"path": "own_data:measured", "weight": 2}]
    (folder / "run.yaml").write_text(to_yaml(load(made)))
    (report,) = ranks(1, run_in, folder, ["run.yaml"])
    assert set(report["held_out_losses"]) == {"web", "code", "measured"}
    assert all(map(math.isfinite, report["losses"]))
