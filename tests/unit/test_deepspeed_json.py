"""DeepSpeed's JSON: what it becomes, what has no effect, what is refused, and what the caller's values are for."""

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from deepspeed_jsons import ACCEPTED, REFUSED, TYPOS
from deepspeed_mutations import check

from zero3d.config import load, resolve_batch
from zero3d.config.keys import KEYS, value_of
from zero3d.errors import ConfigError
from zero3d.tools.cli.main import main, parse
from zero3d.tools.plan.hardware import cluster
from zero3d.ways.deepspeed.document import SYNONYMS, document_of, read_document
from zero3d.ways.deepspeed.keys import DOTTED, IDLE, MAPPED, REFUSED as REFUSED_KEYS, SECTIONS
from zero3d.ways.deepspeed.merge import load_merged
from zero3d.ways.deepspeed.report import as_markdown, as_yaml, lines
from zero3d.ways.deepspeed.translate import translate


def read(tmp_path, tree, words):
    path = tmp_path / "ds.json"
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return load_merged(path, None, words)


@pytest.mark.parametrize("name", ACCEPTED)
def test_a_json_becomes_a_configuration(tmp_path, name):
    tree, words, wanted = ACCEPTED[name]
    config, made = read(tmp_path, tree, words)
    assert {key: value_of(config, key) for key in wanted} == wanted
    written = load(yaml.safe_load("\n".join(as_yaml(made))))  # alone it is the same but for the caller's
    assert {row.ours: value_of(written, row.ours) for row in made.rows} == {row.ours: row.value for row in made.rows}
    assert len(list(lines(made))) >= len(made.rows) + 2


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_had_is_one_line(tmp_path, name):
    tree, words, why = REFUSED[name]
    with pytest.raises(ConfigError, match=why) as error:
        config, _ = read(tmp_path, tree, words)
        resolve_batch(config.train, config.mesh.dp)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("typed", TYPOS)
def test_a_misspelt_key_is_refused_with_the_nearest(tmp_path, typed):
    tree = value = {}
    *sections, last = typed.split(".")
    for section in sections:
        value[section] = {}
        value = value[section]
    value[last] = 1
    with pytest.raises(ConfigError, match=re.escape(f"ds.json: {typed} is not a key of DeepSpeed's.")) as error:
        read(tmp_path, tree, [])
    if TYPOS[typed]:
        assert f"Did you mean {TYPOS[typed]}?" in str(error.value)


@pytest.mark.parametrize(("text", "why"), [
    ("{", "is not JSON"), ("[]", "it must be a JSON object"), ('{"seed": 1, "seed": 2}', "the key seed is there twice"),
])  # fmt: skip
def test_what_is_no_json_is_one_line(tmp_path, text, why):
    with pytest.raises(ConfigError, match=why):
        read(tmp_path, text, [])
    with pytest.raises(ConfigError, match=r"none\.json cannot be read"):
        load_merged(tmp_path / "none.json", None, [])


def test_every_key_has_one_fate_and_those_that_are_mapped_exist():
    assert len(DOTTED) == len(MAPPED) + len(IDLE) + len(REFUSED_KEYS)
    known = {*KEYS, "loss_scale", "initialize()"}
    assert {*MAPPED.values()} <= known
    assert all(row.why and row.instead for row in REFUSED_KEYS.values())


def test_a_value_that_deepspeed_does_not_know_is_refused_also_of_a_key_without_an_effect(tmp_path):
    with pytest.raises(ConfigError, match=r"checkpoint\.tag_validation='foo': it must be one of Ignore, Warn, Fail"):
        read(tmp_path, {"checkpoint": {"tag_validation": "foo"}}, [])
    read(tmp_path, {"checkpoint": {"tag_validation": "WARN"}}, [])


def test_all_problems_are_named_at_once(tmp_path):
    with pytest.raises(ConfigError, match=r"zero_optimization\.stag .* And 2 more: .*bf16\.enable .*amp="):
        read(tmp_path, {"zero_optimization": {"stag": 1}, "bf16": {"enable": 1}, "amp": {"enabled": True}}, [])


def test_the_caller_gives_what_is_auto_and_wins_over_defaults_that_nobody_wrote(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {clip_norm: 0.3, lr: 1e-4}\ntrain: {epochs: 2}\n")
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}))
    config, made = load_merged(path, file, ["train.steps=3"])
    assert (config.optimizer.clip_norm, config.optimizer.lr, config.train.steps) == (0.3, 1e-4, 3)
    assert config.optimizer.weight_decay == 0.0
    assert {row.ours: row.source for row in made.rows}["optimizer.lr"] == "yours"


