"""zero3d simulate: results as JSON, micro-batches that repeat, orders of pipelines, 1024 ranks, refusals."""

import json
import os
from array import array
from contextlib import chdir
from dataclasses import replace
from fractions import Fraction
from tempfile import TemporaryFile
from threading import Event
from types import SimpleNamespace
from unittest import mock

import pytest
import torch.distributed as dist

from zero3d.config import load, to_dict
from zero3d.config.sections import Plan
from zero3d.distributed.degrees import Degrees
from zero3d.pipeline.actions import Action, bubble
from zero3d.spec.text import binary, size
from zero3d.tools.cli.main import main
from zero3d.tools.cli.progress import STOPPED
from zero3d.tools.cli.simulate import Room, cards_of, show_done
from zero3d.tools.sim import rank as answering
from zero3d.tools.sim.memory import Log, Storage
from zero3d.tools.sim.orders import one_chunk
from zero3d.tools.sim.position import Position
from zero3d.tools.sim.rank import dry_run
from zero3d.tools.sim.repeats import micro_batches_to_run, traffic_of_all
from zero3d.tools.sim.replay import peak_of, timeline_of
from zero3d.tools.sim.request import Request
from zero3d.tools.sim.result import Instant, LiveTensor, Simulation, TrafficEntry, from_json, to_json
from zero3d.tools.sim.simulate import Interrupted, in_own_process, representatives, simulate

TINY = ["data.length=64", "train.micro_batch=2", "data.packing=false"]


def tiny(*overrides):
    return load(None, [*TINY, *overrides])


def dry(request):
    return dry_run(load(request.config), request.rank, request.world, request.backend, request.whole, request.per_host)


def in_this_process(request):
    """Only for what is refused before a step."""
    if dist.is_initialized():  # another test's, of one process
        dist.destroy_process_group()
    return dry(request)


def save_config(folder, blocks):
    """Describe a model of so many blocks in a folder; return the words for it."""
    config = {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": blocks,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return [f"model.path={folder}", "model.init=random"]


def answer(text):
    """What `python -m zero3d.tools.sim.rank` says to a request, without its start."""
    with TemporaryFile("w+") as output:
        os.dup2(output.fileno(), 1)
        answering.main([text])
        output.seek(0)
        return output.read()


@pytest.fixture(scope="module")
def pipeline(alone, tmp_path_factory):
    """A pipeline of two stages over 1024 ranks: one rank of each class."""

    def run(command, input, **_):
        assert command[-2:] == ["-m", answering.__name__]
        return SimpleNamespace(stdout=alone(answer, input))

    model = save_config(tmp_path_factory.mktemp("two_blocks"), blocks=2)
    with mock.patch("zero3d.tools.sim.simulate.subprocess", SimpleNamespace(run=run)):
        return simulate(tiny(*model, "mesh.pp=2", "train.accumulate=3", "zero.stage=0"), world=1024)


def test_1024_ranks_need_one_process_per_class(pipeline):
    assert [rank.pp for rank in pipeline.ranks] == sorted(rank.pp for rank in pipeline.ranks)
    assert sum(rank.stands_for for rank in pipeline.ranks) == 1024
    assert {rank.rank for rank in pipeline.ranks} >= set(representatives(Degrees(2, 512, 1))) == {0, 512}
    for rank in pipeline.ranks:
        assert all(state.held == state.formula for state in rank.states)
        assert rank.peak.nbytes == sum(rank.peak.categories.values()) == max(map(sum, rank.timeline.rows))
        assert [t.nbytes for t in rank.peak.largest] == sorted((t.nbytes for t in rank.peak.largest), reverse=True)
        assert rank.resident < 1.5e9


def test_a_result_survives_json(pipeline):
    assert from_json(Simulation, json.loads(json.dumps(to_json(pipeline)))) == pipeline


@pytest.mark.long
def test_a_started_process_answers_as_one_in_a_fork_does(alone):
    request = Request(to_dict(tiny("mesh.pp=2", "train.accumulate=2", "zero.stage=0")), 0, 2, "nccl")
    started, forked = in_own_process(request), alone(dry, request)
    assert replace(started, seconds=0, resident=0) == replace(forked, seconds=0, resident=0)


def test_the_recorded_actions_begin_as_planned(pipeline):
    first = pipeline.ranks[0]
    assert first.orders[0][:3] == first.actions[:3]


def test_1f1b_waits_p_minus_1_over_m():
    order = {s: [Action(d.kind, d.chunk, d.micro_batch) for d in one_chunk(s, 3 - s, 8)] for s in range(4)}
    assert bubble(order) * 8 == 3


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "run"),
    [(None, 1, 2, (2, 2)), (None, 1, 64, (2, 3)), ("1f1b", 8, 32, (8, 9)), ("gpipe", 8, 32, (32, 32)),
     ("interleaved", 4, 32, (8, 16)), ("zero-bubble", 4, 18, (18, 18)), ("zbv", 2, 8, (8, 8)), ("zbv", 2, 9, (4, 8))],
)  # fmt: skip
def test_how_many_micro_batches_are_run(schedule, pp, micro_batches, run):
    assert micro_batches_to_run(schedule, pp, micro_batches, stage=3) == run
    assert micro_batches_to_run(schedule, pp, micro_batches, stage=2) == (0, run[1])


