"""Specs of presets in the package: they are what a trace finds now, and hold for nothing that they were not traced for."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zero3d.config import Lora, Model
from zero3d.models.presets import PRESETS
from zero3d.tools.plan import preset_specs
from zero3d.tools.plan.preset_specs import FOLDER, folded, preset_spec, traced_by, unfolded
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.plan.spec import Forward, Operations

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from planner_presets import ON_CARD, traced

TYPE = "type: python benchmarks/planner_presets.py"
HERE = {name: value for name, value in traced_by("demo").items() if name in ("torch", "transformers")}


def here(name):
    return {key: by(name)[key] for key in HERE}


def by(name):
    return json.loads((FOLDER / f"{name}.json").read_text())["by"]


def test_every_preset_has_a_spec_by_the_code_that_traces_now():
    stale = [
        name for name in PRESETS if not (FOLDER / f"{name}.json").exists() or by(name) != traced_by(name) | here(name)
    ]
    assert not stale, TYPE
    assert {file.stem for file in FOLDER.glob("*.json")} == set(PRESETS)


@pytest.mark.skipif(HERE.items() > by("demo").items(), reason="traced by other versions")
@pytest.mark.parametrize(
    "name", ["demo", *(pytest.param(name, marks=pytest.mark.long) for name in PRESETS if name != "demo")]
)
def test_a_spec_is_what_a_trace_finds(name):
    assert preset_spec(name, None, packed=None, forward=ON_CARD) == traced(name), TYPE


def test_what_else_is_asked_is_traced_anew():
    known = preset_spec("gpt2", 1024, chosen=Model(path="gpt2", init="random"), packed=True, forward=ON_CARD)
    assert known.length == 1024
    assert preset_spec("gpt2", None, packed=None, lora=Lora(), freeze=None, forward=ON_CARD) == known
    for settings in (
        {"length": 512},
        {"packed": False},
        {"lora": Lora(rank=1)},
        {"freeze": ("lm_head",)},
        {"chosen": Model(quantize="nf4")},
        {"chosen": Model(attn="eager")},
        {"forward": Forward()},
        {"forward": Forward(on_card=True, autocast=True)},
        {"path": "gpt3"},
    ):
        assert preset_spec(**{"path": "gpt2", "length": None, "packed": None, "forward": ON_CARD, **settings}) is None


@pytest.mark.parametrize("changed", ["_version", "_code", "_digest"])
def test_other_versions_and_another_code_or_preset_are_traced_anew(monkeypatch, changed):
    assert preset_spec("gpt2", None, packed=None, forward=ON_CARD) is not None
    monkeypatch.setattr(preset_specs, changed, lambda *_: "another")
    assert preset_spec("gpt2", None, packed=None, forward=ON_CARD) is None


def test_parts_that_differ_in_names_are_written_once_and_come_back_as_they_were():
    spec = gpt(3, 64, 4, 256, 32)
    odd = replace(spec.parts[2], operations=Operations(1.0, kept_cut=2.0), attends=False)
    spec = replace(spec, parts=(*spec.parts[:2], odd, *spec.parts[3:]))
    tree = json.loads(json.dumps(folded(spec)))
    assert len(tree["kinds"]) == len(spec.parts) - 1
    again = unfolded(tree)
    assert again == spec
    assert again.blocks[0].operations is again.blocks[2].operations


def test_the_first_plan_of_a_preset_imports_neither_torch_nor_transformers(tmp_path):
    code = (
        "import sys\n"
        "from zero3d.tools.cli.main import main\n"
        "assert main(['plan', 'gpt2', '--gpus', '1', '--tokens-per-batch', '8192']) == 0\n"
        "print('imported:', *{'torch', 'transformers'}.intersection(sys.modules))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"ZERO3D_CACHE": str(tmp_path), "PYTHONPATH": ":".join(sys.path)},
    )
    assert done.stdout.splitlines()[-1] == "imported:", done.stdout[-300:] + done.stderr[-300:]
    assert not (tmp_path / "specs").exists()
