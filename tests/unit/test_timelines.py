"""What streams' operations take, by the clocks of the race model: compute waits for nothing that it does not need yet."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from meshes import engine_of, micro_batches
from models import adamw
from tensors import tiny
from torch import nn

import zero3d

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from instruments import planted
from instruments.durations import COMPUTE, Machine
from instruments.races import Event, Model, Stream, alone_in, collectives_of, lonely_mesh, modelled

COPY, USE = 3.0, 10.0  # seconds


class Lanes:
    """A side stream that copies units, and compute, which uses them; other memory is nobody's."""

    def __init__(self):
        self.model = Model(Machine(memory=1.0))
        self.side, self.compute = Stream(self.model, "side"), Stream(self.model, COMPUTE)
        self.units = {name: torch.zeros(4) for name in "abc"}
        self.ends = {}

    def copy(self, name):
        self.model.run(f"copy {name}", [], [self.units[name]], "side", COPY)
        self.ends[name] = Event(self.model)
        self.ends[name].record(self.side)

    def use(self, *names, seconds=USE):
        self.model.run(f"use {''.join(names)}", [self.units[name] for name in names], [], COMPUTE, seconds)

    def superfluous(self):
        return [(found.operation, found.seconds, found.before) for found in self.model.timeline.superfluous]


def test_operations_begin_when_their_stream_and_what_it_waits_for_are_over():
    lanes = Lanes()
    lanes.copy("a")
    lanes.copy("b")
    lanes.compute.wait_event(lanes.ends["a"])
    lanes.use("a")
    lanes.side.wait_stream(lanes.compute)
    lanes.copy("c")
    lanes.compute.wait_event(lanes.ends["c"])
    lanes.use("c", seconds=1.0)
    timeline = lanes.model.timeline
    path = [(done.operation, done.start, done.end) for done in timeline.critical_path()]
    assert path == [("copy a", 0, 3), ("use a", 3, 13), ("copy c", 13, 16), ("use c", 16, 17)]
    assert timeline.makespan == 17
    assert (timeline.busy("side"), timeline.idle("side"), timeline.idle()) == (9, 8, 6)
    assert (timeline.busy("side", since=5), timeline.idle(since=14)) == (4, 2)
    assert timeline.shares() == {"side": 6, COMPUTE: 11}


def test_a_wait_for_more_than_is_needed_next_is_superfluous_by_what_it_costs():
    lanes = Lanes()
    for name in "abc":
        lanes.copy(name)
    lanes.compute.wait_stream(lanes.side)  # for a, b and c
    lanes.use("a")
    lanes.compute.wait_event(lanes.ends["b"])  # is over: no wait
    lanes.use("b")
    lanes.use("c")
    assert lanes.superfluous() == [("copy c", 6.0, "use a")]


def test_what_is_needed_before_the_next_wait_and_what_costs_no_time_is_not_superfluous():
    lanes = Lanes()
    for name in "ab":
        lanes.copy(name)
    lanes.compute.wait_stream(lanes.side)
    lanes.use("a")
    lanes.use("b")
    lanes.copy("c")  # is over long before compute gets there, which never uses it
    lanes.compute.wait_stream(lanes.side)
    lanes.use("a")
    assert lanes.superfluous() == []


def test_compute_that_has_little_to_do_before_it_needs_the_rest_loses_no_more_than_that():
    lanes = Lanes()
    for name in "ab":
        lanes.copy(name)
    lanes.compute.wait_stream(lanes.side)
    lanes.use("a", seconds=0.5)
    lanes.copy("c")
    lanes.compute.wait_event(lanes.ends["c"])
    lanes.use("b", "c")
    assert lanes.superfluous() == [("copy b", 0.5, "use a")]


def test_memory_that_comes_back_is_a_reason_to_wait_unless_a_side_stream_had_it_alone():
    for shared in (True, False):
        lanes = Lanes()
        lanes.copy("a")
        bucket, read = torch.zeros(4), Event(lanes.model)
        lanes.model.run("fill", [], [bucket], COMPUTE if shared else "side", 0.0)
        lanes.side.wait_stream(lanes.compute)
        lanes.model.run("send", [bucket], [], "side", COPY)
        read.record(lanes.side)
        lanes.compute.wait_event(read)
        lanes.model.free(bucket.untyped_storage())
        lanes.use("a")
        lanes.compute.wait_stream(lanes.side)
        assert bool(lanes.superfluous()) is not shared


def of_gathers(faults, **options):
    """The timeline of three steps of a Llama of 6 blocks at stage 3 over 4 ranks."""
    with alone_in(4), collectives_of(Model()):
        engine = engine_of(
            tiny("llama", layers=6, intermediate_size=128), lonely_mesh(4), stage=3, precision="bf16", optimizer=adamw,
            accumulate=1, **options,
        )  # fmt: skip
        with modelled(engine) as model, faults():
            for number in range(2):
                engine.train_batch(micro_batches(number, 1), wait=False)
            engine.evaluate(micro_batches(0, 2))
    assert not model.races
    return model.timeline


