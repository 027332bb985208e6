"""New weights of stages 1 and 2 that `train_batch(wait=False)` leaves on their way: read, dropped, or the last."""

import gc
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import VOCAB, batch, bits, net
from torch import nn

import zero3d

LATE = 0.5  # seconds that rank 1 needs for an update: its weights are not there yet when rank 0 goes on (stage 0: none)


class Late(torch.optim.AdamW):
    """Updates late on rank 1."""

    def step(self, closure=None):
        time.sleep(LATE * dist.get_rank())
        return super().step(closure)


def sum_of(output, _):
    return output.float().square().sum(), float(output.numel())


def engine_of(stage, model=None, **options):
    optimizer = Late if stage else torch.optim.AdamW  # at stage 0 nobody sends weights
    return zero3d.Engine(
        model or net(width=96), stage=stage, loss=sum_of, optimizer=optimizer, **({"precision": "bf16"} | options)
    )


def on_their_way(engine):
    return any(unit.weights.pending for unit in engine.units)


def averages(stage, precision):
    """Averages of weights between steps, by hand; whether there was anything to wait for."""
    engine, waited = engine_of(stage, precision=precision), []
    averages = [p.detach().clone() for p in engine.module.parameters()]
    for step in range(2):
        engine.train_batch([batch(step, dist.get_rank())], wait=False)
        waited.append(on_their_way(engine))
        torch._foreach_lerp_(averages, [p.detach() for p in engine.module.parameters()], 0.5)
        assert not on_their_way(engine)
    return waited, bits(averages)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.long), "fp32"])  # there masters are sent
def test_a_caller_who_reads_parameters_between_steps_finds_the_new_ones(ranks, precision):
    results = {stage: ranks(2, averages, stage, precision) for stage in (0, 1, 2)}
    assert len({found for result in results.values() for _, found in result}) == 1
    assert {stage: {any(waited) for waited, _ in result} for stage, result in results.items()} == {
        0: {False}, 1: {True}, 2: {True},
    }  # fmt: skip


def what_else_reads(stage, folder):
    """A bare step, a checkpoint that is loaded, an evaluation and an export, each after `train_batch`."""
    rank, engine, found = dist.get_rank(), engine_of(stage), []

    def train(step):
        engine.train_batch([batch(step, rank)], wait=False)
        assert on_their_way(engine) is (stage == 1)

    train(0)
    found.append(float(engine.evaluate([batch(9, rank)])))
    train(1)
    engine.save(Path(folder) / str(stage))
    train(2)
    engine.load(Path(folder) / str(stage))
    train(3)
    engine.backward(engine(batch(4, rank)).float().square().mean())
    assert engine.step().applied
    assert not on_their_way(engine)
    train(5)
    with engine.full_params():
        found.append(bits(engine.module.parameters()))
    train(6)
    return [*found, engine.fingerprint(), bits(engine.module.state_dict().values())]


def test_every_method_finds_the_new_weights(ranks, tmp_path):
    results = [result for stage in (0, 1) for result in ranks(2, what_else_reads, stage, str(tmp_path))]
    assert all(result == results[0] for result in results)


def dropped(stage):
    """Engines that are dropped with weights on their way, by the garbage collector on one rank, and one that is not."""
    rank = dist.get_rank()
    for step in range(3):
        engine = engine_of(stage)
        engine.train_batch([batch(step, rank)], wait=False)
        assert on_their_way(engine)
        if rank == step % 2:
            del engine
            gc.collect()
    engine = engine_of(stage)
    for step in range(2):
        engine.train_batch([batch(step, rank)], wait=False)
    return bits(engine.module.parameters())


def test_a_dropped_engine_takes_nothing_from_its_peers(ranks):
    assert len(set(ranks(2, dropped, 1))) == 1


def compiled(stage, what):
    """A model that its user compiled himself, after the engine was built."""
    engine = engine_of(stage)
    for module in [engine.module] if what == "model" else engine.module.layers:
        module.compile(backend="eager")
    for step in range(3):
        engine.train_batch([batch(step, dist.get_rank())], wait=False)
        assert on_their_way(engine) is (stage == 1)
    return bits(engine.module.parameters())


@pytest.mark.long
@pytest.mark.parametrize("what", ["blocks", "model"])
def test_compiled_modules_find_the_new_weights(ranks, what):
    assert len({found for stage in (0, 1) for found in ranks(2, compiled, stage, what)}) == 1


class Attentive(nn.Module):
    """Has torch's own encoder, which looks whether it may take a faster path before its layers are called."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.embed = nn.Embedding(VOCAB, 96)
        layer = nn.TransformerEncoderLayer(96, 4, 192, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, ids):
        padded = torch.arange(ids.shape[1]).expand(ids.shape) >= 4
        return self.encoder(self.embed(ids), src_key_padding_mask=padded)


def evaluations(stage):
    engine = engine_of(stage, Attentive(), precision="fp32")
    engine.train_batch([batch(0, dist.get_rank())], wait=False)
    return [float(engine.evaluate([batch(0, dist.get_rank())])) for _ in range(2)]


def test_an_evaluation_takes_the_path_that_it_would_take_without_waiting(ranks):
    results = [result for stage in (0, 1) for result in ranks(2, evaluations, stage)]
    assert len({loss for result in results for loss in result}) == 1


def train_alone(stage):
    engine = engine_of(stage)
    engine.train_batch([batch(0, dist.get_rank())])
    aliases = [p.data for p in engine.module.parameters()]
    engine.train_batch([batch(1, dist.get_rank())])
    return on_their_way(engine), bits(aliases)


def test_weights_are_there_when_train_batch_returns_unless_asked_otherwise(ranks):
    (waits, found), *others = [result for stage in (1, 2, 0) for result in ranks(2, train_alone, stage)]
    assert others == [(waits, found)] * 5
    assert not waits


LAST = """
import sys, time
sys.path.insert(0, {tests!r})
import torch, torch.distributed as dist, zero3d
from models import batch, bits, net
from ranks.test_new_weights import engine_of, on_their_way
torch.set_num_threads(1)
zero3d.Mesh()
engine = engine_of(1)
engine.train_batch([batch(0, dist.get_rank())], wait=False)
assert on_their_way(engine)
if dist.get_rank():
    with open({out!r}, "w") as out:
        out.write(bits(engine.module.parameters()))
elif {destroys}:
    dist.destroy_process_group()
"""


@pytest.mark.long
@pytest.mark.parametrize("destroys", [False, True])
def test_a_rank_that_ends_after_its_last_step_leaves_its_peers_their_weights(ranks, tmp_path, destroys):
    script, out = tmp_path / "last.py", tmp_path / "out"
    script.write_text(LAST.format(tests=str(Path(__file__).parents[1]), out=str(out), destroys=destroys))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=300)
    assert out.read_text() == ranks(2, weights_after_one_step)[1]


def weights_after_one_step():
    engine = engine_of(0)
    engine.train_batch([batch(0, dist.get_rank())])
    return bits(engine.module.parameters())
