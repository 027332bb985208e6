"""A card's lists of what autocast casts, on the CPU: names that torch has for cards, and what they give."""

import json

import pytest
import torch
from torch._C import _dispatch_has_kernel_for_dispatch_key as has_kernel
from torch.nn import functional as F

from zero3d.config import load, to_dict
from zero3d.tools.plan.memory import memory
from zero3d.tools.plan.spec import Forward, ParallelPlan
from zero3d.tools.sim.card_autocast import IN_FP32, PROMOTED, WIDE, lists_of_cards
from zero3d.tools.sim.model_spec import open_spec

NARROW = torch.ones(4, 4, dtype=torch.bfloat16)
CASES = {
    "a norm": lambda: F.layer_norm(NARROW, (4,), NARROW[0]),
    "a softmax": lambda: NARROW.softmax(-1),
    "a sum": lambda: NARROW.sum(-1),
    "a power": lambda: NARROW.pow(2),
    "a sum of terms in two dtypes": lambda: torch.addcmul(NARROW.float(), NARROW, NARROW),
}
GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 128}


@pytest.mark.parametrize("name", [*WIDE, *IN_FP32, *PROMOTED])
def test_a_name_is_one_of_torchs_for_cards_and_none_for_the_cpu(name):
    assert has_kernel(f"aten::{name}", "AutocastCUDA")
    assert not has_kernel(f"aten::{name}", "AutocastCPU")


@pytest.mark.parametrize("case", CASES)
def test_on_a_card_it_is_in_fp32(case):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with lists_of_cards():
            assert CASES[case]().dtype == torch.float32
            assert (NARROW @ NARROW.float()).dtype == torch.bfloat16
        assert case == "a sum of terms in two dtypes" or CASES[case]().dtype == torch.bfloat16


def dry(tree):
    from zero3d.tools.sim.rank import dry_run

    return dry_run(load(tree), 0, 1).peak.nbytes


@pytest.mark.long
def test_a_dry_run_for_cards_keeps_norms_in_fp32(alone, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(GPT2 | {"architectures": ["GPT2LMHeadModel"], "use_cache": False}))
    words = [f"model.path={path}", "model.init=random", "data.length=64", "data.packing=false", "zero.stage=1"]
    words += ["train.micro_batch=4", "train.accumulate=1", "train.steps=2", "autocast=true"]
    spec = open_spec(str(path), 64, forward=Forward(True, True))
    planned = memory(spec, ParallelPlan(stage=1, micro_batch=4, autocast=True)).allocated
    assert 0.97 <= planned / alone(dry, to_dict(load(None, words))) <= 1.05
    narrower = memory(
        open_spec(str(path), 64, forward=Forward(False, True)), ParallelPlan(stage=1, micro_batch=4)
    ).allocated
    assert planned > 1.05 * narrower
