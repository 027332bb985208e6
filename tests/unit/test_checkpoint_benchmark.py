"""benchmarks/checkpoint.py: every way is measured in the same rounds, and targets are of its medians."""

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import checkpoint


def test_targets_are_of_the_medians():
    seconds = {
        "writing": {"raw": [1.0, 9.0, 1.0], "save": [1.25, 1.25, 0.1], "dcp": [2.0, 2.0, 2.0]},
        "reading": {"raw": [0.9, 0.9, 0.9], "load": [1.0, 1.0, 1.0], "dcp": [2.0, 2.0, 2.0]},
        "stall": {"asynchronous": [0.25, 0.25, 0.25], "dcp": [1.0, 1.0, 1.0]},
    }
    found = checkpoint.targets(seconds)
    assert [(target["reached"], target["met"]) for target in found] == [(0.8, False), (0.9, True), (0.2, False)]


@pytest.mark.parametrize("words", [["--rounds", "0"], ["--megabytes", "0"], ["--directory", "/nowhere/at/all"]])
def test_bad_input_ends_with_code_2(words, capsys):
    with pytest.raises(SystemExit) as ended:
        checkpoint.main(words)
    assert ended.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.mark.long
def test_all_ways_are_measured_and_all_that_was_measured_is_in_the_file(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--ranks", "1", "--megabytes", "1", "--rounds", "2", "--directory", str(tmp_path), "--json", str(out)]
    assert checkpoint.main(words) == 0
    found = json.loads(out.read_text())
    ways = {"writing": checkpoint.WRITING, "reading": checkpoint.READING, "stall": checkpoint.ASIDE}
    assert {kind: tuple(by_way) for kind, by_way in found["seconds"].items()} == ways
    assert all(len(times) == 2 and min(times) > 0 for by_way in found["seconds"].values() for times in by_way.values())
    assert "save, of raw" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]
