"""benchmarks/faults.py: cases are judged one by one, and what must not be is a failure that can be seen again."""

import json
import os
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import faults
from faulting import cases, configs


def judged(folder, case, count=4):
    return cases.judge("configs", range(10, 10 + count), folder, lambda number: case(number) if number > 10 else "good")


def test_mutations_of_configurations_are_counted_and_written_down(tmp_path, capsys):
    out = tmp_path / "out.json"
    assert faults.main(["--parts", "configs", "--count", "40", "--seed", "5", "--json", str(out)]) == 0
    found = json.loads(out.read_text())["parts"]["configs"]
    assert sum(row["cases"] for row in found["rows"].values()) == 40
    assert found["failures"] == []
    assert "failures in 40 cases: 0.000 (target 0: met)" in capsys.readouterr().out


def test_an_error_that_is_not_ours_is_a_failure_with_the_command_that_repeats_it(monkeypatch, capsys):
    def broken(file, number):
        if number == 7:
            raise AssertionError("mutation 7") from KeyError("k")
        return ""

    monkeypatch.setattr(configs, "mutated_load", broken)
    assert faults.main(["--parts", "configs", "--count", "9"]) == 1
    printed = capsys.readouterr().out
    assert "seed 7: AssertionError: mutation 7 (KeyError: 'k')" in printed
    assert "python benchmarks/faults.py --parts configs --seed 7 --count 1" in printed


def starts(number):
    os.system("true")


def writes(number):
    Path("/dev/shm/zero3d-outside").write_text("x")


def removes(number):
    folder = os.open("/dev/shm", os.O_RDONLY)
    try:
        os.remove("zero3d-nothing", dir_fd=folder)
    finally:
        os.close(folder)


def swallows(number):
    try:
        starts(number)
    except BaseException:
        return "good"


def waits(number):
    while True:
        pass


@pytest.mark.parametrize(("case", "why"), [
    (starts, "Executed: os.system"), (writes, "Executed: open ('/dev/shm/zero3d-outside'"), (swallows, "Executed: os.system"),
    (removes, "Executed: os.remove ('zero3d-nothing'"), (waits, "Hang: took more than 0.2 s"),
])  # fmt: skip
def test_what_a_case_must_not_do_is_seen_and_stopped(tmp_path, monkeypatch, case, why):
    monkeypatch.setattr(cases, "LIMIT", 0.2)
    found = judged(tmp_path, case)
    assert [failure["seed"] for failure in found["failures"]] == [11, 12, 13]
    assert all(failure["why"].startswith(why) for failure in found["failures"])
    assert found["rows"] == {"good": {"cases": 1}}
    assert not found["targets"][0]["met"]
    assert not Path("/dev/shm/zero3d-outside").exists()


@pytest.mark.parametrize("words", [["--parts", "x"], ["--count", "-1"], ["--seed", "-1"]])
def test_bad_input_exits_with_2(words):
    with pytest.raises(SystemExit) as caught:
        faults.main(words)
    assert caught.value.code == 2


@pytest.mark.long
def test_damaged_checkpoints_and_kills_of_a_command_are_campaigns_too(tmp_path):
    out, rows = tmp_path / "out.json", {}
    for part, count in (("checkpoints", 4), ("kills", 1)):  # seed 4 kills a rank as it saves
        words = ["--parts", part, "--count", str(count), "--seed", "4", "--json", str(out)]
        assert faults.main(words) == 0
        rows[part] = json.loads(out.read_text())["parts"][part]["rows"]
    assert sum(row["cases"] for row in rows["checkpoints"].values()) == 4
    assert sum(row["lives"] for row in rows["kills"].values()) == 2
