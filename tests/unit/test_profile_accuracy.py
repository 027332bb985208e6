"""benchmarks/profile_accuracy.py without its runs: the files that it writes, and its arithmetic."""

import json
import sys
from pathlib import Path

import pytest

from zero3d.config import load

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import profile_accuracy


def test_plans_are_held_against_the_median_round_by_the_profile_and_by_that_of_another_model_s_run(
    tmp_path, monkeypatch
):
    cases = [case for case in profile_accuracy.CASES if case.ranks == 2][:2]
    seconds = iter([1.0, 2.0, 1.2, 2.2, 1.1, 2.1])  # of the two cases, round after round
    asked = []

    def command(folder, *words):
        asked.append(words)
        if words[0] == "train":
            config = load(str(folder / "run.yaml"))
            assert (config.train.steps, config.plan.cluster) == (20, str(tmp_path / "profile-2.json"))
            output = folder / words[-1].partition("=")[2]
            output.mkdir()
            step = next(seconds)
            (output / "metrics.jsonl").write_text("".join(json.dumps({"seconds": step}) + "\n" for _ in range(20)))
        return json.dumps({"seconds": {"mid": 2.2 if words[4:5] == (str(tmp_path / "profile-2.json"),) else 1.1}})

    monkeypatch.setattr(profile_accuracy, "command", command)
    first, second = profile_accuracy.measure(tmp_path, cases, rounds=3)
    assert [words[0] for words in asked[:2]] == ["calibrate", "train"]
    assert (first["measured"], second["measured"]) == (1.1, 2.1)
    assert first["error"] == pytest.approx(1.0)
    assert second["error_by_run"] == pytest.approx(1.1 / 2.1 - 1)
    assert first["spread"] == pytest.approx(0.2)
    of_runs = [words[4] for words in asked if words[0] == "plan" and "out-0" in words[4]]
    assert of_runs == [str(tmp_path / case.folder / "out-0" / "profile.json") for case in reversed(cases)]


@pytest.mark.parametrize("case", profile_accuracy.CASES, ids=lambda case: case.folder)
def test_the_run_whose_profile_plans_a_case_is_of_another_model_on_as_many_ranks(case):
    other = profile_accuracy.another(case, profile_accuracy.CASES)
    assert (other.name != case.name, other.ranks) == (True, case.ranks)
