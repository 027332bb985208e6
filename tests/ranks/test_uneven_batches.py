"""Ranks with different numbers of batches are refused before they wait for each other, or named when they do."""

import os
import socket
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from models import net

import zero3d
from zero3d.distributed.axis import Axis, say_ended
from zero3d.distributed.mesh import PATIENCE, TIMEOUT, WATCHED, _patience
from zero3d.errors import ConfigError, MeshError, Zero3dError
from zero3d.watchdog.heartbeat import WATCH


def batches(count):
    ids = torch.arange(10).view(2, 5)
    return [{"ids": ids} for _ in range(count)]


def sum_of(output, batch):
    return output.float().pow(2).sum(), torch.tensor(float(output.shape[0]))


def engine_of(stage=3, **options):
    return zero3d.Engine(net(), stage=stage, precision="fp32", loss=sum_of, **options)


def uneven(counts):
    """What each way to pass counts[rank] batches raises, and the loss of as many afterwards."""
    engine, mine = engine_of(), counts[dist.get_rank()]
    said = []
    for call in (
        lambda: engine.train_batch(batches(mine)), lambda: engine.evaluate(batches(mine)),
        lambda: engine.evaluate(batch for batch in batches(mine)),
        lambda: engine.evaluate(batches(mine) if dist.get_rank() else iter(batches(mine))),
    ):  # fmt: skip
        try:
            said.append(f"{float(call())}")
        except ConfigError as error:
            said.append(str(error))
    return said, float(engine.evaluate(iter(batches(2)))), float(engine.train_batch(batches(2)))


def test_all_ranks_are_told_who_has_no_more(ranks):
    for said, evaluated, trained in ranks(2, uneven, (3, 1)):
        assert [text.split(", and")[0] for text in said] == ["rank 1 has no more batches after 1"] * 4
        assert [text.split(", and ")[1].split(":")[0] for text in said] == ["others have up to 3"] * 2 + [
            "others have more"
        ] * 2
        assert evaluated == pytest.approx(trained)


def test_equal_numbers_are_let_through(ranks):
    for said, *_ in ranks(2, uneven, (2, 2)):
        assert len({float(text) for text in said[1:]}) == 1


@pytest.mark.parametrize("given", ["", "12.5"])
def test_a_wait_has_an_end(monkeypatch, given):
    monkeypatch.setenv(TIMEOUT, given)
    monkeypatch.delenv(WATCH, raising=False)
    assert _patience("gloo").total_seconds() == (12.5 if given else PATIENCE.total_seconds())
    monkeypatch.setenv(WATCH, "/somewhere")
    assert _patience("gloo").total_seconds() == (12.5 if given else WATCHED.total_seconds())


@pytest.mark.parametrize("given", ["0", "-3", "soon", "nan", "1e999"])
def test_a_time_that_is_none_is_refused(monkeypatch, given):
    monkeypatch.setenv(TIMEOUT, given)
    with pytest.raises(MeshError, match=f"{TIMEOUT}='{given}' is not a number of seconds"):
        _patience("gloo")


SCRIPT = """
import torch, zero3d
engine = zero3d.Engine(torch.nn.Linear(3, 3), stage=3, precision="fp32")
for _ in range(3 - engine.mesh.rank):
    engine.backward(engine(torch.ones(2, 3)).mean())
    engine.step()
"""


def closed():
    raise RuntimeError("Connection closed by peer")


def lost(ended):
    """What rank 0 hears where a peer closed its connections, having said before that it ended, or not."""
    if dist.get_rank() == 1 and ended:
        say_ended()
    dist.barrier()
    try:
        Axis("dp", dist.get_rank(), 2).guarded("all_gather", "head", closed, 1 - dist.get_rank())
    except Zero3dError as error:
        return str(error)


def test_a_peer_that_ended_is_told_from_one_that_failed(ranks):
    told, _ = ranks(2, lost, True)
    assert (
        "for rank 1 of that axis in all_gather of unit 'head' when a peer went away: rank 1 has no more batches" in told
    )
    told, _ = ranks(2, lost, False)
    assert "look at the first rank that failed" in told


@pytest.mark.long
def test_a_rank_that_ended_is_named_by_those_that_wait(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen([sys.executable, "-c", SCRIPT], env=os.environ | shared | {"RANK": str(rank)}, text=True,
                         stderr=subprocess.PIPE)
        for rank in range(2)
    ]  # fmt: skip
    told = [process.communicate(timeout=120)[1] for process in started]
    assert [process.returncode for process in started] == [1, 0]
    assert "rank 1 has no more batches, and ended without an error" in told[0]


@pytest.mark.long
def test_a_branch_that_one_rank_takes_ends_with_its_unit_named(ranks):
    with pytest.raises(Exception, match=r"waited .*for rank [01] of that axis in (all_gather|reduce_scatter) of unit"):
        ranks(2, branches, group_timeout=5.0)


def branches():
    class Either(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(3, 3)) for _ in range(2))

        def forward(self, x):
            return self.parts[dist.get_rank()](x)

    engine = zero3d.Engine(Either(), stage=3, precision="fp32", units=["parts.*"])
    engine.backward(engine(torch.ones(2, 3)).mean())
