"""benchmarks/cluster_check.py and the page that its files make: decisions, bad input; all of it on two gloo ranks."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from zero3d.distributed.degrees import Degrees
from zero3d.tools.doctor.allreduce import Outcome

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import cluster_check  # noqa: E402
import figures_ran  # noqa: E402
import watchdog  # noqa: E402
from campaign import process  # noqa: E402
from campaign.account import Account, Place  # noqa: E402
from campaign.record import Record  # noqa: E402
from node import axes, drills, groups, holes, largest, launches, links  # noqa: E402

GOOD, BAD = "", "wrong"


@pytest.mark.parametrize(("with_peers", "without", "decision"), [
    (GOOD, GOOD, ""), (GOOD, BAD, ""), (BAD, GOOD, "1"), (BAD, BAD, None),
])  # fmt: skip
def test_peer_access_is_left_alone_unless_sums_fail_with_it_and_not_without(with_peers, without, decision):
    assert links.decide(with_peers, without) == decision


def test_what_wakes_up_first_is_the_sum_without_peer_access(tmp_path, monkeypatch):
    summed = []

    def outcome(backend, ranks, seconds, disable):
        summed.append(disable)
        return Outcome(fault="hang", text="hangs") if disable else Outcome(1.0, 2.0)

    monkeypatch.setattr(links, "outcome_of", outcome)
    monkeypatch.setattr(links, "examined", lambda words: ({}, ""))
    links.links(Place("links", "cuda", 5.0, ranks=8), Account(tmp_path / "account.json"))
    found = json.loads((tmp_path / "account.json").read_text())
    assert summed == [True, False]
    assert (found["ran"][links.P2P], found["failed"]) == ("", {})


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
    (["--minutes", "0"], "is no time"), (["--ranks", "1"], "pass 2, 4 or 8"), (["--ranks", "6"], "pass 2, 4 or 8"),
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


def test_a_file_in_a_folder_that_is_not_there_is_bad_input(tmp_path, capsys):
    assert cluster_check.main(["--device", "cpu", "--json", str(tmp_path / "none" / "node.json")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(("found", "ranks"), [(2, 2), (3, 2), (4, 4), (6, 4), (7, 4), (8, 8), (16, 8)])
def test_ranks_are_the_most_whose_halves_are_whole(found, ranks):
    assert cluster_check.most(found) == ranks


@pytest.mark.parametrize("given", [None, "4,5,6,7"])
def test_a_part_of_several_ranks_sees_all_cards_and_one_of_a_card_the_first(monkeypatch, given):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    of_node, on_cpu = (cluster_check.place_of(cluster_check.PARTS[1], device, 4) for device in ("cuda", "cpu"))
    assert process.visible(of_node) == {}
    assert process.visible(on_cpu) == {"CUDA_VISIBLE_DEVICES": ""}
    assert process.visible(Place("parity", "cuda:0", 5.0)) == {"CUDA_VISIBLE_DEVICES": "0" if given is None else "4"}


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_every_case_has_whole_micro_batches_and_fits_the_ranks(ranks):
    for case in itertools.chain.from_iterable(axes.cases(ranks, axes.CUT_STAGES)):
        degrees = Degrees.resolve(ranks, **case.degrees)
        assert axes.ROWS % (degrees.rows * degrees.pp) == 0
    assert all(Degrees.resolve(ranks, **mesh) for mesh in groups.meshes(ranks))


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


def test_a_launch_that_fails_is_a_finding_and_the_next_one_runs(tmp_path, monkeypatch):
    begun = []

    def some_fail(start, function, asked):
        begun.append(asked)
        if len(begun) == 1:
            raise ProcessRaisedException("-- Process 1 --\nTraceback\nRuntimeError: NCCL", 1, 7)
        return [{"groups": {}, "bytes": 0.0} for _ in asked]

    monkeypatch.setattr(launches, "run_ranks", some_fail)
    groups.groups(Place("groups", "cuda", 90.0, ranks=2), Account(tmp_path / "account.json"))
    found = json.loads((tmp_path / "account.json").read_text())
    assert found["failed"] == {"dp 2: 2 for states": "RuntimeError: NCCL"}
    assert list(found["ran"]) == [f"{axis} 2: {each} for states" for axis in ("dp", "tp") for each in (2, 1)]


def test_launches_that_hang_leave_others_their_time():
    place = Place("axes", "cuda", 300.0, ranks=8)
    assert launches.start_of(place, 1).timeout_s == 300.0
    assert launches.start_of(place, 2).timeout_s == 135.0
    assert launches.start_of(place, 8).timeout_s == 90.0


def test_a_phase_that_is_not_told_leaves_the_others_their_turn(tmp_path, monkeypatch):
    def silent(folder, fault, patience):
        if fault == "stop:forward":
            raise RuntimeError("the watchdog has not said a word")
        return {"met": True}

    monkeypatch.setattr(drills, "one_fault", silent)
    drills.hangs(Place("hangs", "cuda", 5.0, ranks=2), Account(tmp_path / "account.json"))
    found = json.loads((tmp_path / "account.json").read_text())
    assert list(found["ran"]) == [f"stopped in {phase}" for phase in watchdog.PHASES]
    assert list(found["failed"]) == ["stopped in forward"]


READING, GATHERING = ("read after all_reduce", "-"), ("all_gather", "model.layers.1")


@pytest.mark.parametrize(("phase", "call", "whom", "absent"), [
    ("forward", READING, [1], []), ("backward", READING, [1], []), ("forward", GATHERING, [1], []),
    ("forward", ("all_reduce", "-"), [1], ["unit", "operation"]), ("forward", READING, [], ["rank"]),
    ("backward", ("reduce_scatter", "a"), [1], []), ("save", ("exchange", "-"), [1], []),
])  # fmt: skip
def test_a_rank_whose_kernels_wait_reads_where_one_of_a_host_gathers(phase, call, whom, absent):
    waiting = {"state": "waiting", "op": call[0], "unit": call[1], "stack": ["a"]}
    told = {"ranks": [waiting, {"state": "stopped", "stack": ["b"]}], "waits": [{"for": whom}]}
    assert [name for name, there in watchdog.named_in(told, phase).items() if not there] == absent


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
