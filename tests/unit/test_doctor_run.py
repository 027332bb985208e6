"""`zero3d doctor --run OUTPUT`: what it makes of the watchdog's files, whoever has written them."""

import copy
import json
import os
import random
from datetime import UTC, datetime

import pytest

from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main
from zero3d.tools.doctor.dead_run import FILE, judge_run, of_tree, read_runs
from zero3d.train.stragglers import KINDS, Slow
from zero3d.watchdog.block import Block
from zero3d.watchdog.monitor import Facts
from zero3d.watchdog.waits import RankState, find_culprits, find_waits

STALL = {
    "version": 1, "kind": "stall", "time": "2026-01-02T03:04:05+00:00", "host": "a", "step": 12, "timeout": 300.0,
    "cause": "rank 1 is in no collective: backward of unit 'blocks.3'",
    "ranks": [
        {"rank": 0, "host": "a", "pid": 41, "state": "waiting", "phase": "training", "axis": "dp", "op": "all_gather",
         "unit": "blocks.3", "number": 120, "step": 13, "seconds": 301.5, "work": "", "stack": []},
        {"rank": 1, "host": "a", "pid": 42, "state": "running", "phase": "training", "axis": "dp", "op": "all_gather",
         "unit": "-", "number": 119, "step": 13, "seconds": 301.7, "work": "backward",
         "stack": ["Current thread 0x00 (most recent call first):", '  File "/x/loop.py", line 7 in turn_for_ever',
                   '  File "/x/loop.py", line 9 in main', "", "Thread 0x01 (most recent call first):",
                   '  File "/x/other.py", line 1 in nothing']},
    ],
    "waits": [{"rank": 0, "for": [1], "axis": "dp", "op": "all_gather", "unit": "blocks.3"}],
    "advice": ["look at its stack", "`zero3d train ... --resume auto` goes on from the newest checkpoint"],
}  # fmt: skip


def written(folder, tree, name=FILE):
    (folder / name).write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return str(folder)


