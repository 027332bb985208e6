"""Traces of several ranks in one file: whose an event is, when it was, what is tied to what."""

import json

import pytest

from zero3d.train.traces import merge, of_rank


def trace(base, *events):
    return json.dumps({"baseTimeNanoseconds": base, "traceEvents": events})


def name(pid, of):
    return {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 1.0, "args": {"name": of}}


def work(pid, ts, **more):
    return {"ph": "X", "name": "op", "pid": pid, "tid": 7, "ts": ts, "dur": 2.0, **more}


def merged(folder, hosts=("a", "b")):
    return json.loads(merge(folder, hosts).read_text())["traceEvents"]


def test_ranks_have_processes_of_their_own_by_rank_and_host_and_one_clock(tmp_path):
    of_rank(tmp_path, 0).write_text(trace(2_000_000, name(41, "python"), name(0, "GPU 0"), work(41, 5.0), work(0, 6.0)))
    of_rank(tmp_path, 1).write_text(trace(5_000_000, name(0, "GPU 0"), work(0, 5.0), work("Spans", 5.5)))
    events = merged(tmp_path)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(names.values()) == ["rank 0 (a): python", "rank 0 (a): GPU 0", "rank 1 (b): GPU 0"]
    first, device, other, span = (event for event in events if event["name"] == "op")
    assert [names[event["pid"]] for event in (first, device, other)] == list(names.values())
    assert len({event["pid"] for event in (first, device, other, span)}) == 4
    assert [event["ts"] for event in (first, device, other, span)] == [5.0, 6.0, 3005.0, 3005.5]
    assert first["dur"] == 2.0


def test_arrows_of_one_rank_do_not_end_at_another(tmp_path):
    for rank in range(2):
        arrows = (work(1, 1.0, ph=phase, id=3) for phase in "sf")
        of_rank(tmp_path, rank).write_text(trace(0, *arrows, work(1, 2.0, id=3)))
    ids = [event["id"] for event in merged(tmp_path)]
    assert ids[0] == ids[1] != ids[3] == ids[4]
    assert ids[2] == ids[5] == 3  # no arrow


def test_processes_are_in_the_order_of_ranks_whatever_the_profiler_s_own_order(tmp_path):
    for rank, order in enumerate((9, 1)):
        sorted_ = {"ph": "M", "name": "process_sort_index", "pid": 5, "tid": 0, "args": {"sort_index": order}}
        of_rank(tmp_path, rank).write_text(trace(0, sorted_))
    first, second = (event["args"]["sort_index"] for event in merged(tmp_path))
    assert first < second


def test_ranks_whose_files_are_on_other_hosts_are_left_out_and_none_is_no_trace(tmp_path):
    assert merge(tmp_path, "abc") is None
    of_rank(tmp_path, 2).write_text(trace(9, work(1, 1.0)))
    (event,) = merged(tmp_path, "abc")
    assert event["ts"] == 1.0
    of_rank(tmp_path, 1).write_text("{")
    with pytest.raises(ValueError):
        merge(tmp_path, "abc")
