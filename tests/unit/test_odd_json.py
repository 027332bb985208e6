"""JSON files of models with odd contents: our error that names the file, never a bare one, never for ever."""

import json
import os
import random

import pytest
from corpora import save_tokenizer
from training import save_model

from zero3d.config import Model
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError, Zero3dError
from zero3d.models.open import open_model
from zero3d.reading import Unreadable, read_object
from zero3d.train.folder import Folder

ODD = {  # contents -> what is said of them
    "nothing": (b"", "is not JSON"),
    "a list": (b"[1, 2]", "holds a list instead of an object"),
    "a text": (b'"model"', "holds a str instead of an object"),
    "null": (b"null", "holds a NoneType instead of an object"),
    "cut off": (b'{"model_type": "lla', "is not JSON"),
    "binary": (bytes(range(256)), "is not UTF-8 text"),
    "zeros": (b"\0" * 100, "is not JSON"),
    "deep": (b'{"a":' + b"[" * 100_000, "is nested too deeply"),
    "digits": (b'{"a": ' + b"9" * 9000 + b"}", "is not JSON: Exceeds the limit"),
    "half a character": (b'{"a": "\xd8"}', "is not UTF-8 text"),
}
FILES = ["config.json", "generation_config.json", "model.safetensors.index.json"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def model(saved, tmp_path):
    """A copy of the saved model, by links."""
    folder = tmp_path / "model"
    folder.mkdir()
    for file in saved.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def put(folder, name, contents):
    (folder / name).unlink(missing_ok=True)
    (folder / name).write_bytes(contents)


def refused(folder):
    with pytest.raises(ConfigError) as caught:
        open_model(Model(path=str(folder)))
    said = str(caught.value)
    assert "\n" not in said
    assert len(said.replace(str(folder), "")) < 700
    return said


@pytest.mark.parametrize("name", ODD)
def test_odd_contents_are_told_with_the_file(model, name):
    contents, said = ODD[name]
    for file in FILES:
        before = (model / file).read_bytes() if (model / file).exists() else None
        put(model, file, contents)
        told = refused(model)
        assert said in told
        assert file in told
        (model / file).unlink() if before is None else put(model, file, before)
    assert open_model(Model(path=str(model))).weights is not None


@pytest.mark.parametrize("contents", [
    {}, {"weight_map": None}, {"weight_map": []}, {"weight_map": {"a": 1}}, {"weight_map": {"a": "../model.safetensors"}},
    {"weight_map": {"a": "/etc/passwd"}}, {"weight_map": {"a": "none.safetensors"}}, {"weight_map": {"a": "config.json"}},
    {"weight_map": {"k" * 9999: "model.safetensors"}}, {"weight_map": {"a": "pipe"}}, {"weight_map": {"a": "x" * 999}},
], ids=lambda contents: json.dumps(contents)[:50])  # fmt: skip
def test_an_odd_index_is_told(model, contents):
    os.mkfifo(model / "pipe")
    put(model, "model.safetensors.index.json", json.dumps(contents).encode())
    assert str(model) in refused(model)


def test_a_pipe_in_place_of_a_file_is_not_waited_for(model):
    for name in ("generation_config.json", "config.json"):
        (model / name).unlink()
        os.mkfifo(model / name)
        assert name in refused(model)
    with pytest.raises(Unreadable, match="is a pipe"):
        read_object(model / "config.json")


VALUES = [
    None,
    True,
    "x",
    "",
    -1,
    0,
    1.5,
    float("nan"),
    float("inf"),
    1e308,
    10**30,
    2**62,
    [],
    [None],
    {},
    {"a": []},
    "k" * 50_000,
]


def changed_config(folder, key, value):
    config = json.loads((folder / "config.json").read_text())
    put(folder, "config.json", json.dumps(config | {key: value}).encode())
    return config


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")


def one_odd_value(folder, cases):
    """Either the model opens, or it is our error, of one line: the cases that are refused."""
    wrong, said = [], []
    for key, value in cases:
        good = changed_config(folder, key, value)
        try:
            open_model(Model(path=str(folder)))
        except Zero3dError as error:
            wrong.append((key, value))
            said.append(str(error))
        finally:
            put(folder, "config.json", json.dumps(good).encode())
    assert "\n" not in "".join(said)
    return wrong


def odd_values(folder):
    keys = sorted(json.loads((folder / "config.json").read_text()))
    return [(key, value) for key in keys for value in VALUES]


def of_sizes(cases):
    return [(key, value) for key, value in cases if key in SIZES]


def test_an_odd_value_of_a_config_is_our_error(model):
    cases = random.Random(0).sample(odd_values(model), 60)
    assert len(of_sizes(cases)) > 5
    assert of_sizes(one_odd_value(model, cases)) == of_sizes(cases)  # of a size each of them is
    assert one_odd_value(model, [("tie_word_embeddings", True), ("head_dim", None), ("attention_dropout", 0)]) == []


@pytest.mark.long
def test_every_odd_value_of_a_config_is_our_error(model):
    cases = odd_values(model)
    assert of_sizes(one_odd_value(model, cases)) == of_sizes(cases)


# --- tokenizers and metrics -----------------------------------------------------------------------


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "config.json"])
def test_odd_tokenizer_files_are_our_error(tmp_path, file):
    objects = [b'{"model": {}}', b'{"added_tokens": [{"id": -1}]}', b"{}"]  # of these a tokenizer cannot be made
    damaged = [contents for contents, _ in ODD.values()]
    refusals, said = [], []
    for contents in damaged + objects:
        save_tokenizer(tmp_path)
        put(tmp_path, file, contents)
        try:
            load_tokenizer(str(tmp_path))
        except ConfigError as error:
            refusals.append(contents)
            said.append(str(error))
    assert "\n" not in "".join(said)
    assert all(str(tmp_path) in each for each in said)
    if file == "special_tokens_map.json":  # an older file, which transformers need not read
        assert [contents for contents in refusals if contents in objects] == []
    else:
        assert refusals == damaged + objects * (file == "tokenizer.json")


def test_odd_lines_of_metrics_are_left_out(tmp_path):
    good = [{"step": step, "loss": None if step == 2 else 1.5, "applied": True} for step in (1, 2, 3)]
    odd = [b"[]", b"3", b"{", b"[" * 99_999, b'{"loss": 1}', b'{"step": "1"}', b'{"step": 1, "loss": "x"}', b"\xff\xfe", b"",
           b'{"step": 1, "loss": [1]}', b'{"step": NaN}', b"null", b"9" * 9999, b'{"step": 2.5}']  # fmt: skip
    lines = [json.dumps(record).encode() for record in good]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([*odd, lines[0], *odd, *lines[1:], *odd]))
    with pytest.warns(UserWarning, match=f"has {3 * (len(odd) - 1)} lines that cannot be read"):
        assert Folder(tmp_path).keep_metrics(2) == good[:2]
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == good[:2]
