"""The keywords of an Engine as one record; what they are refused for leaves the model as it was."""

import dataclasses
import inspect
import re

import pytest
import torch
from models import build

import zero3d
from zero3d.config.keys import KEYS
from zero3d.engine.options import KEYWORDS, Options
from zero3d.spec import Mesh, Zero
from zero3d.spec.declaring import KEYWORDS as NAMES

PARAMETERS = inspect.signature(zero3d.Engine).parameters


def test_the_signature_of_an_engine_is_what_keywords_are_declared_as():
    records = {"": Options, "zero": Zero, "mesh": Mesh}
    places = {name: (records[field if key else ""], key or field) for name, (field, key) in KEYWORDS.items()}
    fields = {
        name: next(each for each in dataclasses.fields(kind) if each.name == key)
        for name, (kind, key) in places.items()
    }
    assert sorted(PARAMETERS) == sorted([*fields, "model", "mesh"])
    assert PARAMETERS["offload"].default is None
    del fields["offload"]
    for name, field in fields.items():
        assert (PARAMETERS[name].default, PARAMETERS[name].annotation) == (field.default, field.type), name


def test_a_key_of_a_section_reaches_an_engine_by_its_keyword():
    every = {name: parameter.default for name, parameter in PARAMETERS.items() if name in KEYWORDS}
    assert Options.of(every) == Options()
    options = Options.of(
        every | {"exact": True, "tp_plan": {"*": "colwise"}, "offload": {"moments": "bf16"}, "ema": 0.9}
    )
    assert options == Options(
        zero=Zero(exact=True), mesh=Mesh(tp_plan={"*": "colwise"}), offload=zero3d.Offload(moments="bf16"), ema=0.9
    )


def test_defaults_of_an_engine_are_those_of_files():
    files = {keyword: KEYS[name].default for name, keyword in FILES.items()}
    assert {name: PARAMETERS[name].default for name in files} == files


APART = ("optimizer", "quantize", "accumulate")  # a file computes accumulate from its batch
FILES = {name: keyword for name, keyword in NAMES.items() if keyword not in APART} | {"train.compile": "compile"}


def test_an_engines_docstring_says_what_every_keyword_means():
    entries = dict(re.findall(r"^    (\w+) {2,}(\S.*(?:\n {10,}\S.*)*)", zero3d.Engine.__doc__, re.MULTILINE))
    assert entries.keys() == PARAMETERS.keys()
    assert "what is sharded: 0 nothing" in entries["stage"]
    assert '"auto" | "native" | "all-to-all": how they are summed' in entries["reduce_scatter"]
    assert "zero." not in entries["slow_wire"]


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
