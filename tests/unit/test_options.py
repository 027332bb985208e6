"""The keywords of an Engine as records; what they are refused for leaves the model as it was."""

import dataclasses
import inspect
import re
from typing import get_type_hints

import pytest
import torch
from models import build

import zero3d
from zero3d.config import Config
from zero3d.distributed.degrees import Degrees
from zero3d.engine.options import Options
from zero3d.spec.declaring import KEYWORDS


def test_every_keyword_of_an_engine_is_a_field_of_one_record():
    records = get_type_hints(Options)
    assert records.pop("offload") is zero3d.Offload
    fields = [field.name for record in records.values() for field in dataclasses.fields(record)]
    keywords = [*inspect.signature(zero3d.Engine).parameters]
    assert sorted([*fields, "model", "offload", "mesh"]) == sorted([*keywords, *Degrees._fields])


def declared():
    """The keys of a file that are keywords of an Engine, too, each as its section declares it."""
    sections = {name: section for name, section in get_type_hints(Config).items() if dataclasses.is_dataclass(section)}
    keys = {f"{name}.{key.name}": key for name in sections for key in dataclasses.fields(sections[name])}
    of_engines = inspect.signature(zero3d.Engine).parameters
    found = {name.partition(".")[2]: key for name, key in keys.items() if name.startswith(("zero.", "mesh."))}
    apart = ("optimizer", "quantize", "accumulate")  # a file computes accumulate from its batch
    found |= {keyword: keys[name] for name, keyword in KEYWORDS.items() if keyword not in apart}
    found |= {name: keys[f"{section}.{name}"] for section, name in OTHERS}
    assert set(found) - set(of_engines) == {*Degrees._fields}
    return {name: key for name, key in found.items() if name in of_engines}


OTHERS = (("optimizer", "clip_norm"), ("train", "expert_bias_rate"), ("train", "compile"))
ENTRY = re.compile(r"^    (\w+) +(\S.*(?:\n {10,}\S.*)*)", re.MULTILINE)


def test_defaults_of_an_engine_are_those_that_sections_declare():
    parameters = inspect.signature(zero3d.Engine).parameters
    assert {name: parameters[name].default for name in declared()} == {
        name: key.default for name, key in declared().items()
    }


def test_an_engines_docstring_has_the_words_that_sections_allow():
    entries = dict(ENTRY.findall(zero3d.Engine.__doc__))
    assert set(declared()) - set(entries) == {"stage"}  # of which the first line speaks
    for name, key in declared().items():
        words = set(re.findall(r"[\w-]+", entries.get(name, "")))
        assert set(key.metadata["choices"]) <= words, name


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
