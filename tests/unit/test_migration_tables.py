"""Every row of docs/migrate.md is an example that both sides take, and equal numbers are equal in both."""

import ast
import dataclasses
import inspect
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from zero3d.config import load
from zero3d.config.keys import KEYS
from zero3d.ways.deepspeed.keys import DOTTED as KNOWN

PAGE = (Path(__file__).parents[2] / "docs" / "migrate.md").read_text()
ROW = re.compile(r"^\| `(.+)` \| `(.+=.+)` \|$", re.M)
WORD = re.compile(r"\S+=(?:\[[^\]]*\]|\S+)")
NUMBER = re.compile(r"(?<![\w.])\d[\d.]*(?:e-?\d+)?(?![\w.])")
TITAN = {  # of the last JobConfig that was read from TOML
    "job": {"dump_folder"},
    "model": {"hf_assets_path"},
    "training": {"local_batch_size", "global_batch_size", "seq_len", "steps", "max_norm", "mixed_precision_param",
                 "mixed_precision_reduce", "enable_cpu_offload"},
    "optimizer": {"lr", "eps", "weight_decay"},
    "lr_scheduler": {"warmup_steps", "decay_type", "decay_ratio", "min_lr_factor"},
    "parallelism": {"data_parallel_shard_degree", "data_parallel_replicate_degree", "fsdp_reshard_after_forward",
                    "tensor_parallel_degree", "pipeline_parallel_degree", "pipeline_parallel_schedule"},
    "activation_checkpoint": {"mode"},
    "checkpoint": {"interval", "keep_latest_k", "async_mode", "last_save_in_hf"},
    "validation": {"freq"},
    "metrics": {"log_freq", "enable_tensorboard"},
    "compile": {"enable"},
    "debug": {"seed", "deterministic"},
    "comm": {"train_timeout_seconds"},
}  # fmt: skip
TRAINER = {  # of Trainer.Config in torchtitan 0.3.0: an argument's class, or the function that makes it, and its own arguments
    "training": {"TrainingConfig": TITAN["training"]},
    "optimizer": {"default_adamw": {"lr", "betas", "eps", "weight_decay"}},
    "lr_scheduler": {"LRSchedulersContainer.Config": TITAN["lr_scheduler"]},
    "parallelism": {"ParallelismConfig": {*TITAN["parallelism"], "expert_parallel_degree",
                                          "pipeline_parallel_microbatch_size"}},
    "activation_checkpoint": {"FullAC.Config": set(), "SelectiveAC.Config": set()},
    "checkpoint": {"CheckpointManager.Config": {"enable", *TITAN["checkpoint"]}},
    "validator": {"Validator.Config": {"enable", "freq"}},
    "metrics": {"MetricsProcessor.Config": {*TITAN["metrics"], "enable_wandb"}},
    "compile": {"CompileConfig": TITAN["compile"]},
    "debug": {"DebugConfig": TITAN["debug"]},
    "comm": {"CommConfig": TITAN["comm"]},
}  # fmt: skip
OFF = re.compile(r"_degree ?= ?1\b")  # "1 means disabled"


def rows(title):
    found = ROW.findall(PAGE.partition(f"## {title}\n")[2].partition("\n## ")[0])
    assert len(found) > 5
    return found


TITLES = ("TrainingArguments", "Accelerate's configuration", "Long sequences", "torchtitan's Python configs",
          "torchtitan's TOML")  # fmt: skip
ALL = [row for title in TITLES for row in rows(title)]


@pytest.mark.parametrize(("theirs", "ours"), ALL)
def test_what_is_said_here_is_taken(theirs, ours):
    words = WORD.findall(ours)
    assert " ".join(words) == ours
    load(None, words)
    assert {word.partition("=")[0] for word in words} <= KEYS.keys()
    assert set(NUMBER.findall(OFF.sub("", theirs))) - {"0"} <= set(NUMBER.findall(ours)) | {"0"}, "a number is lost"


@pytest.mark.parametrize(("theirs", "ours"), rows("TrainingArguments"))
def test_what_is_said_of_training_arguments_is_taken_there(tmp_path, theirs, ours):
    from transformers import HfArgumentParser, TrainingArguments

    words = theirs.split()
    plain = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--report_to", "none"]
    given = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses([*plain, *words])[0]
    assert {word.removeprefix("--") for word in words[::2]} <= {field.name for field in dataclasses.fields(given)}


@pytest.mark.parametrize(("theirs", "ours"), rows("Accelerate's configuration"))
def test_what_is_said_of_accelerate_is_a_key_there(theirs, ours):
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import FullyShardedDataParallelPlugin

    ((key, value),) = yaml.safe_load(theirs).items()
    assert key in {field.name for field in dataclasses.fields(ClusterConfig)}
    inner = {"fsdp_config": (FullyShardedDataParallelPlugin, "fsdp_"),
             "parallelism_config": (ParallelismConfig, "parallelism_config_")}  # fmt: skip
    if key in inner:
        kind, prefix = inner[key]
        names = {field.name for field in dataclasses.fields(kind)} | {"offload_params"}
        assert {name.removeprefix(prefix) for name in value} <= names | {"reshard_after_forward"}


