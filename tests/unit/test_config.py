"""The configuration: what is accepted, what every mistake is told, and that all descriptions come from one place."""

import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import pytest
import yaml

from zero3d import config
from zero3d.config import Config, Data, Optimizer, Train, Zero, load, resolve_batch
from zero3d.config.hints import FOREIGN
from zero3d.config.keys import KEYS, SECTIONS, value_of
from zero3d.errors import ConfigError
from zero3d.spec import declaring
from zero3d.spec.tiers import tiers_of
from zero3d.tools.cli.main import main
from zero3d.train.setup.left_out import load_filled
from zero3d.train.variants import split_axes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def written(tmp_path):
    def write(text, name="run.yaml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


def refusal(source, overrides=()):
    with pytest.raises(ConfigError) as caught:
        load(source, overrides)
    message = str(caught.value)
    assert "\n" not in message
    return message


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [  # in the file, the key that is named, the hint
    ("zero: {stge: 2}", "zero.stge", "Did you mean zero.stage?"),
    ("modle: {path: x}", "modle", "Did you mean model?"),
    ("optimiser: {lr: 1}", "optimiser", "Did you mean optimizer?"),
    ("traning: {steps: 5}", "traning", "Did you mean train?"),
    ("checkpoints: {every: 2}", "checkpoints", "Did you mean checkpoint?"),
    ("train: {step: 5}", "train.step", "Did you mean train.steps?"),
    ("train: {microbatch: 5}", "train.microbatch", "Did you mean train.micro_batch?"),
    ("optimizer: {beta: 1}", "optimizer.beta", "Did you mean optimizer.betas?"),
    ("presicion: bf16", "presicion", "Did you mean precision?"),
    ("activation: full", "activation", "Did you mean activations?"),
    # a key that lives elsewhere
    ("stage: 2", "stage", "Did you mean zero.stage?"),
    ("lr: 1e-4", "lr", "Did you mean optimizer.lr?"),
    ("log_every: 10", "log_every", "Did you mean log.every?"),
    ("model: {length: 2}", "model.length", "Did you mean data.length?"),
    ("model: {lenght: 2}", "model.lenght", "Did you mean data.length?"),
    ("offload: {optimiser: host}", "offload.optimiser", "Did you mean offload.optimizer?"),
    ("offload: {fractoin: 1}", "offload.fractoin", "Did you mean offload.fraction?"),
    ("offlaod: {params: host}", "offlaod", "Did you mean offload?"),
    ("every: 3", "every", "evaluate.every or checkpoint.every or log.every?"),
    ("zero.stage: 3", "zero.stage", "zero: {stage: ...}"),
    ("lora: {r: 8}", "lora.r", "lora.rank"),
    ("lora: {alpha: 8}", "lora.alpha", "type lora.rank=16"),
    ("lora: {rank: 8, init: pissa_niter_4}", "lora.init", "out of the base, which then is that of no folder"),
    ("lora: {rank: 8, init: uniform}", "lora.init", "no way to draw adapters that zero3d has: type lora.init=gaussian"),
    # names of other trainers
    ("gradient_accumulation_steps: 2", "gradient_accumulation_steps", "train.accumulate"),
    ("per_device_train_batch_size: 2", "per_device_train_batch_size", "train.micro_batch"),
    ("train_micro_batch_size_per_gpu: 2", "train_micro_batch_size_per_gpu", "train.micro_batch"),
    ("learning_rate: 2", "learning_rate", "optimizer.lr"),
    ("train: {max_steps: 2}", "train.max_steps", "train.steps"),
    ("num_train_epochs: 2", "num_train_epochs", "train.epochs"),
    ("full_determinism: true", "full_determinism", "train.deterministic"),
    ("gradient_clipping: 1.0", "gradient_clipping", "optimizer.clip_norm"),
    ("warmup_ratio: 0.1", "warmup_ratio", "schedule.warmup"),
    ("bf16: true", "bf16", "precision: bf16"),
    ("fp16: {enabled: true}", "fp16", "precision: fp16"),
    ("zero_optimization: {stage: 2}", "zero_optimization", "Here it is zero."),
    ("zero: {offload_optimizer: {device: cpu}}", "zero.offload_optimizer", "Here it is offload.optimizer."),
    ("nvme_path: /local", "nvme_path", "offload.directory"),
    ("optimizer: {type: AdamW}", "optimizer.type", "optimizer.name"),
    # types
    ("zero: 3", "zero", "is a section: write keys under it, such as zero.stage"),
    ("zero: {stage: two}", "zero.stage", "a whole number from 0 to 3; found the text 'two'"),
    ("zero: {stage: true}", "zero.stage", "found true"),
    ("zero: {stage: 1.5}", "zero.stage", "found 1.5"),
    ("zero: {stage: {a: 1}}", "zero.stage", "found a mapping with a"),
    ("zero: {stage: }", "zero.stage", "found null"),
    ("data: {packing: 1}", "data.packing", "true or false, or best_fit; found 1"),
    ("output: 2024", "output", "Put it in quotes: YAML reads it as a number"),
    ("output: no", "output", "Put it in quotes: YAML reads it as a truth value"),
    ("data: {train: []}", "data.train", "a list of texts; found []"),
    ("data: {train: [1]}", "data.train", "found [1]"),
    ("optimizer: {betas: [0.9]}", "optimizer.betas", "two numbers from 0 and below 1; found [0.9]"),
    # ranges and choices
    ("zero: {stage: 7}", "zero.stage", "a whole number from 0 to 3; found 7"),
    ("optimizer: {betas: [0.9, 1.0]}", "optimizer.betas", "found [0.9, 1.0]"),
    ("optimizer: {lr: 0}", "optimizer.lr", "a number above 0; found 0"),
    ("optimizer: {lr: .nan}", "optimizer.lr", "found nan"),
    ("data: {validation: 0.7}", "data.validation", "a number from 0 to 0.5"),
    (
        "offload: {optimizer: cpu}",
        "offload.optimizer",
        f"none, {', '.join(tiers_of('optimizer'))} or auto; found the text 'cpu'.",
    ),
    ("offload: {optimizer: null}", "offload.optimizer", "found null"),
    ("offload: {executor: hots}", "offload.executor", "Did you mean host?"),
    ("offload: {fraction: 0}", "offload.fraction", "a number above 0 to 1; found 0"),
    (
        "offload: {host_budget: 64 GiB}",
        "offload.host_budget",
        "'64 GiB' is not a size: type bytes, or a number with kB",
    ),
    ("offload: host", "offload", "is a section: write keys under it, such as offload.optimizer"),
    ("train: {deterministic: atuo}", "train.deterministic", "takes true or false, or auto; found the text 'atuo'. Did"),
    ("train: {deterministic: null}", "train.deterministic", "found null"),
    ("train: {epochs: 0}", "train.epochs", "a number above 0, or null"),
    ("schedule: {name: cosin}", "schedule.name", "Did you mean cosine?"),
    ("precision: bfloat16", "precision", "Did you mean bf16?"),
    ("precision: float16", "precision", "Did you mean fp16?"),
    ("activations: ful", "activations", "Did you mean full?"),
    ("activations: every:0", "activations", "every:K (K a whole number from 1); found the text 'every:0'"),
    ("activations: every", "activations", "Did you mean every:K?"),
    ("activations: null", "activations", "found null"),
    ("train: {steps: 1, epochs: 2}", "train.epochs", "leave one out"),
    # YAML
    ("seed: 1\nseed: 2", "seed", "line 2: seed is written twice, first in line 1"),
    ("zero: {stage: 1, stage: 2}", "zero.stage", "line 1: zero.stage is written twice"),
]


@pytest.mark.parametrize(("text", "key", "hint"), MISTAKES, ids=[text for text, _, _ in MISTAKES])
def test_a_mistake_names_its_file_its_key_and_the_remedy(written, text, key, hint):
    path = written(text)
    message = refusal(path)
    assert message.startswith(f"{path}: ")
    assert re.search(f"{re.escape(key)}[ .:]", message)
    assert hint in message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("seed: 1\nzero: {stage: 2", "line 2: "),
        ("a: b: c", "line 1: mapping values are not allowed here"),
        ("\tseed: 1", "line 1: found character '\\t'"),
        ("- a", "holds ['a']"),
        ("just words", "holds the text 'just words'"),
        ("seed: !!python/name:os.system x", "line 1: the tag !!python/name:os.system is not read here"),
        ("[" * 500, "line 1: nested more than 16 levels deep"),
        ("--- 1\n--- 2", "line 2: but found another document"),
    ],
)
def test_a_file_that_is_no_mapping_is_told_with_its_line(written, text, hint):
    path = written(text)
    message = refusal(path)
    assert message.startswith(str(path))
    assert hint in message


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00")
    assert "is not UTF-8 text: invalid start byte at byte 0" in refusal(tmp_path / "run.yaml")


