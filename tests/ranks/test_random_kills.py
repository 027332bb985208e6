"""Kills at random moments of a run that saves after every step: no bit changes, and nothing that was saved is lost.

Two hundred, of the launcher, too: benchmarks/faults.py --parts kills.
"""

import os
import random
import signal
import sys
from pathlib import Path

import numpy
import pytest
import torch.distributed as dist
from pool import RankFailure
from training import metrics, save_model, save_rows, steady, train, tree

import zero3d
from zero3d.checkpoint.integrity import verify

# Kills and steps: a life takes at most two steps, and is killed in one of them, or in a save.
LENGTHS = [(1, 3), pytest.param(5, 11, marks=pytest.mark.long)]


def killed_at(made, moments=None):
    """Train from the newest checkpoint on; a rank with a moment is killed when it has made so many calls of functions.

    Calls count from the first step's beginning. Returns how many there were until the third one's: two steps and saves.
    """
    numpy.random.seed(dist.get_rank())  # whose state is saved, too, and which nobody else seeds
    original, calls, begun = zero3d.Engine.train_batch, 0, []
    moment = None if moments is None else moments[dist.get_rank()]

    def count(frame, event, _):
        nonlocal calls
        calls += event in ("call", "c_call")
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(*given, **named):
        begun.append(calls)
        sys.setprofile(count if len(begun) < 3 or moment else None)
        return original(*given, **named)

    zero3d.Engine.train_batch = counted
    try:
        train(made, "auto", planned=False)
    finally:
        zero3d.Engine.train_batch = original
        sys.setprofile(None)
    return begun[2]


def finished(made):
    """Train to the end from the newest checkpoint, or from the start if a kill came before any."""
    numpy.random.seed(dist.get_rank())
    train(made, "auto")


def left(made, steps):
    """What a run leaves that no kill may change: records, and the tensors of its last checkpoint."""
    # A session's first step tells peers its order of units, too.
    records = [steady(record, "traffic_bytes") for record in metrics(made)]
    last = Path(made["output"]) / "checkpoints" / f"step-{steps}"
    return records, {file.name: file.read_bytes() for file in last.glob("*.safetensors")}


@pytest.mark.long
@pytest.mark.parametrize(("kills", "steps"), LENGTHS)
def test_kills_at_random_moments_change_no_bit(ranks, tmp_path, kills, steps):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    sections = {"data": {"shuffle": True}, "train": {"steps": steps, "batch": 4, "accumulate": 2},
                "checkpoint": {"every": 1, "keep": 2, "export": False}}  # fmt: skip
    whole, made = tree(tmp_path, "whole", **sections), tree(tmp_path, "killed", **sections)
    calls, draw, newest = ranks(2, killed_at, whole), random.Random(3), 0
    for _ in range(kills):
        moments = [draw.randrange(1, each) for each in calls]
        spared = draw.randrange(3)  # 2: both are killed
        moments = [None if rank == spared else moment for rank, moment in enumerate(moments)]
        with pytest.raises(RankFailure, match="gave no answer"):
            ranks(2, killed_at, made, moments)
        saved = {int(path.name[5:]): path for path in (Path(made["output"]) / "checkpoints").glob("step-*")}
        for folder in saved.values():
            verify(folder)
        assert max(saved, default=0) >= newest
        newest = max(saved, default=0)
    ranks(2, finished, made)
    assert left(made, steps) == left(whole, steps)
    assert newest > 0 or kills == 1  # the first may come before any save
