"""What a pipeline rank has received or sent and still keeps: as much as is in flight, and nothing between steps.

A fake process group sends nothing, so one process is one rank after another.

    stage s of p, M micro-batches      inputs kept at once        gradients
    gpipe                              M, but for stage 0         1, but for the last stage
    1f1b                               p - s, but for stage 0     1, but for the last stage
"""

import pytest
import torch
import torch.distributed as dist
from pipelines import build, engine_of
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero3d
from zero3d.pipeline.acknowledgements import Work

PP, COUNT, LENGTH, WIDTH = 4, 6, 5, 48
HIDDEN = 4 * LENGTH * WIDTH  # bytes of a hidden state of one sequence in fp32


@pytest.fixture
def rank(monkeypatch):
    """(schedule, pp rank) -> the engine of that rank of PP, with a function that runs a step."""
    if dist.is_initialized():
        dist.destroy_process_group()
    monkeypatch.setattr("zero3d.distributed.collectives.Comm.read", lambda self, values, assumed: assumed)
    monkeypatch.setattr(dist, "recv", lambda tensor, *_, **__: tensor.fill_(1))

    def made(schedule, place):
        dist.init_process_group("fake", rank=place, world_size=PP, store=FakeStore())
        engine = engine_of(build("net", 2 * PP), zero3d.Mesh(pp=PP), stage=0, schedule=schedule, accumulate=COUNT)

        def step(length=LENGTH):
            ids = torch.zeros(1, length, dtype=torch.int64)
            engine.train_batch([{"input_ids": ids, "targets": ids}] * COUNT)

        return engine, step

    yield made
    if dist.is_initialized():
        dist.destroy_process_group()


def memory_in_tables(engine):
    """Bytes of what the tables of all schedules that are kept refer to."""
    stages = [stage for made in engine.pipeline._kept.values() for stage in made.stages]
    rows = [row for stage in stages for table in (stage.args_recv_info, stage.grad_recv_info) for row in table.values()]
    buffers = [info.buffer for row in rows for info in row if getattr(info, "buffer", None) is not None]
    assert buffers
    return sum(buffer.untyped_storage().nbytes() for buffer in buffers)


@pytest.mark.parametrize(("schedule", "place", "most"), [
    ("gpipe", 0, 1), ("gpipe", 1, COUNT + 1), ("gpipe", 3, COUNT),
    ("1f1b", 0, 1), ("1f1b", 1, 3 + 1), ("1f1b", 2, 2 + 1), ("1f1b", 3, 1),
])  # fmt: skip
def test_as_much_is_received_as_is_in_flight_and_nothing_is_kept(rank, schedule, place, most):
    engine, step = rank(schedule, place)
    for length in (LENGTH, LENGTH, LENGTH + 2, LENGTH):
        engine.arena.reset_peaks()
        step(length)
        assert engine.arena.live("received") == 0
        assert memory_in_tables(engine) == 0
    assert engine.arena.peak("received") == most * HIDDEN


def in_flight(engine, place):
    """The most hidden states and gradients that came from other ranks, from the work that reads them to the last."""
    owners, kept, most = engine.pipeline._owners, 0, 0
    for kind, chunk, _ in engine.pipeline.recorded:
        came = chunk > 0 and owners[chunk - 1] != place
        comes_back = chunk + 1 < len(owners) and owners[chunk + 1] != place
        kept += came * (kind == "F") + comes_back * (kind in "BI")
        most = max(most, kept)
        kept -= (came + comes_back) * (kind in "BW")
    assert kept == 0
    return most


@pytest.mark.parametrize(("schedule", "place"), [("interleaved", 1), ("zero-bubble", 2), ("zbv", 1), ("zbv", 3)])
def test_looped_schedules_receive_one_of_each_kind_early_and_keep_nothing(rank, schedule, place):
    engine, step = rank(schedule, place)
    for length in (LENGTH, LENGTH + 2, LENGTH):
        engine.arena.reset_peaks()
        step(length)
        assert engine.arena.live("received") == 0
        assert memory_in_tables(engine) == 0
    most = in_flight(engine, place)
    assert most > 3
    assert most * HIDDEN <= engine.arena.peak("received") <= (most + 2) * HIDDEN


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_graphs_that_are_not_collected_yet_hold_no_hidden_state_and_senders_their_gradients(rank, schedule):
    """The last rank receives hidden states alone, the first one gradients, which may be on their way to another chunk."""
    for place, held in ((PP - 1, 0), (0, HIDDEN)):
        engine, step = rank(schedule, place)
        borrow, lent = engine.arena.borrow, []

        def noted(category, *given, borrow=borrow, lent=lent):
            tensor = borrow(category, *given)
            lent.extend([tensor] * (category == "received"))
            return tensor

        engine.arena.borrow = noted
        step()
        assert [tensor.untyped_storage().nbytes() for tensor in lent] == [held] * COUNT
        dist.destroy_process_group()


def watched(engine, step):
    """Of a step: the work whose messages were started here and not by torch, and how many of them are left at its end."""
    step()
    sends, started, left = engine.pipeline._made.sends, [], []
    send, finish = sends.send, sends.finish

    def noted(work, operations):
        started.extend([work] * bool(operations))
        send(work, operations)

    def at_the_end():
        left.append(sum(map(len, sends._under_way.values())))
        finish()

    sends.send, sends.finish = noted, at_the_end
    step()
    return started, left


@pytest.mark.parametrize(("schedule", "place", "forwards", "backwards", "kept"), [
    ("gpipe", 0, COUNT, 0, 0), ("gpipe", 2, COUNT, COUNT, COUNT),  # nothing tells that a gradient has arrived
    ("1f1b", 0, 3, 0, 0), ("1f1b", 2, 1, 0, 0), ("1f1b", 3, 0, 0, 0),  # the others go with a receive, by torch
])  # fmt: skip
def test_what_was_sent_is_let_go_in_the_step(rank, schedule, place, forwards, backwards, kept):
    started, left = watched(*rank(schedule, place))
    assert sorted(started) == [
        *(Work(False, place, k) for k in range(forwards)), *(Work(True, place, k) for k in range(backwards)),
    ]  # fmt: skip
    assert left == [kept]


@pytest.mark.parametrize("schedule", ["zero-bubble", "zbv"])
def test_looped_schedules_keep_to_the_end_only_what_was_sent_near_it(rank, schedule):
    engine, step = rank(schedule, 1)
    started, left = watched(engine, step)
    unknown = [work for work in started if work.backward and work not in engine.pipeline._made.sends._acknowledgements]
    assert len(started) == 4 * COUNT
    assert left == [len(unknown)]
    assert 0 < len(unknown) < 2 * COUNT