THEIRS = {  # of SFTConfig and ModelConfig in TRL 1.16, of files of Axolotl 0.21 and of LLaMA-Factory 0.9.5
    "TRL": {"max_length", "packing", "load_in_4bit", "use_bnb_nested_quant", "use_peft", "lora_r"},
    "Axolotl": {"context_parallel_size", "sequence_len", "sample_packing", "adapter", "load_in_4bit", "load_in_8bit",
                "lora_r"},
    "LLaMA-Factory": {"quantization_bit", "double_quantization"},
}  # fmt: skip


@pytest.mark.parametrize(("theirs", "ours"), rows("Long sequences"))
def test_what_is_said_of_long_sequences_is_a_key_there(theirs, ours):
    from accelerate.parallelism_config import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig

    ((whose, values),) = yaml.safe_load(theirs).items()
    names = {
        field.name
        for kind in (ParallelismConfig, DeepSpeedSequenceParallelConfig)
        for field in dataclasses.fields(kind)
    }
    if whose == "DeepSpeed":
        assert values.keys() <= KNOWN
    elif whose == "Accelerate":
        (given,) = values.values()
        assert {name.removeprefix("parallelism_config_") for name in given} <= names
    else:
        assert values.keys() <= THEIRS[whose]


@pytest.mark.parametrize(("theirs", "ours"), rows("A base in 4 or 8 bits"))
def test_what_is_said_of_few_bits_is_taken_and_is_a_key_there(theirs, ours):
    from transformers import BitsAndBytesConfig

    ((whose, values),) = yaml.safe_load(theirs).items()
    assert values.keys() <= THEIRS.get(whose, inspect.signature(BitsAndBytesConfig).parameters.keys())
    quantised = load(None, ours.split()).model.quantize
    four = bool(values.get("load_in_4bit")) or values.get("quantization_bit") == 4
    assert four == (quantised in ("nf4", "nf4-double"))


@pytest.mark.parametrize(("theirs", "ours"), rows("torchtitan's TOML"))
def test_what_is_said_of_torchtitan_was_a_key_there(theirs, ours):
    ((section, values),) = tomllib.loads(theirs).items()
    assert values.keys() <= TITAN[section]


@pytest.mark.parametrize(("theirs", "ours"), rows("torchtitan's Python configs"))
def test_what_is_said_of_torchtitans_configs_is_an_argument_there(theirs, ours):
    (argument,) = ast.parse(f"Config({theirs})", mode="eval").body.keywords
    if isinstance(argument.value, ast.Constant):
        assert argument.arg in {"dump_folder", "hf_assets_path"}
    else:
        arguments = TRAINER[argument.arg][ast.unparse(argument.value.func)]
        assert {each.arg for each in argument.value.keywords} <= arguments


@pytest.mark.parametrize("title", ["torchtitan's Python configs", "torchtitan's TOML"])
def test_replicas_are_stage_0_only_where_nothing_is_sharded(title):
    """Beside a shard degree, -1 by default, they are HSDP."""
    replicated = [theirs for theirs, ours in rows(title) if "zero.stage=0" in ours]
    assert len(replicated) == 1
    assert all(re.search(r"replicate_degree ?= ?8, data_parallel_shard_degree ?= ?1\b", each) for each in replicated)


def exchanges():
    """Cells of the table of checkpoints and configurations: by direction, of torchtitan and Megatron-Bridge."""
    table = PAGE.partition("## Checkpoints of torchtitan and Megatron-Bridge\n")[2].partition("\n## ")[0]
    _, _, *lines = [line for line in table.splitlines() if line.startswith("|")]
    return {direction: cells for direction, *cells in (line.strip("| ").split(" | ") for line in lines)}


RUN = {  # direction: the test that runs it with the first of the two; nothing else is said to be run
    "its checkpoint to zero3d": ("tests/parity/test_import_dcp.py", "test_training_goes_on_from_what_fsdp_saved"),
    "its configuration to zero3d": ("tests/unit/test_migration_tables.py",
                                    "test_what_is_said_of_torchtitans_configs_is_an_argument_there"),
}  # fmt: skip


def test_checkpoints_and_configurations_go_where_a_test_runs_it_and_nowhere_else():
    found = exchanges()
    assert len(found) == 4
    for direction, cells in found.items():
        file, test = RUN.get(direction, ("", ""))
        assert cells[1] == "no"
        assert (cells[0] == "no") == (direction not in RUN)
        if file:
            assert f"(../{file})" in cells[0]
            assert f"def {test}(" in (Path(__file__).parents[2] / file).read_text()
