"""`zero3d report OUTPUT`: what it makes of a run's folder, whoever has written it, and of folders of no run."""

import json
import os
import re

import pytest
from lock_holder import locked_by_another

from zero3d.account.traffic import Moved
from zero3d.config import load, to_yaml
from zero3d.tools.cli.main import main
from zero3d.train.tables import MemoryRow, TrafficRow

MOVED = Moved(4, 1000, 2000)
ENGINE = {
    "version": 1, "rank": 0, "ranks": 2, "steps": 12, "memory": [], "traffic": [], "step_traffic": None, "times": [],
    "settings": [{"name": "reduce", "value": "auto", "default": "auto", "became": "every_step"}], "notes": [],
    "versions": {"zero3d": "0.1.0", "torch": "2.13.0"}, "axes": {"pp": 1, "dp": 2},
}  # fmt: skip
REPORT = {
    "version": 1, "step": 12, "steps": 12, "session_steps": 12, "ended": {"how": "finished", "why": ""}, "ranks": 2,
    "stage": 3, "precision": "bf16", "peak_held": 77, "engine": ENGINE,
    "memory": [MemoryRow("parameters", "bf16", 1_426_752, False, 1_426_752, True).as_json()],
    "traffic": [TrafficRow("all_gather", MOVED, MOVED, True).as_json()],
}  # fmt: skip


def left(folder, report=REPORT, steps=12, **more):
    """A run's folder: twelve steps with a time by part, an evaluation behind the last."""
    config = load(None, [f"output={folder}", "optimizer.lr=1e-3", "train.steps=12"])
    (folder / "config.yaml").write_text(to_yaml(config))
    records = [
        {"step": step, "loss": 5.0 - step / 10, "seconds": 0.5, "tokens_per_s": 1.0, "skipped": 0,
         "forward_s": 0.1 * step, "forward_s_least": 0.05, "forward_s_largest": 0.2}
        for step in range(1, steps + 1)
    ]  # fmt: skip
    if records:
        records[-1] |= {"validation_loss": 2.25}
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if report is not None:
        (folder / "report.json").write_text(json.dumps(report))
    for name, text in more.items():
        (folder / name).write_text(text)
    return str(folder)


def told(capsys, output, *words):
    assert main(["report", output, *words]) == 0
    return capsys.readouterr().out


