"""Features: an engine calls each at its moments, in the order of the rows; one that is not there costs nothing."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import zero3d
from zero3d.checkpoint.folders import MANIFEST
from zero3d.engine import features
from zero3d.engine.feature import Feature
from zero3d.engine.features import find, having
from zero3d.errors import ConfigError

told = []  # what recorders were called for


class Recorder(Feature):
    """Tells every call; allows all but an export."""

    name = "recorder"
    trains_unfrozen = False

    @classmethod
    def check(cls, model, mesh, options):
        told.append(f"check, stage {options.zero.stage}")

    @classmethod
    def opened(cls, built):
        told.append(f"opened beside an optimizer: {built.optimizer is not None}")
        return cls()

    def begin(self, step, micro_batches):
        told.append(f"begin {micro_batches} of step {step}")

    @contextmanager
    def around(self, k, batch, compute):
        told.append(f"enter {k}")
        yield
        told.append(f"leave {k}")

    def before_update(self, compute):
        told.append("before update")

    def after_update(self, outcome):
        told.append(f"after update: {outcome.reason}")

    def abandoned(self):
        told.append("abandoned")

    def refuse(self, call):
        told.append(f"may I {call}")

    def about(self):
        return {"recorder": "there"}

    def loaded(self):
        told.append("loaded")


class Second(Recorder):
    """The same in a row behind it."""

    name = "second"

    def after_update(self, outcome):
        told.append("second after update")

    def around(self, k, batch, compute):
        return Feature.around(self, k, batch, compute)


@pytest.fixture
def recorded(monkeypatch):
    """Rows with a recorder; returns what it tells."""
    monkeypatch.setattr(features, "FEATURES", (*features.FEATURES, Recorder))
    told.clear()
    return told


def since(told, engine, call):
    """What is told while something is called."""
    told.clear()
    call(engine)
    return list(told)


class Weighted(nn.Module):
    """A linear layer, of batches that say their own weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(4, 4)

    def forward(self, x, weight):
        return self.linear(x)


def weighted(**options):
    def loss(output, batch):
        return output.sum() * batch[1], batch[1]

    return zero3d.Engine(Weighted(), **({"stage": 2, "precision": "fp32", "loss": loss} | options))


def train(*weights):
    return lambda engine: engine.train_batch([(torch.ones(2, 4), weight) for weight in weights])


def test_a_feature_is_checked_before_it_is_opened_with_the_engine(recorded):
    weighted()
    assert recorded == ["check, stage 2", "opened beside an optimizer: True"]


def test_a_step_calls_a_feature_around_its_micro_batches_and_after_its_update(recorded):
    assert since(recorded, weighted(), train(1.0, 1.0)) == [
        "begin 2 of step 1",
        "enter 0",
        "leave 0",
        "enter 1",
        "leave 1",
        "before update",
        "may I step()",
        "after update: applied",
    ]


def test_a_skipped_step_is_followed_too(recorded):
    assert since(recorded, weighted(), train(0.0))[-1] == "after update: no targets"


def test_a_step_that_is_given_up_is_forgotten_and_a_backward_alone_calls_nothing(recorded):
    engine = weighted(accumulate=2)
    told = since(recorded, engine, lambda engine: engine.backward(engine(torch.ones(2, 4), 1.0).sum()))
    assert told == []
    assert since(recorded, engine, lambda engine: engine.zero_grad()) == ["abandoned"]


def test_a_checkpoint_notes_a_feature_and_a_load_tells_it(recorded, tmp_path):
    engine = weighted()
    told = since(recorded, engine, lambda engine: engine.save(tmp_path))
    assert told == ["may I save()"]
    assert since(recorded, engine, lambda engine: engine.load(tmp_path)) == ["may I load()", "loaded"]
    (manifest,) = tmp_path.glob(f"*/{MANIFEST}")
    assert '"recorder": "there"' in manifest.read_text()


def test_a_feature_may_refuse_a_call(recorded, monkeypatch, tmp_path):
    def refuse(self, call):
        raise ConfigError(f"{call} with a recorder")

    engine = weighted()
    monkeypatch.setattr(Recorder, "refuse", refuse)
    with pytest.raises(ConfigError, match=r"save\(\) with a recorder"):
        engine.save(tmp_path)


def test_features_are_called_in_the_order_of_their_rows(recorded, monkeypatch):
    monkeypatch.setattr(features, "FEATURES", (Second, *features.FEATURES))
    told = since(recorded, weighted(), train(1.0))
    assert told[-2:] == ["second after update", "after update: applied"]


def test_a_feature_that_does_not_train_what_was_frozen_is_named_where_that_is_asked_for(recorded):
    model = Weighted()
    model.linear.bias.requires_grad_(False)
    engine = zero3d.Engine(model, stage=2, precision="fp32")
    with pytest.raises(ConfigError, match="does not work with recorder"):
        engine.unfreeze("*bias")


def test_an_engine_has_the_features_that_its_options_ask_for_and_enters_those_alone_that_do_something():
    plain, averaging = weighted(), weighted(ema=0.9)
    assert [type(feature).__name__ for feature in plain.features] == ["Health", "ExpertBias", "Streaming"]
    assert plain.averages is None
    assert averaging.averages is find(averaging.features, features.Averages)
    assert having(averaging.features, "around") == []
    assert having(weighted(replay=1).features, "around") != []
