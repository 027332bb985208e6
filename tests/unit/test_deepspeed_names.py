"""The table of DeepSpeed's names in docs/deepspeed-reference.md: what is there exists, what is not says what to use."""

import logging
import re
from argparse import ArgumentParser
from functools import reduce
from importlib import import_module
from pathlib import Path
from types import resolve_bases

import pytest
import torch
from models import hf

from zero3d.errors import ConfigError
from zero3d.ways import deepspeed
from zero3d.ways.deepspeed.names import INSTEAD

PAGE = (Path(__file__).parents[2] / "docs" / "deepspeed-reference.md").read_text()
CONFIG = {"train_batch_size": 2, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 1}}
HERE = "zero3d.ways.deepspeed"


def rows():
    """(section, name, fate, line) of each row of the page's tables of names."""
    names = PAGE.partition("\n## Every name\n")[2].partition("\n## ")[0]
    for section in names.split("\n### ")[1:]:
        title = section.partition("\n")[0].removeprefix("deepspeed").strip(".")
        for name, fate, line in re.findall(r"^\| `(\w+)` \| (\w+) \| (.*) \|$", section, re.M):
            yield title, name, fate, line


@pytest.fixture(scope="module")
def engine():
    return deepspeed.initialize(model=hf("llama"), config=CONFIG)[0]


def test_the_page_says_of_every_refused_name_what_to_use():
    refused = {f"{section}.{name}".strip("."): line for section, name, fate, line in rows() if fate == "refused"}
    assert refused == {name.removesuffix(".*"): line for name, line in INSTEAD.items()}
    assert len(list(rows())) > 140


def test_every_name_is_there_or_says_what_to_use(engine):
    for section, name, fate, line in rows():
        where = engine if section == "engine" else reduce(getattr, filter(None, section.split(".")), deepspeed)
        full = f"{section}.{name}".strip(".")
        if f"{full}.*" in INSTEAD:
            with pytest.raises(ConfigError, match=re.escape(line)):
                import_module(f"{HERE}.{full}.some.part")
        if fate in ("built", "alias"):
            assert hasattr(where, name), full
        elif section == "engine" or f"{full}.*" in INSTEAD:
            with pytest.raises(AttributeError, match=re.escape(line)):
                getattr(where, name)
        else:
            for use in (lambda named: named(), lambda named: type("Derived", resolve_bases((named,)), {})):
                with pytest.raises(ConfigError, match=re.escape(line)):
                    use(getattr(where, name))
        assert fate != "refused" or re.match(r"(use|write|call|leave|build|choose) ", line), line


def test_aliases_are_what_they_say(engine):
    assert deepspeed.comm is torch.distributed
    assert deepspeed.DeepSpeedConfigError is ConfigError
    assert engine.save_fp16_model.__func__ is type(engine).save_16bit_model
    assert import_module(f"{HERE}.comm") is deepspeed.comm
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        deepspeed.nothing  # noqa: B018


@pytest.mark.parametrize(("line", "words"), [
    ("from HERE.ops.lamb import FusedLamb", r"no deepspeed\.ops\.lamb here: use torch\.optim"),
    ("from HERE.pipe import PipelineModule, LayerSpec", r"no deepspeed\.pipe here: use zero3d\.Engine"),
    ("from HERE import moe", r"no deepspeed\.moe here: use a Hugging Face model"),
    ("from HERE.runtime.utils import clip_grad_norm_; clip_grad_norm_([], 1.0)", "use torch's own"),
    ("import HERE.runtime.lr_schedules", "write scheduler in the JSON"),
    ("from HERE.runtime.zero.partition_parameters import ZeroParamStatus", "GatheredParameters"),
    ("from HERE.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict", "use zero3d ckpt export"),
    ("from HERE.ops.adam import FusedAdam; FusedAdam([], bias_correction=False)", "with bias_correction=False"),
    ("from HERE import PipelineModule\nclass Mine(PipelineModule): pass", "which cuts a plain model"),
])  # fmt: skip
def test_the_usual_imports_of_what_is_not_here_say_what_to_use(line, words):
    with pytest.raises((ConfigError, AttributeError), match=words):
        exec(line.replace("HERE", HERE))