def test_a_finished_run_says_what_it_was_how_far_it_came_and_what_it_held(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text = told(capsys, left(tmp_path))
    first, second, third, *_ = text.splitlines()
    assert first == f"{tmp_path}: demo on 2 ranks, finished"
    assert second == "step 12 of 12; 12 steps in 6.0 s"
    assert third == "last loss 3.800000; last evaluation: validation_loss 2.250000"
    rows = [line.split() for line in text.splitlines()]
    assert ["optimizer.lr", "0.001", "0.0003"] in rows
    assert ["precision", "bf16", "the", "default"] in rows
    assert ["optimizer.clip_norm", "1.0", "the", "default"] in rows
    assert ["reduce", "auto", "every_step"] in rows
    assert ["forward", "0.05", "0.65", "0.2"] in rows
    assert ["torch", "2.13.0"] in rows
    assert "loss (nats per token), running average" in text
    assert "tokens_per" not in text
    assert re.search(r"parameters +bf16 +1,426,752 +equal +1,426,752", text)
    assert re.search(r"all_gather +4 +1,000 +2,000 +equal +2,000", text)


def test_json_has_all_of_it_as_plain_values(tmp_path, capsys):
    found = json.loads(told(capsys, left(tmp_path), "--json"))
    assert (found["state"], found["step"], found["steps"], found["unread"]) == ("finished", 12, 12, [])
    assert found["losses"][-1] == 3.8
    assert found["report"] == REPORT
    assert {"name": "optimizer.clip_norm", "value": 1.0, "default": 1.0} in found["settings"]
    (forward,) = found["times"]
    assert forward == {"part": "forward", "mean": pytest.approx(0.65), "least": pytest.approx(0.05), "largest": pytest.approx(0.2)}  # fmt: skip


def test_a_part_of_some_records_counts_as_in_the_line_that_the_run_ended_with(tmp_path, capsys):
    output = left(tmp_path, steps=0)
    records = [{"step": 1}, {"step": 4, "forward_s": 2.0}, {"step": 5, "forward_s": 2.0, "evaluation_s": 6.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    parts = {row["part"]: row["mean"] for row in json.loads(told(capsys, output, "--json"))["times"]}
    assert parts == {"forward": 2.0, "evaluation": 2.0}  # of three steps, of which one was evaluated


def test_numbers_that_json_does_not_have_are_none_in_it(tmp_path, capsys):
    output = left(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": 1e400, "seconds": 1e400, "forward_s": 1e400, "validation_loss": 1e400}\n')
    found = json.loads(told(capsys, output, "--json"), parse_constant=pytest.fail)
    assert (found["losses"][-1], found["seconds"], found["values"]) == (None, None, {"validation_loss": None})


WATCHDOG = json.dumps({"version": 1, "kind": "died", "cause": "rank 1 was killed by SIGKILL", "step": 12, "ranks": []})


@pytest.mark.parametrize(("ended", "files", "state", "said"), [
    ({"how": "stopped", "why": "step 5 of 12 is saved"}, {}, "stopped", "step 5 of 12 is saved"),
    ({"how": "ended early", "why": "no better evaluation"}, {}, "ended early", "no better evaluation"),
    ({"how": "failed", "why": "NonFiniteError: too many\nmore"}, {}, "failed", "NonFiniteError: too many"),
    (None, {}, "died", "it left no word"),
    (None, {"watchdog.json": WATCHDOG}, "died", "watchdog: rank 1 was killed by SIGKILL"),
    (None, {"out-of-memory.txt": "rank 1 of 2 ran out of memory\nstep 3\nrows"}, "died", "rank 1 of 2 ran out of memory"),
])  # fmt: skip
def test_how_a_run_ended_is_said_with_its_last_words(tmp_path, capsys, ended, files, state, said):
    first, *lines = told(capsys, left(tmp_path, REPORT | {"ended": ended}, **files)).splitlines()
    assert first.endswith(f", {state}")
    assert any(line.startswith(f"  {said}") for line in lines)


def test_what_an_earlier_session_was_told_is_no_word_of_this_one(tmp_path, capsys):
    """What the watchdog and a post-mortem said before the last checkpoint, or of a run that has finished since."""
    post_mortem = {"out-of-memory.txt": "rank 1 of 2 ran out of memory\nstep 3\nrows"}
    output = left(tmp_path, REPORT | {"ended": None}, **post_mortem)
    os.utime(tmp_path / "out-of-memory.txt", (0, 0))
    (tmp_path / "watchdog.json").write_text(
        json.dumps(json.loads(WATCHDOG) | {"step": 3, "time": "2020-01-01T00:00:00Z"})
    )
    (tmp_path / ".lock").touch()
    first, second, *_ = told(capsys, output).splitlines()
    assert first.endswith(", died")
    assert second.startswith("  it left no word")
    text = told(capsys, left(tmp_path, **post_mortem))
    assert "finished" in text
    assert "ran out of memory" not in text


def test_a_run_that_was_shortened_and_went_on_has_the_steps_of_its_last_session(tmp_path, capsys):
    session = {"steps": 15, "session_steps": 4}
    moved = [TrafficRow("all_gather", MOVED, MOVED, True).as_json()]
    memory = [MemoryRow("parameters", "bf16", 1_000, False, 1_000, True, place=place) for place in ("device", "host")]
    report = REPORT | session | {"memory": [row.as_json() for row in memory], "traffic": moved}
    text = told(capsys, left(tmp_path, report))
    assert "step 12 of 15; 12 steps in 6.0 s" in text
    assert re.search(r"traffic .*4 steps", text)
    assert re.search(r"host +", text)


def test_times_of_a_run_without_records_are_those_of_its_engine(tmp_path, capsys):
    times = [{"part": "backward", "seconds": 0.25, "least": None, "mean": None, "largest": None}]
    text = told(capsys, left(tmp_path, REPORT | {"engine": ENGINE | {"times": times}}, steps=0))
    assert ["backward", "0.25"] in [line.split() for line in text.splitlines()]


def test_a_part_s_time_is_the_mean_of_the_records_that_have_it(tmp_path, capsys):
    output = left(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "loss": NaN, "seconds": 0.5}\n')
    found = json.loads(told(capsys, output, "--json"))
    assert found["times"][0]["mean"] == pytest.approx(0.65)
    assert found["losses"][-1] is None


def test_a_run_whose_folder_is_locked_still_goes_on(tmp_path, capsys):
    output = left(tmp_path, REPORT | {"ended": None})
    with locked_by_another(tmp_path) as process:
        first, second, *_ = told(capsys, output).splitlines()
    assert first.endswith(", still running")
    assert second.startswith(f"  process {process} on host ")


@pytest.mark.parametrize("line", ['{"step": 13, "lo', f'{{"step": 13, "loss": 1{"0" * 400}}}'], ids=["cut off", "huge"])
def test_a_line_that_is_no_record_is_counted_and_the_rest_is_shown(tmp_path, capsys, line):
    output = left(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(line)
    text = told(capsys, output)
    assert "step 12 of 12" in text
    assert f"not shown: 1 line of {tmp_path / 'metrics.jsonl'}, cut off or no record" in text


@pytest.mark.parametrize(("report", "steps", "said"), [
    (None, 12, "no report.json"), (REPORT, 0, "no metrics.jsonl"), ([1], 12, "report.json holds a list"),
])  # fmt: skip
def test_what_is_missing_is_said_and_the_rest_is_shown(tmp_path, capsys, report, steps, said):
    text = told(capsys, left(tmp_path, report, steps))
    assert text.splitlines()[0].endswith(", finished" if report == REPORT else ", not known")
    assert "optimizer.lr" in text
    assert said in text


@pytest.mark.parametrize("report", [
    {"ended": 3, "memory": [{"consumer": "\x1b[31m"}], "engine": [], "ranks": {}, "steps": "x"},
    REPORT | {"memory": [REPORT["memory"][0] | {"measured": "many"}], "engine": {"versions": 3, "settings": [None, {}]}},
    REPORT | {"traffic": [{}], "peak_held": None, "stage": "\x1b[31m" * 99},
])  # fmt: skip
def test_a_report_of_another_program_harms_nothing(tmp_path, capsys, report):
    text = told(capsys, left(tmp_path, report))
    assert "\x1b" not in text
    assert "optimizer.lr" in text


def test_a_config_that_cannot_be_read_is_said(tmp_path, capsys):
    text = told(capsys, left(tmp_path, **{"config.yaml": "zero: {stage: 9}\n"}))
    assert "a run on 2 ranks, finished" in text
    assert "config.yaml: zero.stage takes a whole number from 0 to 3" in " ".join(text.split())


@pytest.mark.parametrize(("output", "said"), [
    ("none", "is not there"), ("empty", "is empty"), ("others", "has no config.yaml, metrics.jsonl or report.json"),
    ("others/file", "is a file"), ("s3://bucket/run", "is a URL"),
])  # fmt: skip
def test_a_folder_of_no_run_is_refused(tmp_path, capsys, monkeypatch, output, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "file").touch()
    assert main(["report", output]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert len(error.splitlines()) == 1
