"""benchmarks/cluster_check.py and the page that its files make: decisions, bad input; all of it on two gloo ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import cluster_check  # noqa: E402
import figures_ran  # noqa: E402
from campaign.account import Account, Place  # noqa: E402
from campaign.record import Record  # noqa: E402
from node import holes, largest, links  # noqa: E402

GOOD, BAD = "", "wrong"


@pytest.mark.parametrize(("with_peers", "without", "decision"), [
    (GOOD, GOOD, ""), (GOOD, BAD, ""), (BAD, GOOD, "1"), (BAD, BAD, None),
])  # fmt: skip
def test_peer_access_is_left_alone_unless_sums_fail_with_it_and_not_without(with_peers, without, decision):
    assert links.decide(with_peers, without) == decision


@pytest.mark.parametrize(("part", "found", "given", "left"), [
    ("links", "1", None, "1"), ("links", "", None, None), ("links", None, None, None), ("links", "1", "0", "0"),
    ("axes", "1", None, None),
])  # fmt: skip
def test_later_parts_have_what_the_first_one_found_unless_it_is_set(monkeypatch, part, found, given, left):
    monkeypatch.delenv(links.P2P, raising=False)
    if given is not None:
        monkeypatch.setenv(links.P2P, given)
    cluster_check.decide(part, {"ran": {links.P2P: found}})
    assert os.environ.get(links.P2P) == left


@pytest.mark.parametrize(("words", "told"), [
    (["--minutes", "0"], "is no time"), (["--ranks", "1"], "pass 2, 4, 6 or 8"), (["--ranks", "3"], "pass 2, 4, 6 or 8"),
    (["--only", "axis"], "is no part"), (["--resume"], "pass --json FILE"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(capsys, words, told):
    with pytest.raises(SystemExit) as ended:
        cluster_check.main(words)
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(("cards", "words", "told"), [
    (0, [], "torch sees 0"), (1, [], "gpu_check.py"), (4, ["--ranks", "8"], "Pass 2 to 4"),
])  # fmt: skip
def test_too_few_cards_are_told_before_anything_is_written(tmp_path, monkeypatch, capsys, cards, words, told):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: cards)
    assert cluster_check.main([*words, "--json", str(tmp_path / "node.json")]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_hour_is_planned_within_fifty_minutes():
    planned = sum(part.planned_s + cluster_check.TIMED_S * part.timed for part in cluster_check.PARTS)
    assert planned < 45 * 60
    assert all(part.planned_s < part.limit_s for part in cluster_check.PARTS)


def test_the_largest_preset_is_the_largest_whose_plan_fits_with_the_margin(monkeypatch):
    asked = []

    class Priced:
        def __init__(self, size):
            self.memory = type("Memory", (), {"device": size})

    sizes = {"llama-3-8b": 70e9, "qwen3-4b": 40e9, "qwen3-1.7b": 20e9, "qwen3-0.6b": 8e9}

    def estimate(machine, plan, name, length):
        asked.append((name, plan.dp, plan.zero.stage, length))
        return Priced(sizes[name])

    monkeypatch.setattr(largest, "estimate", estimate)
    for memory, name in ((80e9, "llama-3-8b"), (70e9, "qwen3-4b"), (24e9, "qwen3-1.7b"), (1e9, "qwen3-0.6b")):
        machine = type("Cluster", (), {"gpus": 8, "gpu": type("Gpu", (), {"memory": memory})})
        assert largest.chosen(machine, 4096) == name
    assert set(asked) == {(name, 8, 3, 4096) for name in sizes}


def cell(parts, part="axes", case="tp 2"):
    made = {"date": "2026-12-01", "commit": "0123456789"}
    file = {
        "device": "cuda",
        "ranks": 8,
        "card": "NVIDIA H100",
        "parts": {name: {"made": made} | row for name, row in parts.items()},
    }
    return figures_ran.on_node([file], part, case)


def test_a_cell_is_of_the_cases_that_ran_and_empty_without():
    stamp = ": 8 x H100, 2026-12-01, `0123456789`"
    ran = {"tp 2, stage 1": {}, "tp 2, stage 3": {}, "pp 2, stage 1": {}}
    assert cell({"axes": {"outcome": "passed", "ran": ran, "failed": {}}}) == "passed" + stamp
    wrong = {"axes": {"outcome": "failed", "ran": ran, "failed": {"tp 2, stage 3": "1e-2 off"}}}
    assert [cell(wrong), cell(wrong, case="pp 2")] == ["failed" + stamp, "passed" + stamp]
    assert cell({"axes": {"outcome": "hung", "ran": ran, "failed": {}}}) == "failed" + stamp
    assert cell({"axes": {"outcome": "not run", "ran": ran, "failed": {}}}) == ""
    assert cell({"axes": {"outcome": "passed", "ran": {"stage 0": {}}, "failed": {}}}) == ""
    assert cell({}) == ""


def test_a_file_of_cpus_fills_no_cell(tmp_path, monkeypatch):
    monkeypatch.setattr(figures_ran, "RESULTS", tmp_path)
    file = {"device": "cpu", "ranks": 2, "parts": {"kills": {"outcome": "passed", "ran": {"a": 1}, "failed": {}}}}
    (tmp_path / "node.json").write_text(json.dumps(file))
    assert figures_ran.on_nodes() == []


def test_every_cell_of_a_node_is_of_a_part_that_there_is():
    parts = {part.name for part in cluster_check.PARTS}
    assert {feature.node[0] for feature in figures_ran.FEATURES} - {""} <= parts


def test_a_launch_that_hangs_says_in_which_step(tmp_path, monkeypatch):
    def hang(start, function, ways, matrix, at):
        Path(at).write_text("one communicator, step 7: block 3 has a hole on rank 1")
        raise TimeoutError("trained on 2 ranks took over 5 s")

    monkeypatch.setattr(holes, "run_ranks", hang)
    holes.holes(Place("holes", "cpu", 5.0, ranks=2), Account(tmp_path / "account.json"))
    found = json.loads((tmp_path / "account.json").read_text())
    [wrong] = found["failed"].values()
    assert "block 3 has a hole on rank 1" in wrong


@pytest.mark.long
def test_all_parts_hold_on_two_gloo_ranks_and_a_second_call_runs_nothing(tmp_path):
    out = tmp_path / "node.json"
    script = [sys.executable, str(ROOT / "benchmarks" / "cluster_check.py"), "--device", "cpu", "--json", str(out)]
    done = subprocess.run([*script, "--minutes", "12"], capture_output=True, text=True, check=False)
    found = json.loads(out.read_text())
    assert {name: part["outcome"] for name, part in found["parts"].items()} == dict.fromkeys(
        (part.name for part in cluster_check.PARTS), "passed"
    ), done.stdout
    assert done.returncode == 0
    assert all(set(part["made"]) == {"date", "commit"} for part in found["parts"].values())
    assert found["parts"]["holes"]["ran"]["two communicators"]["holes"] == 2 * holes.BLOCKS
    assert found["parts"]["axes"]["ran"]["all stages have the same bits"] is True
    assert {file.name for file in (tmp_path / "node-traces").iterdir()} == {
        f"demo-{way}.json.gz" for way in largest.WAYS
    }
    again = subprocess.run([*script, "--minutes", "1", "--resume"], capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert json.loads(out.read_text()) == found
    record = Record(out, {key: found[key] for key in ("torch", "cuda", "device", "cpus", "ranks")}, resume=True)
    assert record.holds(part.name for part in cluster_check.PARTS)
