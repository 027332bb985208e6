"""NCCL's flight recorder: when it is on, where its file goes, and how a monitor has it written."""

import threading

import pytest
import torch
import torch.distributed as dist

from zero3d.distributed import axis as axis_module
from zero3d.distributed.axis import Axis
from zero3d.errors import OrderError
from zero3d.watchdog import flight_recorder
from zero3d.watchdog.block import STALL, observe
from zero3d.watchdog.heartbeat import TRAINING, Heartbeat
from zero3d.watchdog.monitor import Monitor


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    for name in (*flight_recorder._SIZES, *flight_recorder._PREFIXES):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recorded(monkeypatch):
    """A process whose groups are NCCL's, and what torch records of it."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"the record", raising=False)


def test_without_nccl_there_is_none(tmp_path):
    assert flight_recorder.record(0, tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", flight_recorder._SIZES)
def test_a_buffer_of_no_entries_switches_it_off(recorded, monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, "0")
    assert flight_recorder.record(0, tmp_path) is None


def test_a_torch_without_it_has_none(recorded, monkeypatch, tmp_path):
    monkeypatch.delattr(torch._C._distributed_c10d, "_dump_nccl_trace")
    assert flight_recorder.record(0, tmp_path) is None


def test_it_goes_to_the_runs_folder_or_to_the_temporary_one(recorded, monkeypatch, tmp_path):
    (run := tmp_path / "run").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    for folder, place in ((run, run), (None, tmp_path)):
        file = flight_recorder.record(3, folder)
        assert file == place / "nccl_trace_rank_3"
        assert file.read_bytes() == b"the record"


@pytest.mark.parametrize("name", flight_recorder._PREFIXES)
def test_torchs_own_variable_has_the_beginning_of_the_name(recorded, monkeypatch, tmp_path, name):
    monkeypatch.setenv(name, str(tmp_path / "trace_"))
    assert flight_recorder.record(12, tmp_path / "elsewhere") == tmp_path / "trace_12"


def test_a_folder_that_takes_no_file_is_no_error(recorded, tmp_path):
    assert flight_recorder.record(0, tmp_path / "missing") is None


def test_a_monitor_that_finds_a_stall_has_it_written_and_names_the_files(recorded, monkeypatch, tmp_path):
    (watch := tmp_path / "watch").mkdir(mode=0o700)
    (run := tmp_path / "run").mkdir()
    monkeypatch.setattr(Monitor, "with_stacks", lambda self, states: states)
    for rank in range(2):
        heartbeat = Heartbeat.begin(watch, rank, TRAINING)
        heartbeat.tell(output=str(run), **{flight_recorder.FACT: rank == 1})
    over = threading.Event()

    def follow():
        while not over.wait(0.001):
            flight_recorder.reply(watch, 1)

    thread = threading.Thread(target=follow)
    thread.start()
    block = observe(STALL, Monitor(watch))
    over.set()
    thread.join()
    file = str(run / "nccl_trace_rank_1")
    assert block.as_json()["flight_recorder"] == {"1": file}
    assert f"\n  rank 1: {file}\n" in block.text()


def test_a_rank_that_has_replied_writes_no_other_record(recorded, tmp_path):
    """It would be one of what came after the stall."""
    flight_recorder.write_whole(tmp_path / flight_recorder.ASKED, str(tmp_path))
    file = tmp_path / "nccl_trace_rank_3"
    flight_recorder.reply(tmp_path, 3)
    file.unlink()
    flight_recorder.reply(tmp_path, 3)
    assert not file.exists()


def test_ranks_that_are_gone_are_not_asked(tmp_path):
    for rank in range(3):
        Heartbeat.begin(tmp_path, rank, TRAINING).tell(**{flight_recorder.FACT: True})
    monitor = Monitor(tmp_path)
    assert monitor.recording(monitor.states(dead=[1])) == [0, 2]


def test_where_no_rank_has_one_nobody_is_asked(tmp_path):
    assert flight_recorder.ask(tmp_path, [], None) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_rank_that_does_not_reply_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(flight_recorder, "DEADLINE", 0.0)
    assert flight_recorder.ask(tmp_path, [0], None) == {}


def test_a_rank_whose_device_never_comes_to_an_end_names_its_file(recorded, monkeypatch, tmp_path):
    monkeypatch.setattr(axis_module, "_note", lambda: ("", 1, None))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    error = Axis("dp", 3, 8, patience=9.0).late({"dp": ("all_gather", "a")})
    assert isinstance(error, OrderError)
    assert str(error).endswith(f" NCCL's flight recorder: {tmp_path / 'nccl_trace_rank_3'}.")
