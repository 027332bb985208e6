"""The table of DeepSpeed's names in docs/deepspeed.md: what is there exists, what is not says what to use."""

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest
import torch
from models import hf

from zero3d.errors import ConfigError
from zero3d.integrations import deepspeed
from zero3d.integrations.deepspeed.names import TABLES, as_markdown

PAGE = (Path(__file__).parents[2] / "docs" / "deepspeed.md").read_text()
CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
PARTS = ("ops", "moe", "pipe", "checkpointing", "accelerator", "module_inject", "sequence", "groups")


def rows():
    """(section, name, fate, line) of each row of the page."""
    for section in TABLES:
        _, _, behind = PAGE.partition(f"### {section}\n")
        for name, fate, line in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", behind.partition("\n###")[0], re.M):
            yield section, name, fate, line


@pytest.fixture(scope="module")
def engine():
    return deepspeed.initialize(model=hf("llama"), config=CONFIG)[0]


def test_the_page_has_the_table_of_names():
    assert as_markdown() in PAGE, "docs/deepspeed.md: put in what integrations.deepspeed.names.as_markdown() returns"
    assert len(list(rows())) == sum(map(len, TABLES.values())) > 120


def place(section, engine):
    return {"deepspeed": deepspeed, "engine": engine, "deepspeed.utils": deepspeed.utils}.get(section, deepspeed.zero)


def test_every_name_is_there_or_says_what_to_use(engine):
    for section, name, fate, line in rows():
        where = place(section, engine)
        if fate in ("built", "alias"):
            assert hasattr(where, name), (section, name)
        elif section == "engine" or name in PARTS:
            with pytest.raises(AttributeError, match=re.escape(line)):
                getattr(where, name)
        else:
            with pytest.raises(ConfigError, match=re.escape(line)):
                getattr(where, name)()
        assert fate != "refused" or re.match(r"(use|write|call|leave|build|choose) ", line), line


def test_aliases_are_what_they_say(engine):
    assert deepspeed.comm is torch.distributed
    assert deepspeed.DeepSpeedConfigError is ConfigError
    assert engine.save_fp16_model.__func__ is type(engine).save_16bit_model
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        deepspeed.nothing  # noqa: B018


def test_what_the_engine_answers(engine):
    assert (engine.zero_optimization_partition_gradients(), engine.zero_optimization_partition_weights()) == (
        False,
    ) * 2
    assert (engine.loss_scale(), engine.dynamic_loss_scale(), engine.cur_scale) == (0.0, True, 1.0)
    assert engine.get_data_types() == (torch.float32, torch.float32)
    assert (engine.optimizer_name(), engine.scheduler_name(), engine.steps_per_print()) == ("AdamW", None, None)
    assert (engine.get_data_parallel_rank(), engine.get_tensor_parallel_rank(), engine.mp_world_size) == (0, 0, 1)
    assert engine.config is CONFIG
    assert engine.vocab_size == engine.module.vocab_size  # the module's, as in DeepSpeed


def test_ranks_are_started_by_what_the_launcher_says():
    deepspeed.init_distributed()
    deepspeed.init_distributed("gloo", verbose=False, dist_init_required=True)
    with pytest.raises(ConfigError, match=r"init_distributed\('mpi'\), and ranks talk by gloo here"):
        deepspeed.init_distributed("mpi")
    with pytest.raises(ConfigError, match=r"init_distributed\(init_method=...\) is not here"):
        deepspeed.init_distributed(init_method="tcp://host:1")


def test_a_programs_arguments_name_the_json(tmp_path):
    parser = deepspeed.add_config_arguments(ArgumentParser())
    (tmp_path / "ds.json").write_text('{"train_batch_size": 3, "optimizer": {"type": "AdamW"}}')
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed
    engine = deepspeed.initialize(args, hf("llama"), dist_init_required=True)[0]
    assert engine.train_batch_size() == 3


def test_a_loader_begins_anew():
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]
