"""Specs of traced models that are kept on disk: what is read is what a trace finds, and when a model is traced anew."""

import json
from pathlib import Path

import pytest
from transformers.utils import logging

import zero3d
from zero3d.config import Lora
from zero3d.errors import ConfigError
from zero3d.models.presets import PRESETS
from zero3d.tools.cli import kept_specs
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.sim import model_spec


@pytest.fixture
def traced(tmp_path, monkeypatch):
    """What was traced, in an empty folder: closed forms in the place of models."""
    calls = []

    def trace(path, length, **settings):
        calls.append((path, length, settings))
        return gpt(2, 64, 4, 256, length)

    monkeypatch.setenv("ZERO3D_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(model_spec, "open_spec", trace)
    return calls


@pytest.mark.long
def test_what_is_read_is_what_a_trace_finds(tmp_path, monkeypatch):
    monkeypatch.setenv("ZERO3D_CACHE", str(tmp_path))
    settings = {"lora": Lora(rank=2, targets=("all-linear",)), "packed": True}
    first = kept_specs.open_spec("demo-moe", 16, **settings)
    monkeypatch.setattr(model_spec, "open_spec", None)
    again = kept_specs.open_spec("demo-moe", 16, **settings)
    assert first == again
    assert len({id(part.operations) for part in again.blocks}) == len({part.operations for part in again.blocks})


def test_a_trace_prints_none_of_transformers_warnings(traced, monkeypatch):
    logging.set_verbosity_warning()
    kept_specs.open_spec("demo", 32)
    assert len(traced) == 1
    assert logging.get_verbosity() == logging.ERROR


def test_other_lengths_settings_and_configs_are_traced_anew(traced, tmp_path):
    file = tmp_path / "config.json"
    for hidden in (192, 96):
        file.write_text(json.dumps({**PRESETS["demo"], "hidden_size": hidden}))
        kept_specs.open_spec(str(file), 64)
    for settings in ({}, {"freeze": ("lm_head",)}, {"lora": Lora(rank=1)}, {"lora": Lora(rank=2)}):
        for _ in range(2):
            assert kept_specs.open_spec(str(file), 32, **settings).length == 32
    assert [length for _, length, _ in traced] == [64, 64, 32, 32, 32, 32]


def test_a_change_of_any_file_of_the_library_or_of_the_tools_is_traced_anew(traced, tmp_path, monkeypatch):
    package = Path(zero3d.__file__).parent
    files = [
        package / name for name in ("engine/engine.py", "errors.py", "tools/sim/model_spec.py", "tools/cli/main.py")
    ]
    for file in files:
        stamp = kept_specs._stamp
        kept_specs.open_spec("demo", 32)
        monkeypatch.setattr(
            kept_specs, "_stamp", lambda each, file=file, stamp=stamp: (-1,) if each == file else stamp(each)
        )
        kept_specs.open_spec("demo", 32)
        monkeypatch.setattr(kept_specs, "_stamp", stamp)
    assert len(traced) == 1 + len(files)


def test_a_file_that_cannot_be_read_is_made_anew_and_a_folder_that_cannot_be_written_is_left(
    traced, tmp_path, monkeypatch
):
    spec = kept_specs.open_spec("demo", 32)
    (kept,) = (tmp_path / "cache/specs").iterdir()
    for text in ("{", "{}", "[]"):
        kept.write_text(text)
        assert kept_specs.open_spec("demo", 32) == spec
    assert kept_specs.open_spec("demo", 32) == spec
    assert len(traced) == 4
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ZERO3D_CACHE", str(tmp_path / "file"))
    assert kept_specs.open_spec("demo", 32) == spec


def test_the_last_that_were_used_are_kept(traced, monkeypatch, tmp_path):
    monkeypatch.setattr(kept_specs, "KEPT", 2)
    for length in (8, 16, 24):
        kept_specs.open_spec("demo", length)
    assert len(list((tmp_path / "cache/specs").iterdir())) == 2


def test_a_wrong_name_is_refused_and_nothing_is_traced(traced):
    with pytest.raises(ConfigError, match="Did you mean 'demo-moe'"):
        kept_specs.open_spec("demo-mo", 64)
    assert not traced
