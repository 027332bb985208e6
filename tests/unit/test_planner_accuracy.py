"""The accuracy benchmark reads any folder, and its errors on the project's own copy of the tables stay small."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from planner_accuracy import PUBLISHED, Tables, as_text, beside, labels, labels_text, means, ranking, score
from planner_ranges import apart_of, margins_of, narrowed, spread_of
from planner_tables import Point, with_settings
from planner_tables_recent import MIXTURES, mixture, model_of

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data" / "planner"


def scores(folder):
    script = ROOT / "benchmarks" / "planner_accuracy.py"
    done = subprocess.run(
        [sys.executable, script, "--tables", folder, "--json", "--fitted-only"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found():
    """What the command prints of the project's own copy, without what each constant accounts for."""
    return {(entry["set"], entry["kind"]): entry for entry in beside(score(Tables(DATA).points), [])}


@pytest.mark.long
def test_the_command_prints_them_and_those_of_recent_runs(found):
    printed = {(entry["set"], entry["kind"]): entry for entry in scores(DATA)["scores"]}
    assert {key: printed[key] for key in found} == found
    assert {name for name, _ in printed.keys() - found.keys()} == {"automodel_2026", "megatron-core_2026"}


def test_formulas_are_met(found):
    formulas = [entry for (_, kind), entry in found.items() if kind == "formula"]
    assert len(formulas) == 4
    assert all(entry["mean"] < 0.005 for entry in formulas)


@pytest.mark.parametrize("name", ["megatron2021_table1", "korthikanti_table5", "megatron_core_h100", "torchtitan"])
def test_iteration_times_meet_the_target(found, name):
    assert found[name, "time"]["mean"] <= 0.10
    assert found[name, "time"]["worst"] <= 0.25


def test_memory_meets_the_target(found):
    entry = found["torchtitan", "memory"]
    assert (entry["mean"] <= 0.12, entry["p90"] <= 0.20) == (True, True)


def test_a_group_of_equal_times_has_no_ranking_and_every_table_of_one_row_is_scored():
    equal = [Point("set", f"run {i}", "time", 1.0 + i, 2.0, "model", "s", (f"{i}",)) for i in range(3)]
    none = {"tau": None, "pairs": 0, "repeats": 0.0, "plain_tau": None, "all_pairs": 0}
    assert ranking(equal) == {"groups": 1, **none, "regret": 0.0, "worst_regret": 0.0}
    assert "Kendall tau - of 0 pairs, regret 0.0 %" in as_text(beside(score(equal), []), {}, [])
    points = Tables(DATA).points
    rows = {(point.set, point.kind): [point] for point in points}
    assert all(as_text(beside(score(row), []), {}, []) for row in rows.values())
    assert ranking([point for point in points if point.group])["tau"] > 0


def test_recent_runs_are_read_or_said_to_tell_too_little():
    tables = Tables(PUBLISHED)
    assert tables.counts() == {"read": 12, "skipped": 0, "unknown": 16}
    assert len(tables.points) == 12
    assert set(tables.untold.values()) >= {"the catalogue has no such card and no rate of MXFP8"}
    text = as_text(beside(score(tables.points), []), {}, [], tables.untold, tables.counts())
    assert "rows: 12 read, 0 skipped, 16 unknown" in text
    assert "PRL-30B-32K-offload: sequences of a step and recomputation are not told" in text


@pytest.mark.parametrize(("name", "weights"), [("Qwen3-30B-A3B", 30_532_122_624), ("DeepSeek-V3", 671_026_419_200)])
def test_a_mixture_has_the_weights_of_its_config_but_for_some_norms(name, weights):
    assert mixture(MIXTURES[name], 4096).params == pytest.approx(weights, rel=1e-6)


def test_adapters_leave_two_of_three_products_and_hold_the_weights_frozen():
    [row] = [row for row in Tables(PUBLISHED).rows["runs_2026"] if row["id"] == "AM-8B-LORA-1"]
    model = model_of(row)
    assert model.trainable == 32 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 14336))
    assert model.weights - model.trainable == 8_030_261_248