@pytest.mark.parametrize("options", [
    {},
    *(pytest.param(options, marks=pytest.mark.long) for options in (
        {"weight_shards": "cast"}, {"gather_wire": "int8"}, {"gather_wire": "int8", "second_shard": 2}, {"release": "every_step"}, {"exact": True},
    )),
], ids=str)  # fmt: skip
def test_compute_waits_for_no_unit_that_is_gathered_ahead(options):
    assert of_gathers(nullcontext, **options).superfluous == []


def test_waits_for_codes_of_units_that_are_gathered_ahead_are_found():
    timeline = of_gathers(planted.tail_joined, gather_wire="int8")
    assert len([found for found in timeline.superfluous if found.stream == "gather"]) > 10


def from_the_host(faults, layers, ranks, places, resident=False):
    """Superfluous waits, and how much of the second micro-batch of a step compute is idle and weights are copied.

    As on an H100 that trains on 131,072 tokens a step, copies of all weights take three fifths of what computing takes.
    """
    from instruments import accelerator
    from instruments.host_races import AcceleratedMesh, on_accelerator

    device = accelerator.register()
    with alone_in(ranks), on_accelerator() as model, getattr(planted, faults, nullcontext)():
        timeline = model.timeline
        timeline.machine = Machine(host=3e10, memory=1e13)
        engine = engine_of(
            tiny("llama", layers=layers, intermediate_size=128), AcceleratedMesh(model, ranks), stage=3,
            precision="bf16", optimizer=adamw, offload={"optimizer": "host", "executor": "device", **places},
        )  # fmt: skip

        def given(number):
            return [{key: values.to(device) for key, values in each.items()} for each in micro_batches(number, 2)]

        engine.train_batch(given(0), wait=False)
        for last in given(1):
            since = timeline.makespan
            engine.backward(engine(**last).loss)
        whole = timeline.makespan - since
        assert not model.races
        engine.release()
        return (
            [found.operation for found in timeline.superfluous], timeline.idle(since=since) / whole,
            timeline.busy("SideStream gather 0", since) / whole,
        )  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize(("layers", "ranks", "places"), [
    (4, 1, {"params": "host"}), pytest.param(8, 1, {"params": "host"}, marks=pytest.mark.long),
    pytest.param(4, 4, {"params": "host"}, marks=pytest.mark.long),
])  # fmt: skip
def test_weights_of_the_host_come_while_compute_works(alone, layers, ranks, places):
    superfluous, idle, copies = alone(from_the_host, "", layers, ranks, places)
    assert superfluous == []
    if ranks == 1:
        assert copies > 0.4
        assert idle < 0.2


@pytest.mark.long
def test_waits_for_copies_of_units_that_are_gathered_ahead_are_found(alone):
    superfluous, idle, _ = alone(from_the_host, "tail_joined", 4, 1, {"params": "host"})
    assert superfluous.count("aten::copy_") > 10
    assert idle > 0.3


class Block(nn.Module):
    """A block whose weights are used so many times."""

    def __init__(self, inner, times):
        super().__init__()
        self.up, self.down, self.times = nn.Linear(32, inner), nn.Linear(inner, 32), times

    def forward(self, x):
        for _ in range(self.times):
            x = x + self.down(torch.relu(self.up(x)))
        return x


class Uneven(nn.Module):
    """Two blocks with little to gather and much to compute, then one with much to gather; three times."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Block(*((1024, 1) if number % 3 == 2 else (64, 8))) for number in range(9))
        self.head = nn.Linear(32, 32)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def idle_of_uneven(faults):
    """How much of a step compute is idle."""
    with alone_in(4), collectives_of(Model()):
        engine = zero3d.Engine(Uneven(), mesh=lonely_mesh(4), stage=3, precision="bf16", optimizer=adamw)
        with modelled(engine) as model, faults():
            for _ in range(2):
                since = model.timeline.makespan
                engine.backward(engine(torch.ones(16, 32, dtype=torch.bfloat16)).float().square().mean())
                engine.step()
    assert not model.races
    return model.timeline.idle(since=since) / (model.timeline.makespan - since)


def test_two_gathers_ahead_and_two_reductions_in_flight_hide_uneven_blocks_and_one_does_not():
    assert idle_of_uneven(nullcontext) < 0.13
    assert idle_of_uneven(planted.window_of_one) > 0.16


@pytest.mark.parametrize("fault", [
    "bucket_given_back_early",
    *(pytest.param(fault, marks=pytest.mark.long) for fault in ("join_dropped", "given_back_at_once")),
])  # fmt: skip
def test_what_is_given_back_or_read_too_early_is_a_race(fault):
    with alone_in(4), collectives_of(Model()):
        engine = engine_of(tiny("llama"), lonely_mesh(4), stage=3, precision="bf16", optimizer=adamw, accumulate=1)
        with modelled(engine) as model, getattr(planted, fault)():
            for number in range(2):
                engine.train_batch(micro_batches(number, 1), wait=False)
    assert model.races