def test_a_json_without_a_file_replaces_what_the_demo_says_of_the_same(tmp_path, capsys):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_batch_size": 6, "zero_optimization": {"stage": 1, "reduce_bucket_size": 1}}))
    assert main(["config", "import-deepspeed", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["zero.stage"] == 1
    assert main(["config", "import-deepspeed", str(path)]) == 0
    text = capsys.readouterr().out
    assert "  stage: 1  # zero_optimization.stage\n" in text
    assert "#   zero_optimization.reduce_bucket_size: 1 - gradients are always reduced" in text
    path.write_text('{"stage": 2}')
    assert main(["config", "import-deepspeed", str(path)]) == 2
    assert "Did you mean zero_optimization.stage?" in capsys.readouterr().err


def test_an_imported_file_has_what_the_callers_file_said_too(tmp_path, capsys):
    mine, path = tmp_path / "mine.yaml", tmp_path / "ds.json"
    mine.write_text("model: {path: models/llama}\ndata: {train: corpus, length: 64}\noptimizer: {lr: 2e-5}\n")
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}))
    assert main(["config", "import-deepspeed", str(path), str(mine), "train.steps=7"]) == 0
    text = capsys.readouterr().out
    assert "  length: 64  # yours\n" in text
    (tmp_path / "alone.yaml").write_text(text)
    assert load(tmp_path / "alone.yaml") == load_merged(path, mine, ["train.steps=7"])[0]


def test_a_micro_batch_that_nobody_gives_is_the_planners(tmp_path, monkeypatch, capsys):
    from zero3d.tools.cli import planned_batch
    from zero3d.tools.cli.train import read as read_words

    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"train_micro_batch_size_per_gpu": "auto", "train_batch_size": 48}))
    arguments = parse(["train", "--deepspeed", str(path), "--ranks", "2"])
    _, config = read_words(arguments, told=True)
    assert config.train.micro_batch in (1, 2, 4, 8)  # of 24 a rank
    assert f"train.micro_batch={config.train.micro_batch}" in arguments.words
    assert re.search(r"train_micro_batch_size_per_gpu +train.micro_batch +\d+ +the planner", capsys.readouterr().err)
    assert read_words(arguments)[1] == config  # as its workers do
    small = replace(cluster("cpu", 2, 1), gpu=replace(cluster("cpu", 2, 1).gpu, memory=1e6))
    monkeypatch.setattr(planned_batch, "cluster_of_these", lambda config, ranks: small)
    with pytest.raises(ConfigError, match=r"the smallest micro-batch needs .* of a card with 0.0 GB: type"):
        read_words(parse(["train", "--deepspeed", str(path), "--ranks", "2"]))


def test_the_page_has_every_key():
    page = (Path(__file__).parents[2] / "docs" / "deepspeed-reference.md").read_text()
    assert as_markdown() in page, "docs/deepspeed-reference.md: put in what ways.deepspeed.report.as_markdown() returns"


@pytest.mark.parametrize("part", [range(60), pytest.param(range(60, 2000), marks=pytest.mark.long)])
def test_a_mutated_json_is_translated_or_refused_in_one_line(tmp_path, part):
    said = [check(number, tmp_path / "ds.json") for number in part]
    assert 5 < sum(not told for told in said) < 0.8 * len(said)


@pytest.mark.parametrize(("key", "value"), [
    ("optimizer.type", []), ("scheduler.type", {}), ("scheduler.params", [1]), ("zero_optimization.stage", {}),
    ("communication_data_type", {"a": 1}), ("zero_optimization.cpu_offload", "no"), ("bf16.enabled", 1),
    ("zero_optimization.offload_optimizer.device", ["cpu"]), ("wandb.project", {}), ("gradient_clipping", []),
    ("optimizer.params", 3), ("fp16.initial_scale_power", True), ("seed", [10**5000]), ("amp", [10**5000]),
])  # fmt: skip
def test_a_value_of_another_type_is_named_with_its_key(key, value):
    tree = {"optimizer": {"type": "AdamW"}, "scheduler": {"type": "WarmupLR"}, "zero_optimization": {"stage": 3},
            "wandb": {"enabled": True}, "bf16": {"enabled": False}, "fp16": {"enabled": not key.startswith("bf16")}}  # fmt: skip
    where = tree
    *sections, last = key.split(".")
    for section in sections:
        where = where.setdefault(section, {})
    where[last] = value
    with pytest.raises(ConfigError, match=rf"config: {key.partition('.')[0]}\.?[a-z_.]*") as error:
        translate(document_of(tree, "config"))
    assert str(error.value).isprintable()