def test_every_source_counts_alike_in_the_means():
    points = [Point("a", "1", "time", 1.1, 1.0), Point("a", "2", "time", 1.1, 1.0), Point("b", "1", "time", 1.3, 1.0)]
    points.append(Point("noise (no gate)", "1", "time", 9.0, 1.0))
    told = means(beside(score(points), score(points[:2])))
    assert told["time"]["fitted"] == {
        "sources": 2,
        "mean": pytest.approx(0.2),
        "worst": pytest.approx(0.3),
        "worst_source": "b",
    }
    assert told["time"]["left_out"]["mean"] == pytest.approx(0.1)
    assert told["memory"] == {"left_out": None, "fitted": None}


def test_a_margin_is_what_nine_in_ten_memories_of_a_kind_of_run_do_not_exceed():
    """Of forty runs that took up to 39 % more than planned four may be above, of few none; what took less needs none."""
    points = [Point("s", str(i), "memory", 1.0, 1 + i / 100, run="lora") for i in range(40)]
    points += [Point("s", str(i), "memory", 1.0, 1 + i / 100, run="qlora") for i in range(20)]
    points += [Point("s", "small", "memory", 2.0, 1.0), Point("s", "t", "time", 1.0, 9.0)]
    assert margins_of(points) == {
        "full": {"rows": 1, "share": 0.0},
        "lora": {"rows": 40, "share": pytest.approx(0.35)},
        "qlora": {"rows": 20, "share": pytest.approx(0.19)},
    }
    assert margins_of([]) == {}


def test_plans_are_apart_where_19_in_20_pairs_are_ranked_right():
    """Planned 1, 1.02, 1.3 and 1.6 s ran in 10, 9, 13 and 16: the first two, 2 % apart, came in the other order."""
    runs = [("a", 1.0, 10.0), ("b", 1.02, 9.0), ("c", 1.3, 13.0), ("d", 1.6, 16.0)]
    points = [Point("s", name, "time", *run, "model", "s", (name,)) for name, *run in runs]
    assert apart_of(points) == pytest.approx(1.6 / 1.3 - 1)
    assert apart_of([points[0], points[1]]) is None


def test_a_smaller_run_corrects_plans_of_its_model_on_more_gpus():
    """Runs on 8 GPUs took twice what was planned, and so did those on 16; one on 32 took three times as much."""
    runs = [(8, 1.0, 2.0), (16, 1.0, 2.0), (32, 1.0, 3.0)]
    points = [Point("s", str(n), "time", planned, took, gpus=n, model="7B") for n, planned, took in runs]
    others = [Point("s (no gate)", "x", "time", 1.0, 9.0, gpus=64), Point("s", "y", "time", 1.0, 9.0, gpus=64)]
    found = narrowed([*points, *others])
    errors = [pytest.approx(0), pytest.approx(1 / 3)]
    means = {"before": pytest.approx((1 / 2 + 2 / 3) / 2), "after": pytest.approx((0 + 1 / 3) / 2)}
    assert found == [{"set": "s", "rows": 2, **means, "errors": errors}]
    assert spread_of(found) == pytest.approx(1 / 3)
    assert (narrowed(points[:1]), spread_of([])) == ([], None)


def test_each_group_of_runs_counts_alike_in_the_ranking():
    right = [Point("s", str(i), "time", float(i), float(i), "right", "s", (f"{i}",)) for i in range(1, 5)]
    wrong = [Point("s", str(i), "time", float(i), -float(i), "wrong", "s", (f"{i}",)) for i in range(1, 4)]
    wrong = [point._replace(actual=10 + point.actual) for point in wrong]
    assert ranking(right)["tau"] == 1
    assert ranking([*right, *wrong])["tau"] == 0


def test_pairs_count_that_differ_by_more_than_runs_of_one_configuration():
    """The same one took 100 and 104 s: that another took 103 says nothing, that a third took 110 does."""
    runs = [("same", 1.0, 100.0), ("same", 1.0, 104.0), ("another", 0.9, 103.0), ("a third", 2.0, 110.0)]
    points = [Point("s", str(i), "time", *run, "model", "s", (name,)) for i, (name, *run) in enumerate(runs)]
    found = ranking(points)
    assert (found["repeats"], found["pairs"], found["all_pairs"]) == (pytest.approx(0.04), 3, 5)
    assert (found["tau"], found["plain_tau"]) == (1, pytest.approx((3 + 1 - 1) / 5))
    told = "Kendall tau 1.00 of 3 pairs beyond repeats' 4.0 % (0.60 of all 5)"
    assert told in as_text(beside(score(points), []), {}, [])


