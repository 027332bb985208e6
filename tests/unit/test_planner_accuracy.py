"""The accuracy benchmark reads any folder, and its errors on the project's own copy of the tables stay small."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from planner_accuracy import Tables, as_text, beside, ranking, score
from planner_tables import Point

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
def test_the_command_prints_them(found):
    assert {(entry["set"], entry["kind"]): entry for entry in scores(DATA)["scores"]} == found


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
    equal = [Point("set", f"run {i}", "time", 1.0 + i, 2.0, "model") for i in range(3)]
    assert ranking(equal) == {"groups": 1, "tau": None, "regret": 0.0, "worst_regret": 0.0}
    assert "Kendall tau -, regret 0.0 %" in as_text(beside(score(equal), []), {}, [])
    points = Tables(DATA).points
    rows = {(point.set, point.kind): [point] for point in points}
    assert all(as_text(beside(score(row), []), {}, []) for row in rows.values())
    assert ranking([point for point in points if point.group])["tau"] > 0


def test_unknown_files_are_listed_and_unusable_rows_counted(tmp_path):
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    shutil.copy(DATA / "korthikanti2022_fig1_memory.csv", tmp_path)
    table = (DATA / "megatron_core_h100.csv").read_text().splitlines()
    (tmp_path / "megatron_core_h100.csv").write_text("\n".join([table[0], table[1], table[6]]))
    report = scores(tmp_path)
    assert report["unknown"] == ["notes.csv"]
    assert report["skipped"] == {"megatron_core_h100": 1}
    assert [entry["rows"] for entry in report["scores"]] == [12, 1]


def test_the_committed_errors_are_those_of_this_code(found):
    [run] = json.loads((ROOT / "benchmarks" / "results" / "planner-accuracy.json").read_text())["runs"]
    committed = {(entry["set"], entry["kind"]): entry for entry in run["result"]["scores"]}
    whole = [key for key, entry in found.items() if entry["rows"] == committed[key]["rows"]]
    assert len(whole) >= 6
    for key in whole:
        for name in ("mean", "p90", "worst"):
            assert found[key][name] == pytest.approx(committed[key][name], rel=1e-6, abs=1e-9), (key, name)
