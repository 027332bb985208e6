"""Models that somebody has loaded in 4 and 8 bits: an engine trains the same bytes, and they have one copy over ranks."""

from functools import partial

import pytest
import torch
from bases import base_folder
from models import adamw, batch, train_engine
from torch import nn
from trainers import logged
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import zero3d
from zero3d.config import load
from zero3d.models.bitsandbytes_layers import take_over
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.trained import open_trained

BATCHES = [batch(step) for step in range(3)]
HOW = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4-double": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "int8": {"load_in_8bit": True},
}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(base_folder(tmp_path_factory.mktemp("base"), hidden_size=64, intermediate_size=64))


def adapted(folder, how=None):
    """A PEFT model, as Trainer and TRL make it; adapters are the same in every call."""
    from peft import LoraConfig, get_peft_model

    config = None if how is None else BitsAndBytesConfig(**HOW[how])
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.bfloat16)
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(**LORA), autocast_adapter_dtype=False).train()


def decoded_of(folder, how):
    """The model in bf16, whose matrices are what bitsandbytes' layers decode to."""
    packed, plain = adapted(folder, how), adapted(folder)
    assert take_over(packed, torch.bfloat16) == 14
    layers = {name: module for name, module in packed.named_modules() if isinstance(module, QuantisedLinear)}
    drawn = dict(packed.named_parameters())
    with torch.no_grad():
        for name, layer in layers.items():
            assert layer.codec.format.name == how
            plain.get_submodule(name).weight.copy_(layer.weight)
        for name, p in plain.named_parameters():
            if "lora_" in name:  # PEFT draws those in bf16 where the base is in bf16
                p.data = drawn[name].detach().clone()
    return plain


def trained(folder, how, stage):
    found = []
    for model in (adapted(folder, how), decoded_of(folder, how)):
        engine = zero3d.Engine(model, stage=stage, optimizer=adamw, clip_norm=1e-3)
        found.append(train_engine(engine, BATCHES)[:2])
    return found


@pytest.mark.parametrize("how", ["nf4-double", *(pytest.param(how, marks=pytest.mark.long) for how in ("nf4", "int8"))])
def test_losses_are_those_of_the_decoded_base_on_two_ranks(ranks, folder, how):
    found, other = ranks(2, trained, folder, how, 3)
    assert found[0] == found[1] == other[0]
    assert found[0][0][0] != found[0][0][-1]


@pytest.mark.long
def test_an_exported_adapter_computes_the_same_on_a_base_that_bitsandbytes_has_quantised(folder, tmp_path):
    from peft import PeftModel

    narrow = str(tmp_path / "base")  # of bf16: transformers would round a folder in fp32 before it is quantised
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(narrow)
    opened = open_trained(load({"model": {"path": narrow, "quantize": "nf4"}, "lora": {"rank": 4}}))
    engine = zero3d.Engine(opened.module, weights=opened.weights, stage=3, optimizer=adamw)
    train_engine(engine, BATCHES)
    adapter, ids = engine.export(tmp_path / "adapter", "adapter"), BATCHES[0]
    with torch.no_grad():
        wanted = float(engine(input_ids=ids, labels=ids).loss)
    found = {}
    for how in ("nf4", None):
        config = None if how is None else BitsAndBytesConfig(**HOW[how])
        base = AutoModelForCausalLM.from_pretrained(narrow, quantization_config=config, dtype=torch.bfloat16)
        model = PeftModel.from_pretrained(base, adapter, autocast_adapter_dtype=False)
        with torch.no_grad():
            found[how] = float(model(input_ids=ids, labels=ids).loss)
    assert found["nf4"] == pytest.approx(wanted, rel=1e-3)  # its kernel on CPUs adds up in another order
    assert found[None] == pytest.approx(wanted, rel=2e-2)
    assert abs(found["nf4"] - wanted) < abs(found[None] - wanted) / 2


def in_trainer(folder, output):
    """What transformers' Trainer on our engine logs on a base of bitsandbytes, and on what that decodes to."""
    made = (partial(adapted, folder, "nf4-double"), partial(decoded_of, folder, "nf4-double"))
    options = {"bf16": True, "max_steps": 3}
    return [logged(3, f"{output}/{number}", options, None, model) for number, model in enumerate(made)]


@pytest.mark.long
def test_transformers_own_trainer_trains_beside_a_bitsandbytes_config_at_stage_3(ranks, folder, tmp_path):
    found, other = ranks(2, in_trainer, folder, str(tmp_path))
    assert found[0] == found[1] == other[0]
    steps, _ = found[0]
    assert len(steps) == 3
    assert steps[0][0] != steps[-1][0]


def test_layers_that_are_not_quantised_yet_are_refused():
    import bitsandbytes as bnb

    model = nn.Sequential(bnb.nn.Linear4bit(64, 64))
    with pytest.raises(zero3d.ConfigError, match=r"0 is a Linear4bit .* torch\.float32, not quantised yet"):
        take_over(model, torch.bfloat16)