def test_settings_that_the_planner_cannot_tell_apart_are_no_repeats_and_their_pair_counts():
    runs = [("op", 1.0, 100.0), ("layer", 1.0, 107.0), ("full", 2.0, 120.0)]
    found = ranking([Point("s", name, "time", *run, "model", "s", (name,)) for name, *run in runs])
    assert (found["repeats"], found["pairs"], found["tau"]) == (0, 3, pytest.approx(2 / 3))


def test_rows_repeat_each_other_that_differ_in_what_was_measured_and_where_it_stands_alone():
    point = Point("s", "a full", "time", 1.0, 2.0, "model")
    row = {"id": "a", "tp": "8", "ac": "selective-op", "tps_per_gpu": "5", "source": "table 1"}

    def settings(**cells):
        return with_settings({**row, **cells}, point).settings

    assert settings() == ("full", "8", "selective-op") == settings(tps_per_gpu="6", source="table 2")
    assert len({settings(), settings(ac="selective-layer"), settings(tp="4")}) == 3
    assert with_settings(row, point._replace(id="a none")).settings != settings()
    titan = [point for point in Tables(DATA).points if (point.set, point.kind) == ("torchtitan", "time")]
    assert len({point.settings for point in titan}) == len(titan)


def test_a_plan_within_the_margin_is_marked_and_neither_a_miss_nor_a_false_alarm():
    shares = {
        "ran": (0.95, 1.0),
        "ran, small": (0.5, 1.0),
        "ran, above the card": (1.01, 1.0),
        "ran out": (1.2, 0.0),
        "ran out, marked": (0.95, 0.0),
        "ran out, planned to fit": (0.8, 0.0),
    }
    found = labels([Point("s", name, "fits", *pair) for name, pair in shares.items()])
    assert (found["recall"], found["false_alarms"], found["marked"]) == tuple(map(pytest.approx, (2 / 3, 1 / 3, 1 / 3)))
    assert (found["missed"], found["alarmed"]) == (["ran out, planned to fit"], ["ran, above the card"])
    assert labels_text(found) == "OOM recall 67 % of 3, false alarms 33 %, marked 33 %"
    [offloaded] = [labels([Point("s", "ran", "fits", 0.89, 1.0, run=run)])["marked"] for run in ("offload",)]
    assert offloaded == 1  # whose margin is larger


@pytest.mark.long
def test_adapters_are_read_and_traced(tmp_path):
    """Rows of every stack: their memory by its kind, LitGPT's small models with adapters everywhere."""
    table = Path(__file__).parents[2] / "tests" / "data" / "planner" / "adapters" / "finetuning_runs.csv"
    found = {(point.id, point.kind): point for point in Tables(table.parent).points if point.gpus == 1}
    small, lora = found["LG-tinyllama-lora", "memory"], found["QW-qwen-7b-lora-512", "memory"]
    assert (small.set, small.run) == ("litgpt_lora (doubt)", "lora")
    assert small.predicted == pytest.approx(small.actual, rel=0.05)
    assert lora.predicted == pytest.approx(lora.actual, rel=0.08)
    assert found["QW-qwen-7b-lora-512", "time"].predicted == pytest.approx(1.5, rel=0.1)


@pytest.mark.long
def test_unknown_files_are_listed_and_unusable_rows_counted(tmp_path):
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    shutil.copy(DATA / "korthikanti2022_fig1_memory.csv", tmp_path)
    table = (DATA / "megatron_core_h100.csv").read_text().splitlines()
    (tmp_path / "megatron_core_h100.csv").write_text("\n".join([table[0], table[1], table[6]]))
    report = scores(tmp_path)
    assert report["unknown"] == ["notes.csv"]
    assert report["skipped"] == {"megatron_core_h100": 1}
    assert [entry["rows"] for entry in report["scores"] if "2026" not in entry["set"]] == [12, 1]
    assert report["rows"] == {"read": 4 + 1 + 12, "skipped": 1, "unknown": 16}


def test_the_committed_errors_are_those_of_this_code(found):
    [run] = json.loads((ROOT / "benchmarks" / "results" / "planner-accuracy.json").read_text())["runs"]
    committed = {(entry["set"], entry["kind"]): entry for entry in run["result"]["scores"]}
    whole = [key for key, entry in found.items() if entry["rows"] == committed[key]["rows"]]
    assert len(whole) >= 6
    for key in whole:
        for name in ("mean", "p90", "worst"):
            assert found[key][name] == pytest.approx(committed[key][name], rel=1e-6, abs=1e-9), (key, name)