def sent(calls, op="all_gather", axis="dp"):
    return TrafficEntry(op, axis, "layers.0", calls, 100 * calls, 200 * calls)


def test_traffic_of_ten_micro_batches_follows_from_that_of_two_and_three():
    """One call for the step and four for each micro-batch; of a step of none all are in proportion, or once."""
    assert traffic_of_all([sent(9)], [sent(13)], (2, 3), 10, "every_micro_batch") == (sent(41),)
    assert traffic_of_all([sent(9)], [sent(13)], (2, 3), 3, "every_micro_batch") == (sent(13),)
    of_three = [sent(12, "all_reduce", "tp"), sent(1), sent(3, "reduce_scatter"), sent(2, "exchange", "pp")]
    for reduced, reductions in (("every_micro_batch", 10), ("every_step", 3)):
        found = traffic_of_all([], of_three, (0, 3), 10, reduced)
        assert found == (sent(40, "all_reduce", "tp"), sent(1), sent(reductions, "reduce_scatter"), of_three[-1])


def test_what_experts_do_once_per_step_over_edp_is_not_counted_per_micro_batch():
    of_three = [sent(1, axis="edp"), sent(1, "reduce_scatter", "edp"), sent(6, "pass_rows", "ep")]
    found = traffic_of_all([], of_three, (0, 3), 12, "every_step")
    assert found == (*of_three[:2], sent(24, "pass_rows", "ep"))


def test_the_peak_has_what_its_last_event_made_and_not_what_is_gone_or_comes_later():
    born = Position("forward", 0, 0, "layers.0")
    storages = [
        Storage(size, category, (size,), "uint8", born, padding)
        for size, category, padding in (
            (100, "parameters", Fraction(4)), (50, "wire", Fraction(0)), (60, "activations", Fraction(0)),
            (30, "temporary", Fraction(0)), (20, "temporary", Fraction(0)),
        )
    ]  # fmt: skip
    events = [(0, 100), (1, 50), (1, -50), (2, 60), (3, 30), (2, -60), (4, 20)]
    who, changes = (array("q", column) for column in zip(*events, strict=True))
    log = Log(storages, who, changes, [(0, born)], peak=190, peak_event=4, peak_position=born)
    peak = peak_of(log)
    held = {"parameters": 96, "padding": 4, "activations": 60, "temporary": 30}
    assert {name: size for name, size in peak.categories.items() if size} == held
    at = Instant("forward", 0, 0, "layers.0")
    assert peak.largest == tuple(
        LiveTensor(size, category, "uint8", (size,), at)
        for size, category in ((100, "parameters"), (60, "activations"), (30, "temporary"))
    )
    assert [sum(row) for row in timeline_of(log).rows] == [100, 150, 100, 160, 190, 130, 150]


@pytest.mark.long
@pytest.mark.parametrize(("overrides", "micro_batches"), [
    (["zero.stage=3", "mesh.dp=2"], 6), (["zero.stage=2", "mesh.dp=2", "activations=full"], 6),
    (["zero.stage=0", "mesh.tp=2"], 6), (["zero.stage=1", "mesh.pp=2"], 6), (["zero.stage=1", "mesh.pp=4"], 8),
    (["zero.stage=3", "mesh.pp=2"], 6), (["zero.stage=2", "mesh.pp=2", "mesh.schedule=gpipe"], 4),
    (["zero.stage=0", "mesh.pp=2", "mesh.schedule=interleaved"], 10), (["zero.stage=1", "mesh.pp=2", "mesh.schedule=zbv"], 10),
    (["zero.stage=2", "mesh.pp=2", "mesh.schedule=zero-bubble"], 10), (["zero.stage=3", "mesh.pp=2", "mesh.schedule=zbv"], 10),
], ids=str)  # fmt: skip
def test_micro_batches_that_are_not_run_change_nothing(alone, tmp_path, overrides, micro_batches):
    in_pipeline = any("mesh.pp" in word for word in overrides)
    world, blocks = (4, 4) if in_pipeline else (2, 2)  # two parts a rank for any schedule
    config = tiny(*save_config(tmp_path, blocks), f"train.accumulate={micro_batches}", *overrides)
    some, every = (alone(dry, Request(to_dict(config), 0, world, "nccl", whole)) for whole in (False, True))
    assert (some.traffic, some.work, some.states) == (every.traffic, every.work, every.states)
    kept = every.peak.nbytes - some.peak.nbytes
    assert abs(kept) <= 8 * (4 + 8 + 8)  # of a micro-batch: its loss, its weight, and that as the boundary adds it up


