"""benchmarks/offload.py: its parts measure what they say, and its figures are those of the same run."""

import json
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import offload
from offloading import disk
from offloading.turns import in_turns


def test_parts_are_chosen_by_name_and_all_that_was_measured_is_in_the_file(tmp_path, capsys):
    out = tmp_path / "out.json"
    words = ["--parts", "disk,copies", "--gigabytes", "0.002", "--rounds", "2", "--directory", str(tmp_path)]
    assert offload.main([*words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert list(found["parts"]) == ["disk", "copies"]
    assert found["arguments"]["gigabytes"] == 0.002
    for part in found["parts"].values():
        assert all(len(times) == 2 and min(times) > 0 for times in part["seconds"].values())
        assert set(part["rows"]) == set(part["seconds"])
        assert all(target["met"] == (target["reached"] >= target["target"]) for target in part["targets"])
    printed = capsys.readouterr().out
    assert "pipeline, of the disk's limit for the same bytes" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_the_pipeline_updates_every_record_once(tmp_path):
    bed = disk.Bed(tmp_path, 10**6)
    bed._writing.copy_(torch.ones(bed._writing.numel() // 4).view(torch.uint8))
    bed.write()
    for _ in range(2):
        bed.pipeline()
    bed.read()  # ends with the last record
    _, m, v = bed.records[-1].views(bed._reading)
    once = torch.ones(1) * 0.9 * 0.9
    assert m.unique().tolist() == v.unique().tolist() == once.tolist()
    assert bed.slab.steps[0] == 3
    bed.close()


def test_the_limit_is_the_faster_way_to_read_and_write_so_much():
    took = {"read": 3.0, "write": 2.0, "both": 4.0, "pipeline": 5.0, "dd read": 6.0, "dd write": 1.0}
    assert [target["reached"] for target in disk.targets(took)] == [0.8, 1.4, 2.0, 0.5]
    assert next(disk.targets(took | {"both": 9.0}))["reached"] == 1.0


def test_ways_take_turns_and_the_first_round_is_not_counted():
    calls = []
    seconds = in_turns({name: lambda name=name: calls.append(name) for name in "abc"}, 2)
    assert "".join(calls) == "abcbcacab"
    assert {name: len(times) for name, times in seconds.items()} == {"a": 2, "b": 2, "c": 2}


@pytest.mark.parametrize(
    "words",
    [
        ["--parts", "disk,disc"],
        ["--rounds", "0"],
        ["--gigabytes", "0"],
        ["--gigabytes", "nan"],
        ["--directory", "/none"],
    ],
)
def test_bad_input_is_refused(words):
    with pytest.raises(SystemExit) as caught:
        offload.main(words)
    assert caught.value.code == 2


def test_what_does_not_fit_is_one_line(tmp_path, capsys):
    assert offload.main(["--parts", "disk", "--gigabytes", "1e6", "--directory", str(tmp_path)]) == 1
    assert "rank-00000.states takes 2000.00 TB" in capsys.readouterr().err