def test_a_missing_file_names_the_nearest_one(written, tmp_path):
    written("", "llama_text.yaml")
    assert refusal(tmp_path / "lama_text.yml").endswith(f"Did you mean {tmp_path / 'llama_text.yaml'}?")
    assert refusal(tmp_path).endswith(f"is a YAML file. Did you mean {tmp_path / 'llama_text.yaml'}?")
    assert f"nor does its folder {tmp_path / 'no'}" in refusal(tmp_path / "no" / "run.yaml")


def test_the_first_problem_is_told_and_the_others_are_named(written):
    message = refusal(written("zero: {stge: 1}\nsead: 2\ntrain: {steps: -1}"))
    assert "unknown key zero.stge." in message
    assert message.endswith("And 2 more problems: sead, train.steps.")


@pytest.mark.parametrize(
    ("override", "hint"),
    [
        ("zero.stage", "type zero.stage=VALUE"),
        ("stage", "type KEY=VALUE"),
        ("=2", "type KEY=VALUE"),
        ("zero=2", "zero is a section: type one of its keys, such as zero.stage=VALUE"),
        ("zero.stage=", "found the text ''"),
        ("zero.stage=0,1,2", "found the text '0,1,2'"),
        ("zero.stage.x=1", "zero.stage is a value, not a section"),
        ("traning.steps=5", "Did you mean train.steps"),
        ("lr=1", "Did you mean optimizer.lr?"),
        ("optimizer.betas=0.9", "two numbers"),
        ("optimizer.betas=[0.9,", "two numbers"),
        ("data.train=", "a list of texts"),
        ("data.train=a,,b", "found ['a', '', 'b']"),
        ("activations=null", "none, full, selective or every:K"),
    ],
)
def test_a_mistaken_override_is_told_as_it_was_typed(override, hint):
    message = refusal(None, [override])
    assert message.startswith(f"override {override!r}")
    assert hint in message