def test_other_imports_go_their_way():
    found = {}
    exec(f"import {HERE}.comm as dist\nfrom {HERE}.comm import all_reduce", found)
    assert (found["dist"], found["all_reduce"]) == (torch.distributed, torch.distributed.all_reduce)
    assert torch.distributed.__spec__.name == "torch.distributed"
    for missing in ("nothing", "utils.nothing", "zero.nothing", "runtime.nothing"):
        with pytest.raises(ModuleNotFoundError, match=f"No module named '{HERE}.{missing}'"):
            import_module(f"{HERE}.{missing}")
    with pytest.raises(ImportError):
        import_module(f"{HERE}.ops.lamb")
    assert not isinstance(torch.nn.Linear(1, 1), deepspeed.PipelineModule)


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
    with pytest.raises(ConfigError, match=r"init_distributed\(init_method=...\) is not supported"):
        deepspeed.init_distributed(init_method="tcp://host:1")


def test_a_programs_arguments_name_the_json(tmp_path):
    parser = deepspeed.add_config_arguments(ArgumentParser())
    (tmp_path / "ds.json").write_text('{"train_batch_size": 3, "optimizer": {"type": "AdamW"}}')
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(tmp_path / "ds.json")])
    assert args.deepspeed
    engine = deepspeed.initialize(args, hf("llama"), dist_init_required=True)[0]
    assert engine.train_batch_size() == 3


def logged():
    """Which of these calls log on this rank."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    deepspeed.utils.logger.addHandler(handler)
    try:
        for ranks in (None, [], [0], [1, 0], [-1]):
            deepspeed.log_dist(f"of {ranks}", ranks=ranks, level=logging.ERROR)
    finally:
        deepspeed.utils.logger.removeHandler(handler)
    return lines


def test_a_line_is_logged_by_the_ranks_that_are_named(ranks):
    assert ranks(2, logged) == [
        ["[Rank 0] of [0]", "[Rank 0] of [1, 0]", "[Rank 0] of [-1]"],
        ["[Rank 1] of [1, 0]", "[Rank 1] of [-1]"],
    ]


def test_a_loader_begins_anew():
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1]


def test_names_of_many_programs_are_torchs_own(capsys, recwarn):
    adam, runtime_utils = import_module(f"{HERE}.ops.adam"), import_module(f"{HERE}.runtime.utils")
    get_accelerator = import_module(f"{HERE}.accelerator").get_accelerator
    weights = [torch.nn.Parameter(torch.ones(2))]
    assert type(adam.FusedAdam(weights, lr=0.5, weight_decay=0.1)) is torch.optim.AdamW
    assert type(adam.FusedAdam(weights, adam_w_mode=False)) is torch.optim.Adam
    assert adam.FusedAdam(weights).defaults["weight_decay"] == 0.0  # torch's own decays
    assert adam.DeepSpeedCPUAdam(weights, betas=(0.8, 0.9)).param_groups[0]["betas"] == (0.8, 0.9)
    assert deepspeed.ops.adam is adam
    assert deepspeed.get_accelerator() is get_accelerator()
    assert torch.zeros(1, device=get_accelerator().current_device_name()).device == torch.zeros(1).device
    assert get_accelerator().Stream is torch.cpu.Stream  # the device module's
    assert deepspeed.utils.logger.name == "zero3d"
    assert deepspeed.log_dist is deepspeed.utils.log_dist
    runtime_utils.see_memory_usage("not asked for")
    assert capsys.readouterr().out == ""
    runtime_utils.see_memory_usage("after the model", force=True)
    assert capsys.readouterr().out.startswith("after the model: allocated ")
    for _ in range(2):
        with deepspeed.zero.Init(remote_device="cpu"):
            model = torch.nn.Linear(2, 2)
    assert model.weight.numel() == 4
    assert sum("zero.Init does nothing" in str(each.message) for each in recwarn) == 1
