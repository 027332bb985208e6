"""What a file leaves out: any section, or all but one key, is a run up to the point where its ranks would start."""

import numpy
import pytest
import yaml

from zero3d.config import Config, to_dict
from zero3d.config.keys import KEYS, SECTIONS
from zero3d.errors import ConfigError, MeshError
from zero3d.tools.advice.planner import RunPlanner
from zero3d.tools.cli.train import check_before
from zero3d.train.setup.left_out import load_filled
from zero3d.train.start import Start

LENGTH = "data.length: 512, the model's positions, since none is given (1,024 is the default)"
BYTES = "data.tokenizer: bytes, since the data are text and the model brings no tokenizer"


def begun(tree, ranks=2):
    """The configuration of a file, checked as far as the start of its ranks, and what is said of it."""
    config, lines = load_filled(tree)
    check_before(config, Start("run", planner=RunPlanner()), ranks)
    return config, lines


def test_a_file_of_one_section_trains():
    config, lines = begun({"zero": {"stage": 2}})
    assert (config.data.length, config.data.tokenizer) == (512, "bytes")
    assert lines == [LENGTH, BYTES]
    config, lines = begun({"data": {"length": 64, "tokenizer": "bytes"}})
    assert (config.data.length, lines) == (64, [])


def test_text_beside_arrays_is_of_bytes_and_arrays_alone_need_no_tokenizer(tmp_path):
    text, rows = tmp_path / "a.txt", tmp_path / "rows.npy"
    text.write_text("some text\n" * 99)
    numpy.save(rows, numpy.ones((4, 8), dtype=numpy.int64))
    of_both, lines = load_filled({"data": {"train": [{"path": str(text)}, {"path": str(rows)}], "length": 8}})
    assert (of_both.data.tokenizer, lines) == ("bytes", [BYTES])
    of_arrays, lines = load_filled({"data": {"train": str(rows), "length": 8}})
    assert (of_arrays.data.tokenizer, lines) == (None, [])


def test_a_value_that_is_given_is_refused_where_it_does_not_fit():
    with pytest.raises(ConfigError, match=r"data\.length=1,024 is more than the model's 512 positions"):
        begun({"data": {"length": 1024}})


def test_a_wrong_key_of_another_section_is_not_hidden():
    with pytest.raises(ConfigError, match=r"tp=5 cannot split num_attention_heads=6"):
        begun({"zero": {"stage": 2}, "mesh": {"dp": 3, "tp": 5, "pp": 7}}, None)
    with pytest.raises(MeshError, match=r"2 ranks cannot form pp=7 x dp=3"):
        begun({"zero": {"stage": 2}, "mesh": {"dp": 3, "pp": 7}})


def test_typed_steps_over_a_files_epochs_and_the_other_way_round_are_said():
    tree = {"data": {"length": 64, "tokenizer": "bytes"}, "train": {"epochs": 2.5}}
    config, lines = load_filled(tree, ["train.steps=5"])
    assert (config.train.steps, config.train.epochs) == (5, None)
    assert lines == ["train.steps: 5, as typed; train.epochs 2.5 of the file does not count"]
    assert load_filled(tree, ["train.epochs=3"]).lines == []
    assert load_filled(tree).lines == []
    _, lines = load_filled(tree | {"train": {"steps": 7}}, ["train.epochs=3"])
    assert lines == ["train.epochs: 3, as typed; train.steps 7 of the file does not count"]


def test_a_folder_gets_no_tokenizer_of_another_kind(tmp_path):
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "llama", "n_positions": 64, "vocab_size": 300}')
    with pytest.raises(ConfigError, match="holds no tokenizer"):
        begun({"model": {"path": str(tmp_path), "init": "random"}})
    config, _ = begun({"model": {"path": str(file)}})
    assert (config.data.length, config.data.tokenizer) == (64, "bytes")


OTHERS = ["train", "optimizer", "schedule", "evaluate", "checkpoint"]


@pytest.mark.parametrize("section", ["model", "data", *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)])
def test_each_section_of_the_demo_may_be_left_out(section):
    from importlib.resources import files

    demo = yaml.safe_load((files("zero3d.train") / "demo.yaml").read_text())
    assert section in demo
    begun({name: value for name, value in demo.items() if name != section})


@pytest.mark.long
def test_each_section_alone_and_each_key_alone_with_its_default_begins():
    defaults = to_dict(Config())
    for name in SECTIONS:
        section = {key: value for key, value in defaults[name].items() if (name, key) != ("data", "length")}
        begun({name: section})
    for name in KEYS.keys() - {"data.length"}:
        section, _, key = name.rpartition(".")
        begun({section: {key: defaults[section][key]}} if section else {name: defaults[name]})


@pytest.mark.long
@pytest.mark.parametrize("tree", [
    {"zero": {"stage": 2}}, {"model": {"path": "demo-moe"}}, {"optimizer": {"lr": 1e-3}}, {"precision": "fp32"},
], ids=str)  # fmt: skip
def test_such_a_file_runs(tmp_path, zero3d_in_fork, tree):
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(tree))
    (tmp_path / "small.txt").write_text("def function(value):\n    return value\n" * 400)
    done = zero3d_in_fork(tmp_path, "train", "run.yaml", "data.train=small.txt", "train.steps=1", "--ranks", 1)
    assert done.returncode == 0, done.stderr
    assert LENGTH in done.stderr
    assert BYTES in done.stderr