def test_every_foreign_name_points_to_a_key_or_section():
    for name, here in FOREIGN.items():
        target = here.replace(":", " ").replace(",", " ").split()[0]
        assert target in {*KEYS, *SECTIONS, "always"}, name
        assert name not in {*KEYS, *SECTIONS}


def test_check_refuses_what_load_would_not_have_returned():
    config.check(Config())
    with pytest.raises(ConfigError, match=r"zero\.stage takes a whole number from 0 to 3; found 4"):
        config.check(Config(zero=Zero(stage=4)))
    with pytest.raises(ConfigError, match="write 2 instead of '2'"):
        config.check(Config(zero=Zero(stage="2")))
    with pytest.raises(ConfigError, match="leave one out"):
        config.check(Config(train=Train(steps=1, epochs=1)))


# --- what is accepted -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "written_as", "value"),
    [
        ("optimizer.lr", "1e-4", 1e-4),
        ("optimizer.lr", "1", 1.0),
        ("optimizer.clip_norm", "null", None),
        ("optimizer.clip_norm", "none", None),
        ("optimizer.betas", "[0.9, 0.99]", (0.9, 0.99)),
        ("train.steps", "'3'", 3),
        ("train.steps", "1e3", 1000),
        ("train.steps", "1000.0", 1000),
        ("data.packing", "'no'", False),
        ("data.packing", "on", True),
        ("data.packing", "'False'", False),
        ("data.train", "a.txt", ("a.txt",)),
        ("data.train", "[a.txt, b.txt]", ("a.txt", "b.txt")),
        ("data.train", "'a, b.txt'", ("a, b.txt",)),
        ("data.validation", "0.01", 0.01),
        ("data.validation", "1e-2", 0.01),
        ("data.validation", "held.txt", ("held.txt",)),
        ("activations", "none", "none"),
        ("activations", "every:4", "every:4"),
        ("output", "", None),
        ("output", "runs/a", "runs/a"),
    ],
)
def test_yaml_values_become_the_keys_type(written, key, written_as, value):
    section, _, leaf = key.rpartition(".")
    text = f"{section}:\n  {leaf}: {written_as}" if section else f"{leaf}: {written_as}"
    actual = value_of(load(written(text)), key)
    assert (actual, type(actual)) == (value, type(value))


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("zero.stage=2", 2),
        ("optimizer.lr=1e-4", 1e-4),
        ("optimizer.betas=0.9,0.99", (0.9, 0.99)),
        ("optimizer.betas=[0.9, 0.99]", (0.9, 0.99)),
        ("optimizer.clip_norm=null", None),
        ("optimizer.clip_norm=", None),
        ("data.train=a.txt,b.txt", ("a.txt", "b.txt")),
        ("data.train=[a.txt, 'b, c.txt']", ("a.txt", "b, c.txt")),
        ("data.train=a=b.txt", ("a=b.txt",)),
        ("data.train=[a].txt", ("[a].txt",)),
        ("data.train=[2020-13-45]", ("2020-13-45",)),
        ("data.train=[1:30]", ("[1:30]",)),
        ("data.validation=0.01", 0.01),
        ("data.validation=a.txt,b.txt", ("a.txt", "b.txt")),
        ("data.packing=no", False),
        ("activations=none", "none"),
        ("output=2024", "2024"),
    ],
)
def test_typed_values_become_the_keys_type(override, value):
    actual = value_of(load(None, [override]), override.partition("=")[0])
    assert (actual, type(actual)) == (value, type(value))


