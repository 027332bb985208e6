"""Signals as requests in one process, and the exit of a worker that another launcher started."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from zero3d.tools.cli.workers import Worker, conclude, killed_twice, supervise
from zero3d.train.stop import SIGNALS, Stopped, StopRequest
from zero3d.watchdog.monitor import Monitor


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_is_a_request_and_handlers_come_back(number):
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest() as request:
        assert request.signal is None
        signal.raise_signal(number)
        assert request.signal == number
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_sigterm_may_come_many_times_but_ctrl_c_after_a_request_interrupts():
    with StopRequest() as request:
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        assert request.signal == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_an_ignored_signal_stays_ignored():
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            signal.raise_signal(signal.SIGINT)
            assert request.signal is None
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, old)


def test_a_forked_child_dies_of_the_signal():
    script = """
import os, signal
from zero3d.train.stop import StopRequest
with StopRequest() as request:
    child = os.fork()
    if child == 0:
        signal.raise_signal(signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert request.signal is None
"""
    subprocess.run([sys.executable, "-c", script], check=True)


class Ended:
    """A process that is over."""

    def __init__(self, code):
        self.code = code

    def poll(self):
        return self.code


RESUME = "resume with: zero3d train a.yaml --resume auto\n"
GO_ON = "go on from the last checkpoint with: zero3d train a.yaml --resume auto\n"
FULL = ("CheckpointError: disk full", "")  # raised on purpose: told without a traceback
BUG = ("ValueError: x", "a traceback")
LOST = ("OrderError: rank 0 left", "")


@pytest.mark.parametrize(
    ("codes", "errors", "stop_signal", "code", "expected"),
    [
        ((0, 0), {}, None, 0, ""),
        ((0, 0), {}, 15, 0, ""),
        ((143, 143), {}, 2, 130, f"stopped by SIGINT; {RESUME}"),
        ((143, 143), {}, None, 143, f"stopped by SIGTERM; {RESUME}"),
        ((143, -15), {}, 1, 129, "stopped by SIGHUP outside of training; what was saved before is still there\n"),
        ((2, 143), {0: FULL}, 15, 2, "CheckpointError: disk full\n"),
        ((1, 0), {0: BUG}, None, 1, "rank 0 failed:\na traceback\n"),
        ((1, 1), {0: FULL}, None, 1, "CheckpointError: disk full\n"),
        ((2, 2), {1: FULL, 0: LOST}, None, 2, "CheckpointError: disk full\n"),
        ((-9, 2), {1: LOST}, None, 1, f"rank 0 died without an exception: killed by SIGKILL, why\n{GO_ON}"),
        ((-15, 0), {}, None, 1, f"rank 0 died without an exception: killed by SIGTERM, why\n{GO_ON}"),
        ((3, 0), {}, None, 1, f"rank 0 died without an exception: exit code 3\n{GO_ON}"),
    ],
    ids=lambda value: str(value) if isinstance(value, tuple) else "",
)
def test_how_workers_end_becomes_one_exit_code_and_one_message(
    tmp_path, capsys, monkeypatch, codes, errors, stop_signal, code, expected
):
    monkeypatch.setattr(
        "zero3d.tools.cli.workers.describe_kill", lambda number, _: f"killed by {signal.Signals(number).name}, why"
    )
    workers = [Worker(rank, Ended(exit_code), tmp_path / str(rank)) for rank, exit_code in enumerate(codes)]
    for worker in workers:
        worker.folder.mkdir()
    for moment, (rank, (message, callstack)) in enumerate(errors.items()):
        output = {"message": {"message": message, "extraInfo": {"py_callstack": callstack}}}
        (tmp_path / str(rank) / "error.json").write_text(json.dumps(output))
        os.utime(tmp_path / str(rank) / "error.json", (moment, moment))
    failed = [worker for worker in workers if worker.failed]
    assert conclude(workers, failed, stop_signal, ["train", "a.yaml"]) == code
    assert capsys.readouterr().err == expected


def test_work_that_saves_nothing_is_stopped_without_a_word_of_saving(tmp_path, capsys):
    workers = [Worker(rank, Ended(-15), tmp_path / str(rank)) for rank in range(2)]
    assert conclude(workers, workers, 15, ["request.json"], saves=False) == 143
    assert killed_twice(saves=False) == 130
    assert capsys.readouterr().err == "stopped by SIGTERM\nkilled by a second Ctrl-C\n"


class Saving:
    """A process that takes a while to save and then leaves with `code`; with None it never does."""

    def __init__(self, code):
        self.code, self.looks, self.told = code, 0, 0

    def poll(self):
        self.looks += 1
        return self.code if self.looks > 20 else None

    def terminate(self):
        self.told += 1


def test_workers_are_told_once_however_long_they_save(monkeypatch):
    monkeypatch.setattr("zero3d.tools.cli.workers.POLL", 0)
    workers = [Worker(rank, Saving(143), Path()) for rank in range(2)]
    request = StopRequest()
    request.signal = signal.SIGTERM
    assert supervise(workers, request, Monitor(Path())) == []
    assert [worker.process.told for worker in workers] == [1, 1]


def test_a_failed_worker_is_reported_while_others_hang(monkeypatch):
    monkeypatch.setattr("zero3d.tools.cli.workers.POLL", 0)
    monkeypatch.setattr("zero3d.tools.cli.workers.LAST_WORDS", 0)
    workers = [Worker(0, Saving(None), Path()), Worker(1, Saving(1), Path())]
    assert supervise(workers, StopRequest(), Monitor(Path())) == workers[1:]
    assert [worker.process.told for worker in workers] == [0, 0]


def test_no_handler_of_errors_takes_a_stop_for_one():
    assert not issubclass(Stopped, Exception)


@pytest.mark.parametrize(
    ("rank", "raised", "code", "expected"),
    [
        ("0", "Stopped(15, 'step 3 is saved')", 143, "stopped by SIGTERM: step 3 is saved; --resume auto continues\n"),
        ("1", "Stopped(15, 'step 3 is saved')", 143, ""),
        ("0", "Stopped(1, 'step 3 is saved')", 129, "stopped by SIGHUP: step 3 is saved; --resume auto continues\n"),
        ("0", "KeyboardInterrupt", 130, ""),
        ("1", "DataError('no such file')", 2, "DataError: no such file\n"),
    ],
)
def test_a_worker_of_another_launcher_says_itself_how_it_ended(rank, raised, code, expected):
    script = f"""
from zero3d.tools.cli.worker import as_worker
from zero3d.errors import DataError
from zero3d.train.stop import Stopped
def act():
    raise {raised}
as_worker(act)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TORCHELASTIC", "ZERO3D"))}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment | {"RANK": rank}, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stderr) == (code, expected)
