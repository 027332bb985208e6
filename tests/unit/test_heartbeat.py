"""A rank's record in shared memory: what is written is read, also from another process, and never half."""

import threading
from unittest import mock

import pytest
from models import batch, build, loss_of

import zero3d
from zero3d.watchdog.heartbeat import ENDED, SIZE, TRAINING, Heartbeat, read_beat, read_facts


@pytest.fixture
def heartbeat(tmp_path):
    return Heartbeat.begin(tmp_path, 3, "start-up")


def now(folder, rank=3):
    return read_beat((folder / f"rank-{rank}").read_bytes())


def test_a_call_is_announced_with_axis_operation_unit_and_number(tmp_path, heartbeat):
    heartbeat.step = 7
    with heartbeat.inside("dp", "all_gather", "model.layers.3", heartbeat.count("dp", "all_gather")):
        beat = now(tmp_path)
        assert (beat.axis, beat.op, beat.unit) == ("dp", "all_gather", "model.layers.3")
        assert (beat.depth, beat.number, beat.step, beat.phase) == (1, 1, 7, "start-up")
        assert heartbeat.count("dp", "all_gather") == 2
        assert heartbeat.count("dp", "reduce_scatter") == 1
    beat = now(tmp_path)
    assert (beat.depth, beat.unit) == (0, "model.layers.3")  # what came last stays known


def test_the_record_is_as_long_as_drawn_and_texts_are_cut(tmp_path, heartbeat):
    with heartbeat.inside("a" * 99, "b" * 99, "c" * 999):
        beat = now(tmp_path)
    assert (len(beat.axis), len(beat.op), len(beat.unit), beat.phase) == (16, 24, 144, "start-up")
    assert (tmp_path / "rank-3").stat().st_size == SIZE


def test_every_beat_moves_the_sequence_and_a_phase_gives_back_the_one_before(tmp_path, heartbeat):
    seen = [now(tmp_path).sequence]

    def look():
        seen.append(now(tmp_path).sequence)
        assert seen[-1] > seen[-2]
        assert seen[-1] % 2 == 0

    with heartbeat.phase(TRAINING):
        look()
        with pytest.raises(ZeroDivisionError), heartbeat.phase("save"):
            look()
            assert now(tmp_path).phase == "save"
            raise ZeroDivisionError
        look()
        assert now(tmp_path).phase == TRAINING
        heartbeat.work(b"forward of unit 'head'")
        look()
        assert now(tmp_path).work == "forward of unit 'head'"
        with heartbeat.inside("dp", "exchange", "-"):
            look()
        look()
    heartbeat.step = 1
    look()
    heartbeat.end()
    look()
    assert now(tmp_path).phase == ENDED


def test_a_slow_phase_inside_another_gives_that_one_back(tmp_path, heartbeat):
    with heartbeat.phase("load"):
        with heartbeat.phase("save"), heartbeat.phase(TRAINING):
            assert now(tmp_path).phase == TRAINING
        assert now(tmp_path).phase == "load"
    assert now(tmp_path).phase == "start-up"


def test_two_openings_in_one_process_are_one_record_and_no_other_process_joins(tmp_path, heartbeat):
    joined = Heartbeat.join(str(tmp_path), 3)
    with heartbeat.phase(TRAINING):
        joined.step = 5
        with joined.inside("dp", "exchange", "-"):
            heartbeat.work(b"loss")
        assert (now(tmp_path).phase, now(tmp_path).step, now(tmp_path).depth) == (TRAINING, 5, 0)
    record = bytearray((tmp_path / "rank-3").read_bytes())
    record[16:24] = (1).to_bytes(8, "little")  # another process' number
    (tmp_path / "rank-3").write_bytes(record)
    Heartbeat.join(str(tmp_path), 3).step = 9
    Heartbeat.join(None, 3).step = 9
    Heartbeat.join(str(tmp_path / "nowhere"), 3).step = 9
    assert now(tmp_path).step == 5


def test_seconds_in_calls_are_added_up_and_a_call_inside_another_counts_once(tmp_path, heartbeat):
    with mock.patch("time.perf_counter", side_effect=[1.0, 4.0, 10.0, 10.5]):
        with heartbeat.inside("dp", "all_gather", "a"), heartbeat.inside("dp", "exchange", "-"):
            pass
        heartbeat.enter("dp", "exchange", "-", 1, None)
        heartbeat.leave()
    assert heartbeat.waited == 3.5


def test_facts_are_told_beside_the_record_and_added_to(tmp_path, heartbeat):
    heartbeat.tell(timeout=300.0)
    Heartbeat.join(str(tmp_path), 3).tell(axes={"dp": [1, 3]})
    assert read_facts(tmp_path / "rank-3") == {"timeout": 300.0, "axes": {"dp": [1, 3]}}
    assert read_facts(tmp_path / "rank-4") == {}


def test_a_record_that_is_written_meanwhile_is_never_read_half(tmp_path, heartbeat):
    done = threading.Event()

    def write():
        calls = [(f"a{i}" * 4, f"o{i}" * 8, f"u{i}" * 40) for i in range(10)]
        while not done.is_set():
            for i, call in enumerate(calls):
                with heartbeat.inside(*call, i):
                    pass

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(3000):
            beat = read_beat(heartbeat._memory)
            assert beat.axis == f"a{beat.number}" * 4 or beat.axis == ""
            assert beat.unit == f"u{beat.number}" * 40 or beat.unit == ""
    finally:
        done.set()
        writer.join()


@pytest.mark.parametrize("stage", [0, 3])
def test_on_one_rank_every_unit_of_a_forward_and_a_backward_is_a_sign_of_life(monkeypatch, stage):
    said = []
    monkeypatch.setattr(Heartbeat, "work", lambda _, what: said.append(what.decode()))
    engine = zero3d.Engine(build("net"), stage=stage, precision="fp32")
    engine.backward(loss_of(engine, batch(1)))
    names = {unit.name for unit in engine.units}
    assert len(names) > 2
    assert {f"a backward, past unit {name!r}" for name in names} <= set(said)
    assert all(any(line.startswith("the forward of unit") and repr(name) in line for line in said) for name in names)