@pytest.mark.parametrize(("words", "said"), [
    (["--rank", "9"], "rank 9 is not there: pp 1 x dp 2 x tp 1 has ranks 0 to 1"),
    (["mesh.tp=3", "mesh.dp=1"], "ConfigError"),
    (["offload.optimizer=auto"], "offload.optimizer=auto depends on the memory of the machine that a run starts on"),
    (["mesh.pp=3", "mesh.dp=1"], "2 ranks cannot form"),
    (["model.path=nowhere"], "not a folder, a config.json"),
    (["train.batch=3"], "not a multiple of"),
    (["--backend", "smoke"], "pass one of nccl, gloo"),
    (["--nodes", "3"], "2 ranks on 3 nodes: pass --nodes as a divisor of the ranks"),
    (["mesh.pp=2", "train.accumulate=1"], "needs a micro-batch for each of 2 pipeline stages"),
])  # fmt: skip
def test_bad_input_is_one_line(capsys, monkeypatch, words, said):
    monkeypatch.setattr("zero3d.tools.sim.simulate.in_own_process", in_this_process)
    monkeypatch.setattr("zero3d.tools.sim.simulate.AT_ONCE", 1)  # a process has one set of stand-ins
    world = ["--ranks", "3" if "mesh.tp=3" in words else "2"]
    assert main(["simulate", *TINY, *world, *words]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert said in error or (said == "ConfigError" and error.startswith("ConfigError: "))


def test_a_simulation_is_of_the_cards_that_its_file_was_planned_for():
    config = replace(tiny(), plan=Plan(gpus=16, gpu="h100", nodes=4))
    assert cards_of(tiny(), 16, None, None) is None
    found = [cards_of(config, 16, None, None), cards_of(config, 8, None, None), cards_of(config, 16, "a6000", 2)]
    assert [(cards.gpu.name, cards.gpus, cards.hosts) for cards in found] == [
        ("h100", 16, 4), ("h100", 8, 1), ("a6000", 16, 2),
    ]  # fmt: skip
    assert cards_of(config, 64, "gb200", None).hosts == 16


def test_the_peak_is_compared_with_a_cards_memory():
    peaks = [SimpleNamespace(peak=SimpleNamespace(nbytes=nbytes)) for nbytes in (3 << 30, 40 << 30)]
    config = tiny("mesh.dp=2")
    room = Room.of(SimpleNamespace(ranks=peaks), config, cards_of(config, 2, "a6000", None))
    assert (room.alive, room.reserved) == (40 << 30, pytest.approx(2 << 30))
    assert room.communicators > 0
    assert room.shown == pytest.approx((42 << 30) + 0.6e9 + room.communicators)
    said = str(room)
    assert said.startswith(f"On a6000: {binary(room.shown)} of 48 GiB, {binary(room.memory - room.shown)} left: 40 GiB")
    small = str(room._replace(memory=float(24 << 30)))
    assert f"of 24 GiB, {binary(room.shown - (24 << 30))} too much" in small
    alone = Room.of(SimpleNamespace(ranks=peaks), config, cards_of(config, 2, "cpu", None))
    assert (alone.context, alone.communicators) == (0.0, 0.0)


@pytest.mark.long
def test_a_dry_run_has_the_dp_that_a_run_shrinks_to(alone):
    shrinks = tiny("mesh.dp=4", "health.min_ranks=1", "train.batch=8", "zero.stage=0")
    assert alone(dry, Request(to_dict(shrinks), 1, 2, "nccl")).alike == (0, 1)


@pytest.mark.long
def test_gradients_of_three_dp_ranks_a_host_are_summed_by_the_backend(alone, monkeypatch, tmp_path):
    width = {}

    def run(request):
        found = alone(dry, request)
        width[request.per_host] = {each.nbytes / each.elements for each in found.traffic if each.op == "reduce_scatter"}
        return found

    monkeypatch.setattr("zero3d.tools.sim.simulate.in_own_process", run)
    model = save_config(tmp_path, blocks=1)
    for nodes in (1, 2):
        simulate(tiny(*model, "zero.stage=2", "precision=bf16"), world=6, rank=0, nodes=nodes)
    assert width == {6: {2}, 3: {4}}


def test_tables_json_and_trace(capsys, tmp_path, pipeline, monkeypatch):
    monkeypatch.setattr("zero3d.tools.sim.simulate.simulate", lambda *_, **__: pipeline)
    trace = tmp_path / "trace.json"
    assert main(["simulate", *TINY, "--ranks", "1024", "--trace", str(trace)]) == 0
    text = capsys.readouterr().out
    assert "The peak of rank 512" in text
    assert "DIFFERS" not in text
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"C", "M", "X", "i"}
    assert main(["simulate", *TINY, "--ranks", "1024", "--json"]) == 0
    assert from_json(Simulation, json.loads(capsys.readouterr().out)) == pipeline