def test_the_rank_that_stands_still_is_named_with_those_that_wait_and_its_stack(tmp_path, capsys):
    assert main(["doctor", "--run", written(tmp_path, STALL)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "rank 1 is in no collective: backward of unit 'blocks.3' after step 12, health.timeout 300 s" in text
    assert "rank 1 (a, pid 42, running)" in text
    assert "rank 0 waits for rank 1 in all_gather (dp) of blocks.3" in text
    assert "/x/loop.py:7 turn_for_ever" in text
    assert "other.py" not in text  # another thread's
    assert "try: look at its stack; `zero3d train ... --resume auto`" in text


def test_a_run_that_was_started_again_and_wrote_steps_since_is_a_warning(tmp_path, capsys):
    folder = written(tmp_path, STALL)
    then = datetime.fromisoformat(STALL["time"]).timestamp()
    for name, text in ((".lock", "{}"), ("metrics.jsonl", '{"step": 12}\n{"step": 40}\n')):
        (tmp_path / name).write_text(text)
    os.utime(tmp_path / ".lock", (then - 60, then - 60))
    assert main(["doctor", "--run", folder]) == 1, "the lock is of the run that died"
    os.utime(tmp_path / ".lock", (then + 60, then + 60))
    capsys.readouterr()
    assert main(["doctor", "--run", folder]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "it died at 2026-01-02T03:04:05+00:00 and was started again since, to step 40" in said
    os.utime(tmp_path / "metrics.jsonl", (then - 1, then - 1))
    assert main(["doctor", "--run", folder]) == 1, "it has come to no step since"
    (tmp_path / "metrics.jsonl").write_text('{"step": 12}\n')
    assert main(["doctor", "--run", folder]) == 1, "a copy has new times and the old steps"


def test_a_rank_in_no_collective_is_not_said_to_be_in_its_last_one(tmp_path, capsys):
    assert main(["doctor", "--run", written(tmp_path, STALL)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "running training, its last call: all_gather (dp) number 119" in text
    assert "waiting training, all_gather (dp) of blocks.3 number 120" in text


def test_programs_get_the_same_as_json(tmp_path, capsys):
    assert main(["doctor", "--run", written(tmp_path, STALL), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["verdict"], told["findings"][0]["figures"]["culprits"]) == ("broken", [1])
    assert told["runs"][0]["ranks"][0]["seconds"] == 301.5


def test_each_hosts_file_is_read_and_where_there_is_none_nothing_is_wrong(tmp_path, capsys):
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    assert "no watchdog.json" in capsys.readouterr().out
    for host in "ab":
        written(tmp_path, STALL | {"host": host}, f"watchdog-{host}.json")
    assert main(["doctor", "--run", str(tmp_path), "--json"]) == 1
    assert [each["name"] for each in json.loads(capsys.readouterr().out)["findings"]] == ["run @ a", "run @ b"]


@pytest.mark.parametrize(("state", "culprits"), [("dead", [0]), ("stopped", [0]), ("waiting", [1])])
def test_the_dead_come_before_the_stopped_and_these_before_who_computes(state, culprits):
    tree = copy.deepcopy(STALL)
    tree["ranks"][0]["state"] = state
    assert [rank.rank for rank in of_tree(tree).culprits] == culprits


CALLS = {  # (state, operation, its number) of each rank -> who is to blame
    "one in another collective": ([("waiting", "all_gather", 7)] * 3 + [("waiting", "reduce_scatter", 7)], [3]),
    "two apart": ([("waiting", "all_gather", 7), ("waiting", "all_gather", 8)], [0, 1]),
    "all in one": ([("waiting", "all_gather", 7)] * 3, []),
    "one computes": ([("waiting", "all_gather", 7), ("running", "all_gather", 6)], [1]),
    "one dead": ([("waiting", "all_gather", 7), ("running", "all_gather", 6), ("dead", "all_gather", 6)], [2]),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_watchdog_itself_writes_is_read_with_the_same_culprits(tmp_path, name):
    ranks, culprits = CALLS[name]
    axes = {"dp": list(range(len(ranks)))}
    states = [
        RankState(i, "a", 40 + i, state, "training", "dp", op, "-", number, 5, 9.0, axes=axes)
        for i, (state, op, number) in enumerate(ranks)
    ]
    facts = Facts(timeout=30.0, output=tmp_path, world=len(ranks))
    Block("stall", datetime.now(UTC), "a", states, facts, find_waits(states), find_culprits(states)).write()
    (run,) = read_runs(tmp_path)
    assert [rank.rank for rank in run.culprits] == [state.rank for state in find_culprits(states)] == culprits
    assert (run.step, run.timeout, len(run.waits)) == (5, 30.0, sum(state == "waiting" for state, *_ in ranks))
    assert judge_run(run, tmp_path).text.startswith(run.cause)


@pytest.mark.parametrize("text", ["", "[]", "{", "\x00", "[" * 100_000, '{"version": 2}', '{"version": [1]}', "{}",
                                  '{"version": 1, "ranks": "x"}'])  # fmt: skip
def test_a_file_of_something_else_is_bad_input_in_one_line(tmp_path, capsys, text):
    assert main(["doctor", "--run", written(tmp_path, text)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "watchdog.json" in said


def test_what_is_no_regular_file_and_no_folder_is_bad_input(tmp_path, capsys):
    os.mkfifo(tmp_path / FILE)
    assert main(["doctor", "--run", str(tmp_path)]) == 2
    assert "is a pipe" in capsys.readouterr().err
    assert main(["doctor", "--run", str(tmp_path / "none")]) == 2
    assert "there is no such folder" in capsys.readouterr().err


def test_a_hostile_file_moves_no_cursor_and_opens_no_markup(tmp_path, capsys):
    tree = copy.deepcopy(STALL)
    tree["cause"] = tree["advice"][0] = "\x1b[2J\x1b]0;owned\x07[bold red]x[/bold red]\u202ex\r\n" + "y" * 10_000
    tree["ranks"][1] |= {"phase": "\x1b[31m", "host": "[link=file:///etc/passwd]z[/link]", "stack": ["\x9b2J" * 9]}
    main(["doctor", "--run", written(tmp_path, tree)])
    said = capsys.readouterr().out
    assert not {"\x1b", "\x07", "\r", "\u202e", "\x9b"} & set(said)
    assert "[bold red]x[/bold red]" in said
    assert "y" * 1000 not in "".join(said.split())


def test_whatever_is_in_its_place_is_read_or_refused_and_nothing_else_happens(tmp_path):
    odd = [None, -1, 1e400, float("nan"), 10**400, True, "x" * 999, [], {}, [[]], {"rank": 1}, "\ud800"]
    chance = random.Random(5)

    def mutate(value):
        if chance.random() < 0.15:
            return chance.choice(odd)
        if isinstance(value, dict):
            return {key: mutate(inner) for key, inner in value.items() if chance.random() > 0.05}
        return [mutate(inner) for inner in value] if isinstance(value, list) else value

    read = 0
    for _ in range(400):
        tree = mutate(STALL)
        written(tmp_path, json.dumps(tree))
        try:
            (run,) = read_runs(tmp_path)
        except ConfigError:
            continue
        assert judge_run(run, tmp_path).verdict == "broken"
        read += 1
    assert read > 100


SLOW = Slow(1, 0.08, 40, 50, {"compute": 0.0, "data": 0.1, "save": 0.0, "host": 0.0})


def records(folder, *fields, hosts=("a", "b")):
    lines = [json.dumps({"step": step, "loss": 1.0, **each}) for step, each in enumerate(fields, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "report.json").write_text(json.dumps({"hosts": hosts}))


@pytest.mark.parametrize("part", KINDS)
def test_a_slow_rank_is_named_with_its_host_and_what_to_look_at(tmp_path, capsys, part):
    slow = SLOW._replace(seconds=dict.fromkeys(KINDS, 0.0) | {part: 0.1})
    records(tmp_path, {}, SLOW._replace(rank=0).fields(), slow.fields(), {})
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    what = "saves" if part == "save" else "steps"
    assert (
        f"slowest rank 1 (b): +8 % over the median in 40 of 50 {what}: {part}; in 2 records, from step 2 to step 3 of 4"
        in text
    )
    assert "try: on b: " in text
    assert main(["doctor", "--json", "--run", str(tmp_path)]) == 0
    (found,) = (each for each in json.loads(capsys.readouterr().out)["findings"] if each["name"] == "slow rank")
    assert found["figures"]["slowest_rank"] == 1


@pytest.mark.parametrize("hosts", [[], "a", [1, None]])
def test_a_slow_rank_of_a_damaged_folder_is_named_without_what_is_not_there(tmp_path, capsys, hosts):
    records(tmp_path, SLOW.fields(), {"slowest_rank": 0, "slowest_over": None}, {"slowest_rank": "x"}, hosts=hosts)
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    assert "slowest rank 1" in capsys.readouterr().out


def test_a_run_without_a_slow_rank_has_no_row_of_one(tmp_path, capsys):
    records(tmp_path, {}, {})
    assert main(["doctor", "--run", str(tmp_path)]) == 0
    assert "slow rank" not in capsys.readouterr().out
