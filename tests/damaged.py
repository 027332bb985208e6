"""A tiny engine that checkpoints are loaded into, damaged ones too: what it was before, and what it became."""

import random
import shutil
import warnings

import numpy
import torch
from damage import damage
from models import adamw, bits
from torch import nn

import zero3d
from zero3d.errors import CheckpointError
from zero3d.precision import LossScaling, Precision
from zero3d.zero.unit_parts import State


class Tiny(nn.Module):
    """Two equal matrices, of which two ranks of a unit share one, a frozen one, a buffer, a scalar."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.table = nn.Embedding(11, 12).requires_grad_(False)
        self.first = nn.Linear(12, 400, bias=False)
        self.second = nn.Linear(12, 400, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, ids):
        self.seen += 1
        x = self.table(ids)
        return (self.first(x) * self.second(x)).mean() * self.scale


def in_memory(unit):
    return [buffer for buffer in unit.grads.buffers if buffer.untyped_storage().size()]


def make():
    return zero3d.Engine(
        Tiny(),
        stage=3,
        precision=Precision("fp16", LossScaling(initial=8.0)),
        optimizer=adamw,
        accumulate=2,
        param_groups=[{"match": "scale", "weight_decay": 0.0}],
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    )


def train(engine, *steps):
    for step in steps:
        for i in range(2):
            engine.backward(engine(torch.tensor([step, i])))
        engine.step()


def seed():
    torch.manual_seed(5)
    random.seed(5)
    numpy.random.seed(5)


def saved_at(folder):
    """Two checkpoints of one run: the one that is damaged, and a later one whose files get into it."""
    seed()
    engine = make()
    train(engine, 1, 2)
    saved = engine.save(folder / "ck")
    train(engine, 3)
    return saved, engine.save(folder / "later"), engine.steps


class Live:
    """An engine in the middle of a step, that can be put back there."""

    def __init__(self, folder):
        self.engine = make()
        train(self.engine, 7)
        self.saved = self.engine.save(folder)
        self.prepare()

    def prepare(self):
        self.engine.load(self.saved)
        seed()
        self.engine.backward(self.engine(torch.tensor([9, 9])))
        self.before = self.snapshot()

    def snapshot(self):
        """Everything that a load may change, and what it must not."""
        engine = self.engine
        units = [unit for unit in engine.units if unit.grads is not None]
        kind, words, *rest = numpy.random.get_state()
        return {
            "states": engine.fingerprint(),
            "weights": bits(unit.weights.shard for unit in engine.units),
            "gradients": [bits(in_memory(u)) if u.grads.state is not State.EMPTY else "" for u in units],
            "counted": (
                engine.accumulation.count,
                engine.accumulation.weight,
                engine.accumulation.reached,
                engine.steps,
            ),
            "gathered": [(unit.weights.state, len(unit.users)) for unit in engine.units],
            "scheduler": engine.scheduler.state_dict(),
            "loss scale": engine.loss_scale.state(),
            "groups": [{k: v for k, v in g.items() if k != "params"} for g in engine.optimizer.torch.param_groups],
            "buffers": bits(engine.module.buffers()),
            "streams": (bits([torch.get_rng_state()]), random.getstate(), kind, words.tolist(), rest),
        }


def clean(live, source):
    """What the engine is after the undamaged checkpoint."""
    live.prepare()
    live.engine.load(source)
    after = live.snapshot()
    live.prepare()
    assert after["states"] != live.before["states"]
    assert live.before["counted"][0] == 1
    assert any(live.before["gradients"])
    assert not any(after["gradients"])
    return after


def outcome(live, folder, expected):
    """The error's text, or "" where it loaded; anything but that is a failure."""
    try:
        live.engine.load(folder)
    except CheckpointError as error:
        assert live.snapshot() == live.before
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1500
        assert str(folder) in message, message
        return message
    assert live.snapshot() == expected
    live.prepare()
    return ""


def damaged_load(live, number, saved, later, expected, folder):
    """Damage a copy of `saved` as case `number` says and load it; what was done to it, and the error's text or "".

    later     a checkpoint of the same run, one step later, of which files get into the copy
    expected  what the engine is after the undamaged one
    """
    copy = folder / str(number) / "step-2"
    shutil.copytree(saved, copy)
    (copy.parent / "other").symlink_to(later)
    try:
        what = damage(copy, random.Random(number))
        with warnings.catch_warnings(action="ignore"):
            try:
                return what, outcome(live, copy, expected)
            except Exception as error:
                raise AssertionError(f"case {number}: {what}") from error
    finally:
        shutil.rmtree(copy.parent)