def test_overrides_win_over_the_file_and_the_last_one_wins(written):
    path = written("zero: {stage: 9}\nseed: 3\nmodel:\n")
    actual = load(path, ["zero.stage=1", "zero.stage=2"])
    assert actual == Config(seed=3, zero=Zero(stage=2))


def test_an_override_of_one_option_of_a_table_wins_and_the_file_s_others_stay(written):
    file = written("optimizer: {name: muon, muon: {lr: 0.5, momentum: 0.9}}")
    found = load(file, ["optimizer.muon.lr=0.25", "optimizer.muon.ns_steps=4"])
    assert found.optimizer.muon == {"lr": 0.25, "momentum": 0.9, "ns_steps": 4}
    assert load(file, ["optimizer.muon.lr=0.25", "optimizer.muon.lr=0.125"]).optimizer.muon["lr"] == 0.125


@pytest.mark.parametrize(
    ("overrides", "steps", "epochs"),
    [
        (["train.steps=50"], 50, None),
        (["train.epochs=2"], None, 2.0),
        (["train.epochs=null", "train.steps=3"], 3, None),
        (["train.steps=null"], None, 1.0),
    ],
)
def test_how_long_a_run_is_can_be_said_in_the_other_way(written, overrides, steps, epochs):
    train = load(written("train: {epochs: 1}"), overrides).train
    assert (train.steps, train.epochs) == (steps, epochs)


def test_two_overrides_that_say_how_long_are_refused(written):
    assert "both say how long" in refusal(written("train: {epochs: 1}"), ["train.steps=5", "train.epochs=2"])


SHOWING = ("config", "compare", "cluster", "offload", "parallelism", "reproducibility", "checkpoints")


