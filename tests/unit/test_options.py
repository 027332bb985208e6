"""The keywords of an Engine as records; what they are refused for leaves the model as it was."""

import dataclasses
import inspect
from typing import get_type_hints

import pytest
import torch
from models import build

import zero3d
from zero3d.distributed.degrees import Degrees
from zero3d.engine.options import Options


def test_every_keyword_of_an_engine_is_a_field_of_one_record():
    records = get_type_hints(Options)
    assert records.pop("offload") is zero3d.Offload
    fields = [field.name for record in records.values() for field in dataclasses.fields(record)]
    keywords = [*inspect.signature(zero3d.Engine).parameters]
    assert sorted([*fields, "model", "offload", "mesh"]) == sorted([*keywords, *Degrees._fields])


@pytest.mark.parametrize("options", [
    {"reduce_dtype": "bf16"}, {"reduce": "every_micro_batch", "stage": 1}, {"schedule": "gpipe"}, {"accumulate": 0},
    {"exact": True, "reduce_dtype": "bf16", "precision": "bf16"}, {"optimizer": "adamw"},
])  # fmt: skip
def test_what_is_refused_leaves_the_model_to_another_engine(options):
    model = build("net")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(zero3d.ConfigError):
        zero3d.Engine(model, **{"precision": "fp32"} | options)
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))
    zero3d.Engine(model, precision="fp32")


def test_an_engine_names_its_axes():
    engine = zero3d.Engine(build("net"), precision="fp32")
    assert [axis.axis for axis in (engine.dp, engine.tp, engine.world)] == ["dp", "tp", "dp"]
    assert [axis.size for axis in (engine.dp, engine.tp, engine.world)] == [1, 1, 1]


class Watched(torch.nn.Linear):
    """Counts how often it is told its mode; layers that merge weights in eval mode do work there."""

    told = 0

    def train(self, mode=True):
        self.told += 1
        return super().train(mode)


def test_building_an_engine_changes_no_modules_mode():
    module = Watched(2, 2)
    zero3d.Engine(module, precision="fp32")
    assert module.told == 0
