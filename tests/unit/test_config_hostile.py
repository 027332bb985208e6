"""Files that nobody would write: bombs, numbers that are read in two ways, mutations. One error at once, never a traceback."""

import json
import os

import pytest
from corpora import opened
from mutations import mutated_load

from zero3d.config import load
from zero3d.config.kinds import number_meant
from zero3d.errors import ConfigError, DataError, short
from zero3d.tools.cli.main import main

DOUBLED = "".join(f"x{i}: &a{i} [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 20))
MERGED = "".join(f"x{i}: &a{i}\n  <<: [{f'*a{i - 1}, ' * 9}]\n" for i in range(1, 20))
HOSTILE = {  # text -> what is said
    "a bomb of aliases": ("x0: &a0 [1]\n" + DOUBLED, "its aliases written out"),
    "a bomb of merges": ("x0: &a0 {seed: 1}\n" + MERGED, "its aliases written out"),
    "a bomb of long texts": (f"x: &a {'b' * 300_000}\ny: [{'*a, ' * 5000}]", "its aliases written out"),
    "an alias in itself": ("data: &a\n  train: *a", "line 2: the alias *a contains itself"),
    "a merge of itself": ("data: &a\n  <<: *a", "the alias *a contains itself"),
    "brackets": ("[" * 50_000, "line 1: nested more than 16 levels deep"),
    "braces": ("{a: " * 50_000, "line 1: nested more than 16 levels deep"),
    "dashes": ("- " * 50_000, "line 1: nested more than 16 levels deep"),
    "a large file": ("seed: 1\n" + "#" * (1 << 20), "has 1,048,584 bytes, and at most 1,048,576 are read"),
    "a long key": (f"{'k' * 900}: 1", "unknown key kkk"),
    "a very long key": (f"? {'k' * 900_000}\n: 1", "unknown key kkk"),
    "a long value": (f"precision: {'k' * 900_000}", "found the text 'kkk"),
    "a long key in a section": (f"zero: {{? {'k' * 2000} : 1}}", "unknown key zero.kkk"),
    "many unknown keys": ("".join(f"train_{i}: 1\n" for i in range(2000)), "And 1999 more problems: train_1, "),
    "too many values": (f"data: {{train: [{'a, ' * 20_001}]}}", "more than 20,000 values"),
    "a timestamp": ("output: !!timestamp nonsense", "the tag !!timestamp is not read here"),
    "an empty integer": ("seed: !!int ''", "the tag !!int is not read here"),
    "a set": ("data: {train: !!set {a, b}}", "the tag !!set is not read here"),
    "code": ("seed: !!python/object/apply:os.system [x]", "the tag !!python/object/apply:os.system is not read here"),
    "sixties": ("train: {steps: 1:30}", "line 1: 1:30 is read in two ways: type 90 if sixties are meant, or as text \"1:30\""),
    "sixties with a part": ("optimizer: {lr: -1:30.5}", "type -90.5 if sixties are meant"),
    "a zero in front": ("seed: 1\ntrain: {steps: 010}", "line 2: 010 is read in two ways: type 10, not with a zero before it"),
    "binary": ("seed: 0b11", "type 3"),
    "octal": ("seed: 0o17", "type 15"),
    "underscores": ("seed: 1_000", "type 1000"),
    "octal with many zeros": (f"train: {{steps: {'0' * 50}10}}", "type a decimal number"),
    "sixties without end": (f"train: {{steps: 1{':1' * 200_000}}}", "type a decimal number"),
    "a prefix alone": ("seed: 0b_", "0b_ is read in two ways: type 0, or"),
    "a character beyond Unicode": ('output: "\\UFFFFFFFF"', "is not a YAML file"),
    "octal in quotes": ("seed: '010'", "found the text '010'. Type 10, not with a zero before it."),
    "a truth value as text": ("output: on", "Put it in quotes: YAML reads it as a truth value"),
    "a truth value as number": ("seed: off", "found false"),
    "a huge number": (f"seed: 0x{'f' * 9000}", "found a huge number"),
    "a number of many digits": (f"seed: {'9' * 9000}", "is not a YAML file: Exceeds the limit"),
    "a seed beyond": ("seed: 4294967296", "a whole number from 0 to 4,294,967,295"),
    "half a character": ('output: "\\ud800"', "output takes text, or null"),
    "a zero character": ('data: {train: ["a\\0b"]}', "data.train takes"),
    "a key that is a list": ("? [a, b]\n: 1", "unhashable"),
    "a key that is null": ("null: 1", "unknown key None"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_short_error(tmp_path, name):
    text, expected = HOSTILE[name]
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path / "run.yaml")
    message = str(caught.value).replace(str(tmp_path), "")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 700


@pytest.mark.parametrize(
    "word", ["seed=010", "seed=1_000", "train.steps=1:30", "optimizer.lr=0b1", "seed=１２", "seed=infinity"]
)
def test_a_typed_number_is_read_as_one_in_a_file(word):
    with pytest.raises(ConfigError, match="found the text"):
        load(None, [word])


@pytest.mark.parametrize("text", ["1", "0", "-3", "1e-4", "0x1f", "12.5e9", "every:4", "a:b", "10:99", "0.5", "v1_0"])
def test_what_all_readers_take_alike_is_not_refused(text):
    assert number_meant(text) is None


def test_small_aliases_merges_and_dates_are_fine(tmp_path):
    text = "zero: &z {stage: 1}\ndata: &d {length: 64}\noutput: 2024-01-01\n"
    (tmp_path / "run.yaml").write_text(
        text + "log: {project: &w name}\ncheckpoint: {<<: {every: 2}}\nmodel: {path: *w}\n"
    )
    actual = load(tmp_path / "run.yaml")
    assert (actual.output, actual.model.path, actual.checkpoint.every) == ("2024-01-01", "name", 2)


def test_a_pipe_or_a_device_is_no_configuration(tmp_path):
    os.mkfifo(tmp_path / "run.yaml")
    for path, kind in ((tmp_path / "run.yaml", "a pipe"), ("/dev/zero", "a device")):
        with pytest.raises(ConfigError, match=f"is {kind}, not a regular file"):
            load(path)


def test_a_long_word_is_an_override_or_a_name_that_does_not_exist():
    assert load(None, ["data.train=" + "a" * 5000]).data.train == ("a" * 5000,)
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        load("a" * 5000)
    with pytest.raises(ConfigError, match=r"^override 'k{60}'\.\.\. is not KEY=VALUE"):
        load(None, ["k" * 5000])


def test_an_override_of_a_key_of_two_lines_is_refused_in_one(tmp_path):
    with pytest.raises(ConfigError, match=r"^override 'zero\.st\\nage=3': unknown key zero\.st age"):
        load(None, ["zero.st\nage=3"])


def test_a_value_is_quoted_short():
    assert short("a" * 60) == "a" * 60
    assert short("a" * 10**7) == "a" * 60 + "..."
    assert short("a\nb" * 99).count("\n") == 0
    assert short("a\0b\x1b[2J\u2028\ud800") == r"a\x00b\x1b[2J \ud800"
    assert short("a\nb\x85c\u2028d") == "a b c d"
    assert short("a  b") == "a  b"
    assert short(1 << 99999) == "a huge number"


@pytest.mark.parametrize("words", [
    ["K" * 9999], ["train", "--K" + "k" * 9999], ["train", "--ranks", "k" * 9999], ["plan", "--theory", "--params", "k" * 9999],
    ["plan", "--params", "1e9", "--gpus", "k" * 9999], ["plan", "--params", "1e9", "--gpu", "k" * 9999], ["config", "show", "k" * 9999],
    ["plan", "--params", "1e9", "--goal", "k" * 9999], ["plan", "--params", "1e9", "--assert-fits", "k" * 9999], ["plan", "k" * 9999],
    ["config", "explain", "k" * 9999], ["train", "model.path=" + "k" * 9999], ["train", "data.train=" + "k" * 9999],
    ["train", "data.tokenizer=" + "k" * 9999], ["train", "output=" + "k" * 9999], ["train", "plan.cluster=" + "k" * 9999],
    ["train", "--resume", "k" * 9999], ["train", "precision=" + "k" * 9999], ["compare", "zero.stage=0," + "k" * 9999],
    ["launch", "k" * 9999], ["launch", "slurm", "k" * 9999],
], ids=lambda words: " ".join(words)[:40])  # fmt: skip
def test_no_long_word_comes_back_whole(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert "k" * 100 not in printed
    assert len(printed) < 900


def test_no_long_key_of_a_record_comes_back_whole(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"k" * 99_999: 1, **{str(i): i for i in range(999)}}))
    with pytest.raises(DataError) as caught:
        opened(tmp_path, tmp_path / "a.jsonl")
    assert len(str(caught.value).replace(str(tmp_path), "")) < 400


# --- mutations ------------------------------------------------------------------------------------


def refused(folder, numbers):
    """How many of these mutations are no configuration."""
    return sum(mutated_load(folder / "run.yaml", number) != "" for number in numbers)


def test_mutations_end_in_a_configuration_or_in_our_error(tmp_path):
    assert 40 < refused(tmp_path, range(80)) < 80


@pytest.mark.long
def test_many_mutations_end_in_a_configuration_or_in_our_error(tmp_path):
    assert refused(tmp_path, range(80, 2200)) > 1060