@pytest.mark.parametrize("page", ["README.md", "README.zh.md", *(f"docs/{name}.md" for name in SHOWING)])
def test_the_commands_that_the_pages_show_are_accepted(page):
    text = (ROOT / page).read_text()
    files = [yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", text, re.S)] or [{}]
    commands = re.findall(r"^zero3d (?:train|compare|config show) .*", text, re.M)
    for file in files[1:]:
        load(file)
    assert commands
    for command in commands:
        words = [word for word in command.split("#")[0].split() if "=" in word and not word.startswith("--")]
        axes, common = split_axes(words)
        for file in files[:1]:  # run.yaml; other blocks stand alone
            load(file, common + [f"{axis.key}={value}" for axis in axes for value in axis.values])


def test_a_dict_reads_as_a_file_does():
    assert load({"zero": {"stage": 1}, "data": {"train": ["a"]}}) == load(None, ["zero.stage=1", "data.train=a"])
    assert refusal({"zero": {"stge": 1}}).startswith("unknown key zero.stge.")


def test_nothing_given_is_the_defaults(written):
    assert load(None) == load({}) == load(written("")) == load(written("# only a comment")) == Config()


def test_the_words_of_a_command_line_are_told_apart(written):
    assert config.split_words([]) == (None, [])
    assert config.split_words(["run.yaml", "a=1"]) == ("run.yaml", ["a=1"])
    assert config.split_words(["a=1", "b=2"]) == (None, ["a=1", "b=2"])
    odd = str(written("", "a=b.yaml"))
    assert config.split_words([odd, "a=1"]) == (odd, ["a=1"])
    with pytest.raises(ConfigError, match="Only the first word may be a file"):
        config.split_words(["run.yaml", "other.yaml"])


# --- out again ------------------------------------------------------------------------------------


ODD = (
    "a: [b] # c",
    "1",
    "yes",
    "1e-4",
    "é \N{SNOWMAN} \U0001f600",
    "two\nlines\t",
    "'\"",
    " x ",
    "many words " * 30,
    "two\nlines",
)


@pytest.mark.parametrize("text", ODD)
def test_yaml_written_loads_back_equal(written, text):
    run = Config(
        output=text,
        activations="every:2",
        data=Data(train=(text, "b"), validation=("0.01",)),
        optimizer=Optimizer(lr=1e-12, betas=(0.0, 0.999), clip_norm=None, no_decay="*.bias"),
    )
    assert load(written(config.to_yaml(run))) == run
    assert load(written(config.to_yaml(run, mark=True))) == run
    assert load(config.to_dict(run)) == run
    assert config.to_yaml(run).count("\n") == config.to_yaml(Config()).count("\n")


def test_yaml_keeps_the_declared_order_and_marks_changes_only():
    lines = config.to_yaml(load(None, ["zero.stage=2"]), mark=True).splitlines()
    assert [line.partition(":")[0] for line in lines if not line.startswith(" ")] == [f.name for f in fields(Config)]
    assert [line for line in lines if "#" in line] == ["  stage: 2  # default: 3"]


def test_every_key_is_explained_with_its_range_and_default():
    overview = config.explain()
    for name, key in KEYS.items():
        text = config.explain(name)
        assert name in overview
        assert key.text in text
        assert key.wants in text
        assert all(choice in text for choice in key.choices)
        assert key.read(key.default) == key.default
    for section in SECTIONS:
        assert f"{section}." in config.explain(section)
    with pytest.raises(ConfigError, match=r"Did you mean zero\.stage\?"):
        config.explain("zero.stag")


def test_the_schema_holds_every_key_its_default_and_bounds():
    schema = json.loads(json.dumps(config.schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    leaves = {}
    for name, node in schema["properties"].items():
        if name in SECTIONS:
            assert node["additionalProperties"] is False
            assert node["description"]
            leaves |= {f"{name}.{leaf}": inner for leaf, inner in node["properties"].items()}
        else:
            leaves[name] = node
    assert schema["additionalProperties"] is False
    assert list(leaves) == list(KEYS)
    for name, node in leaves.items():
        default = KEYS[name].default
        assert node["default"] == (list(default) if isinstance(default, tuple) else default)
        assert node["description"] == KEYS[name].text
    stage = {"description": KEYS["zero.stage"].text, "default": 3, "type": "integer", "minimum": 0, "maximum": 3}
    assert leaves["zero.stage"] == stage
    assert leaves["optimizer.clip_norm"]["anyOf"] == [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}]
    assert leaves["optimizer.betas"]["items"] == {"type": "number", "minimum": 0, "exclusiveMaximum": 1}
    assert leaves["schedule.name"]["enum"][:5] == ["cosine", "linear", "constant", "wsd", "inverse_sqrt"]
    assert leaves["activations"]["pattern"] == "^(none|full|selective|every:[1-9][0-9]*)$"


def test_the_page_holds_the_table_of_all_keys():
    page = (ROOT / "docs" / "config.md").read_text()
    assert config.as_markdown() in page, "docs/config.md: put in what zero3d.config.as_markdown() returns"


def test_the_page_says_of_every_key_whether_bits_change_with_it():
    page, table = (ROOT / "docs" / "config.md").read_text(), config.bits_as_markdown()
    assert table in page, "docs/config.md: put in what zero3d.config.bits_as_markdown() returns"
    assert all(f"`{name}`" in table for name in KEYS)
    assert config.explain("log.every").endswith("resumed  with another value: the same bits")
    assert config.explain("mesh.experts").endswith(
        "other bits, without zero.exact: one product of all sources sums in another order"
    )


def test_a_key_that_does_not_say_whether_bits_change_with_it_cannot_be_declared():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'bits'"):
        declaring.key(1, "a number")


def test_the_pages_example_loads(written):
    page = (ROOT / "docs" / "config.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    assert load(written(example)) != Config()


# --- the batch equation ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("batch", "micro", "accumulate", "dp", "result"),
    [
        (None, None, None, 2, (2, 1, 1)),
        (None, 4, None, 2, (8, 4, 1)),
        (None, None, 3, 2, (6, 1, 3)),
        (None, 4, 3, 2, (24, 4, 3)),
        (32, None, None, 2, (32, 16, 1)),
        (32, 4, None, 2, (32, 4, 4)),
        (32, None, 4, 2, (32, 4, 4)),
        (32, 4, 4, 2, (32, 4, 4)),
    ],
)
def test_the_batch_equation_is_completed(batch, micro, accumulate, dp, result):
    actual = resolve_batch(Train(batch=batch, micro_batch=micro, accumulate=accumulate), dp)
    assert (actual.batch, actual.micro_batch, actual.accumulate) == result
    assert actual.batch == actual.micro_batch * actual.accumulate * actual.dp


def test_the_batch_equation_prints_its_numbers():
    equation = resolve_batch(Train(batch=32, micro_batch=4), 2).equation
    assert equation == "batch 32 = micro_batch 4 x accumulate 4 x dp 2 (sequences per step)"


@pytest.mark.parametrize(
    ("batch", "micro", "accumulate", "dp", "arithmetic", "ways"),
    [
        (33, None, None, 2, "33 is not a multiple of dp 2 = 2: 33 / 2 = 16.5", ["train.batch=32", "train.batch=34"]),
        (1, None, None, 4, "1 / 4 = 0.25", ["train.batch=4"]),
        (32, 5, None, 2, "micro_batch 5 x dp 2 = 10", ["train.batch=30", "train.batch=40", "train.micro_batch=4"]),
        (32, None, 3, 2, "accumulate 3 x dp 2 = 6", ["train.batch=30", "train.accumulate=2", "train.accumulate=4"]),
        (32, 4, 2, 2, "x accumulate 2 x dp 2 = 16", ["train.batch=16", "train.accumulate=4", "train.micro_batch=8"]),
    ],
)
def test_impossible_batches_name_the_nearest_that_work(batch, micro, accumulate, dp, arithmetic, ways):
    train = Train(batch=batch, micro_batch=micro, accumulate=accumulate)
    with pytest.raises(ConfigError) as caught:
        resolve_batch(train, dp)
    assert arithmetic in str(caught.value)
    for way in ways:
        assert way in str(caught.value)
        name, _, value = way.removeprefix("train.").partition("=")
        resolve_batch(replace(train, **{name: int(value)}), dp)  # what is named does work


# --- the verb -------------------------------------------------------------------------------------


def test_show_prints_yaml_that_loads_back_and_marks_changes(capsys, written):
    path = written("zero: {stage: 1}")
    assert main(["config", "show", str(path), "seed=5"]) == 0
    text = capsys.readouterr().out
    assert "seed: 5  # default: 0" in text
    assert load(yaml.safe_load(text)) == load_filled(path, ["seed=5"]).config
    assert main(["config", "show", str(path), "seed=5", "--json"]) == 0
    assert load(json.loads(capsys.readouterr().out)) == load_filled(path, ["seed=5"]).config


def test_explain_and_schema_print_text_and_json(capsys):
    assert main(["config", "explain", "zero.stage"]) == 0
    assert capsys.readouterr().out.strip() == config.explain("zero.stage")
    assert main(["config", "explain", "zero", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == [name for name in KEYS if name.startswith("zero.")]
    assert main(["config", "explain", "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)) == list(KEYS)
    assert main(["config", "schema"]) == 0
    assert json.loads(capsys.readouterr().out) == config.schema()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["show", "nowhere.yaml"], "nowhere.yaml does not exist"),
        (["show", "zero.stge=2"], "Did you mean zero.stage?"),
        (["explain", "zero.stge"], "Did you mean zero.stage?"),
        ([], "zero3d config --help"),
    ],
)
def test_bad_words_are_one_line_and_exit_code_2(capsys, words, hint):
    assert main(["config", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert len(shown.err.splitlines()) == 1
    assert hint in shown.err


def test_reading_a_configuration_imports_no_torch():
    script = "import sys, zero3d.config as c; c.load(None); c.check(c.Config()); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