def dry_in(folder, request):
    with chdir(folder):
        return dry(request)


def test_a_module_of_ones_own(alone, tmp_path):
    """module:function, without weights: what it makes is never allocated."""
    source = (
        "import torch\nclass Lm(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.embed = torch.nn.Embedding(100, 1 << 14)\n        self.head = torch.nn.Linear(1 << 14, 100, bias=False)\n"
        "    def forward(self, input_ids):\n        return self.head(self.embed(input_ids))\ndef make():\n    return Lm()\n"
    )
    (tmp_path / "own.py").write_text(source)
    request = Request(to_dict(tiny("model.path=own:make", "mesh.dp=2")), 1, 2, "gloo")
    found = alone(dry_in, str(tmp_path), request)
    assert found.elements == 2 * 100 << 14
    assert found.peak.nbytes > found.elements * 2


def interrupted(pipeline, done):
    """Simulate the pipeline's two stages till so many ranks are done; then Ctrl-C comes, which ends the others."""
    stop, counts = Event(), []

    def run(request):
        if done and request.rank == pipeline.ranks[0].rank:
            return pipeline.ranks[0]
        stop.wait()
        raise RuntimeError("its process died")

    def watch(found, many):
        counts.append((len(found), many))
        if len(found) >= done:
            stop.set()
            raise KeyboardInterrupt

    config = tiny("mesh.pp=2", "train.accumulate=3", "zero.stage=0")
    with mock.patch("zero3d.tools.sim.simulate.in_own_process", run), pytest.raises(KeyboardInterrupt) as caught:
        simulate(config, world=1024, watch=watch)
    return caught.value, counts


def test_a_simulation_that_is_stopped_has_the_ranks_that_are_done(pipeline):
    error, counts = interrupted(pipeline, done=1)
    assert isinstance(error, Interrupted)
    assert [rank.rank for rank in error.simulation.ranks] == [0]
    assert error.simulation.notes[-1].startswith("stopped: 1 of 2 pipeline stages follow")
    assert counts[-1] == (1, 2)
    assert not isinstance(interrupted(pipeline, done=0)[0], Interrupted), "nothing to show"


def test_ctrl_c_prints_the_ranks_that_are_done(pipeline, monkeypatch, capsys):
    def stop(*_):
        raise Interrupted(pipeline)

    monkeypatch.setattr("zero3d.tools.sim.simulate.simulate", stop)
    assert main(["simulate", *TINY, "--ranks", "1024"]) == STOPPED
    assert "1. What each class of ranks holds" in capsys.readouterr().out


def test_who_is_done_is_a_line_on_a_terminal_and_a_line_each_elsewhere(pipeline, capsys):
    first, *more = pipeline.ranks
    shown = []
    line = SimpleNamespace(on_terminal=True, seconds=4.0, show=shown.append)
    show_done(line, [], 1024, [first], 4)
    assert shown == [f"1 of 4 ranks simulated, about 12 s left; the fullest so far: {size(first.peak.nbytes)}"]
    said = []
    for done in ([first], [first, *more]):
        show_done(SimpleNamespace(on_terminal=False), said, 1024, done, len(done))
    assert capsys.readouterr().err.count(" of 1024: ") == len(pipeline.ranks)
