"""report.json of a run that ends before its last step, and of one that goes on; the command of log.on.end is told alike."""

import json
from pathlib import Path

import pytest
from heard import Heard
from training import save_model, save_rows, train, tree

from zero3d.train.loop import Loop


@pytest.fixture
def heard(tmp_path):
    made = Heard(tmp_path)
    yield made
    made.close()


@pytest.fixture
def made(tmp_path, heard):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    log = {"on": heard.on("end", facts=("HOW", "STEP", "LOSS", "WHY"))}
    return tree(tmp_path, checkpoint={"every": 2, "export": False}, log=log)


def report_of(made):
    return json.loads((Path(made["output"]) / "report.json").read_text())


def loss_of(made, step):
    return json.loads((Path(made["output"]) / "metrics.jsonl").read_text().splitlines()[step - 1])["loss"]


def test_a_run_that_fails_says_why_and_what_it_had_at_its_last_checkpoint(made, heard, monkeypatch):
    step, seen = Loop.step, []

    def dying(loop, request):
        if loop.state.step in (0, 3):
            seen.append(report_of(made))
        if loop.state.step == 3:
            raise RuntimeError("gone")
        return step(loop, request)

    monkeypatch.setattr(Loop, "step", dying)
    with pytest.raises(RuntimeError, match="gone"):
        train(made)
    begun, saved = seen
    assert (begun["step"], begun["ended"], begun["traffic"]) == (0, None, [])
    assert (saved["step"], saved["session_steps"], saved["ended"]) == (2, 2, None)
    assert {row["agrees"] for row in saved["memory"]} <= {True, None}
    left = report_of(made)
    assert (left["ended"]["how"], left["ended"]["why"]) == ("failed", "RuntimeError: gone")
    assert {name: left[name] for name in left if name != "ended"} == {
        name: saved[name] for name in saved if name != "ended"
    }
    assert heard.lines(1) == [f"failed 3 {loss_of(made, 3)} RuntimeError: gone"]


def test_a_run_that_is_stopped_says_where_and_one_that_goes_on_is_a_session_of_its_own(made, heard):
    said = train(made, stop_in=3)
    left = report_of(made)
    assert (left["step"], left["ended"]["how"], left["ended"]["why"]) == (3, "stopped", said)
    assert heard.lines(1) == [f"stopped 3 {loss_of(made, 3)} {said}"]
    records = train(made, resume="auto")
    assert {record["step"]: record["resumed_from"] for record in records if "resumed_from" in record} == {4: 3}
    left = report_of(made)
    assert (left["step"], left["session_steps"], left["ended"]["how"]) == (5, 2, "finished")
    assert heard.lines(1) == [f"finished 5 {loss_of(made, 5)} "]


@pytest.mark.long
def test_records_that_are_logged_have_the_times_of_the_steps_before_them_and_the_report_has_their_mean(made):
    """The first step counts in none, and the last record is one of them."""
    records = train(made | {"log": {"every": 2}})
    known = [record for record in records if "forward_s" in record]
    assert [record["step"] for record in known] == [4, 5]
    times = {row["part"]: row["mean"] for row in report_of(made)["engine"]["times"]}
    assert {"data", "forward", "backward", "update"} <= set(times)
    for part in times:
        of_two, of_one = (record.get(f"{part}_s", 0.0) for record in known)  # steps
        assert times[part] == pytest.approx((2 * of_two + of_one) / 3)