def test_levels_that_are_written_with_dots_are_told():
    with pytest.raises(ConfigError, match=r"zero_optimization.stage is written as levels: zero_optimization: \{"):
        document_of({"zero_optimization.stage": 3}, "config")
    with pytest.raises(ConfigError, match=r"zero_optimization.x is not a key of DeepSpeed's"):
        document_of({"zero_optimization.x": 3}, "config")


@pytest.mark.parametrize("harm", ["pipe", "folder", "latin"])
def test_what_is_no_file_of_text_is_one_line(tmp_path, harm):
    path = tmp_path / "ds.json"
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "latin": lambda: path.write_bytes(b'{"\xff": 1}')}[harm]()
    with pytest.raises(ConfigError, match=r"is a pipe|Is a directory|is not UTF-8 text"):
        read_document(path)


@pytest.mark.parametrize(("text", "why"), [
    ("", "is not JSON: it is empty"), (" \n", "is not JSON: it is empty"),
    ("[" * 100_000, "nested too deeply"), (f'{{"seed": {"1" * 5000}}}', "Exceeds the limit .4300 digits."),
], ids=["nothing", "blanks", "deep", "digits"])  # fmt: skip
def test_what_can_be_no_hjson_is_not_taken_for_it(tmp_path, monkeypatch, text, why):
    monkeypatch.setitem(sys.modules, "hjson", None)
    (tmp_path / "ds.json").write_text(text)
    with pytest.raises(ConfigError, match=why) as error:
        read_document(tmp_path / "ds.json")
    assert "Hjson" not in str(error.value)


def test_hjson_is_read_where_its_library_is_there(tmp_path, monkeypatch):
    path = tmp_path / "ds.json"
    path.write_text("{\n  # mine\n  seed: 3\n}")
    monkeypatch.setitem(sys.modules, "hjson", None)
    with pytest.raises(ConfigError, match=r"is not JSON: Expecting .*\. If it is Hjson, type pip install hjson\."):
        read_document(path)
    given = []

    def loads(text, object_pairs_hook):
        given.append(text)
        return object_pairs_hook([("seed", 3)])

    monkeypatch.setitem(sys.modules, "hjson", SimpleNamespace(loads=loads))
    assert read_document(path).values == {"seed": 3}
    assert given == [path.read_text()]
    path.write_text('{"seed": 4}')
    assert read_document(path).values == {"seed": 4}
    assert len(given) == 1, "a JSON needs no other library"

    def refuse(text, object_pairs_hook):
        raise ValueError("bad at line 2")

    monkeypatch.setitem(sys.modules, "hjson", SimpleNamespace(loads=refuse))
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"is not JSON: .*\. Nor is it Hjson: bad at line 2\."):
        read_document(path)


def test_every_synonym_leads_to_a_key_and_is_none_itself():
    for name, meant in SYNONYMS.items():
        assert meant in DOTTED or meant in SECTIONS or meant.startswith("scheduler.params."), name
        assert name not in DOTTED | SECTIONS


def comments(tmp_path, tree, words=()):
    """The lines of the imported file, by key: (value, comment)."""
    _, made = read(tmp_path, tree, [*words])
    found = re.findall(r"^ *(\w+): (.*)  # (.*)$", "\n".join(as_yaml(made)), re.M)
    return {key: (value, comment) for key, value, comment in found}


def test_what_is_auto_for_adam_is_deepspeeds_and_so_a_trainers(tmp_path):
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    tree = {"optimizer": {"type": "AdamW", "params": params}}
    found = comments(tmp_path, tree)
    assert found["betas"] == ("[0.9, 0.999]", "optimizer.params.betas: auto, DeepSpeed's default, and a Trainer's")
    assert (found["eps"][0], found["weight_decay"][0]) == ("1.0e-08", "0.0")
    assert found["lr"][1] == "optimizer.params.lr: auto, zero3d's default"
    assert comments(tmp_path, tree, ["optimizer.weight_decay=0.3"])["weight_decay"][0] == "0.3"


def test_a_comment_says_where_a_value_is_from(tmp_path):
    found = comments(tmp_path, {"fp16": {"enabled": "auto"}})
    assert found["precision"] == ("fp16", "fp16.enabled: auto, the first of what that leaves: fp16, fp32")
    found = comments(tmp_path, {"fp16": {"enabled": "auto"}, "bf16": {"enabled": "auto"}})
    assert found["precision"] == ("bf16", "bf16.enabled and fp16.enabled: auto, zero3d's default")
    params = {"warmup_num_steps": "auto", "total_num_steps": "auto", "warmup_max_lr": 0.1}
    found = comments(tmp_path, {"scheduler": {"type": "WarmupDecayLR", "params": params}})
    assert found["options"][1] == (
        "scheduler.params; warmup_num_steps is schedule.warmup; total_num_steps is train.steps"
    )
