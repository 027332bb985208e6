"""Models that somebody has loaded in 4 and 8 bits: an engine trains the same bytes, and they have one copy over ranks."""

import gc
from functools import partial
from weakref import ref

import pytest
import torch
from bases import base_folder
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit
from models import adamw, batch, train_engine
from safetensors.torch import load_file
from torch import nn
from trainers import logged
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import zero3d
from zero3d.config import load
from zero3d.models.bitsandbytes_layers import take_over
from zero3d.models.codecs import CODECS, packed_of
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


def packed_in(folder, **how):
    """The bytes of a model's layers as an engine takes them over, by name."""
    config = BitsAndBytesConfig(**HOW[how.pop("bits", "nf4")], **how.pop("settings", {}))
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32, **how)
    assert take_over(model, torch.bfloat16) == 14
    return {name: layer.packed for name, layer in model.named_modules() if isinstance(layer, QuantisedLinear)}


def test_a_program_that_loads_in_4_bits_has_the_bytes_of_model_quantize(folder):
    weights = load_file(f"{folder}/model.safetensors")
    for name, packed in packed_in(folder).items():
        assert packed.equal(packed_of(CODECS["nf4"], weights[f"{name}.weight"]))


@pytest.mark.parametrize("how", [
    {"settings": {"bnb_4bit_quant_storage": "bfloat16"}},  # as Axolotl does
    *(pytest.param({"device_map": where}, marks=pytest.mark.long) for where in ("auto", {"": "cpu"})),
])  # fmt: skip
def test_bytes_are_the_same_wherever_and_in_whatever_dtype_a_program_stores_them(folder, how):
    wanted = packed_in(folder, bits="nf4-double")
    for name, packed in packed_in(folder, bits="nf4-double", **how).items():
        assert packed.equal(wanted[name])


@pytest.mark.long
def test_hooks_of_accelerate_that_a_device_map_leaves_stay_around_packed_layers(folder):
    from accelerate import dispatch_model

    plain, hooked = adapted(folder, "nf4"), adapted(folder, "nf4")
    dispatch_model(hooked, {"": "cpu"}, force_hooks=True)
    found = [train_engine(zero3d.Engine(model, stage=3, optimizer=adamw), BATCHES)[:2] for model in (plain, hooked)]
    assert found[0] == found[1]


def start_as_loftq_does(model, weights):
    """Have adapters begin with what quantising has lost (Li et al., 2023, one step): PEFT's own needs a GPU."""
    from peft.tuners.lora import bnb

    for name, layer in model.get_base_model().named_modules():
        if isinstance(layer, bnb.Linear4bit):
            decoded = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
            u, s, v = torch.linalg.svd(weights[f"{name}.weight"] - decoded, full_matrices=False)
            rank = layer.r["default"]
            layer.lora_A["default"].weight.data = s[:rank, None].sqrt() * v[:rank]
            layer.lora_B["default"].weight.data = u[:, :rank] * s[:rank].sqrt()


@pytest.mark.long
def test_adapters_that_a_program_starts_as_loftq_does_stay_so_and_are_exported_for_the_quantised_base(folder, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    def load(bits=None):
        config = None if bits is None else BitsAndBytesConfig(**HOW[bits], bnb_4bit_compute_dtype="float32")
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).train()

    def loss_of(model):
        with torch.no_grad():
            return float(model(input_ids=BATCHES[0], labels=BATCHES[0]).loss)

    choice = LoraConfig(r=32, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    full, zero = loss_of(load()), loss_of(load("nf4"))
    model = get_peft_model(load("nf4"), choice)
    start_as_loftq_does(model, load_file(f"{folder}/model.safetensors"))
    engine = zero3d.Engine(model, stage=3, precision="fp32", optimizer=adamw)
    assert abs(loss_of(engine) - full) < abs(zero - full)
    train_engine(engine, BATCHES)
    adapter, wanted = engine.export(tmp_path / "adapter", "adapter"), loss_of(engine)
    again = PeftModel.from_pretrained(load("nf4"), adapter).train()  # evaluated, the library multiplies in bf16 on CPUs
    assert loss_of(again) == pytest.approx(wanted, rel=1e-5)


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


@pytest.mark.long
def test_an_engine_lets_go_of_the_librarys_layers_and_gives_back_packed_ones(folder):
    model = adapted(folder, "nf4")
    theirs = [ref(module.weight) for module in model.modules() if isinstance(module, Linear4bit)]
    assert len(theirs) == 14
    engine = zero3d.Engine(model, stage=3, optimizer=adamw)
    gc.collect()
    assert not any(weight() is not None for weight in theirs)
    train_engine(engine, BATCHES[:1])
    with torch.no_grad():
        wanted = float(engine(input_ids=BATCHES[1], labels=BATCHES[1]).loss)
    engine.close()
    again = zero3d.Engine(model, stage=2, optimizer=adamw)
    with torch.no_grad():
        assert float(again(input_ids=BATCHES[1], labels=BATCHES[1]).loss) == wanted


def test_the_type_that_transformers_takes_by_default_is_refused_with_the_other(folder):
    with pytest.raises(zero3d.ConfigError, match=r"fp4 .* bnb_4bit_quant_type='nf4'\), whose default is fp4"):
        take_over(
            AutoModelForCausalLM.from_pretrained(folder, quantization_config=BitsAndBytesConfig(load_in_4bit=True)),
            torch.bfloat16,
        )


def test_layers_that_are_not_quantised_yet_are_refused():
    import bitsandbytes as bnb

    model = nn.Sequential(bnb.nn.Linear4bit(64, 64))
    with pytest.raises(zero3d.ConfigError, match=r"0 is a Linear4bit .* torch\.float32, not quantised yet"):
        take_over(model, torch.bfloat16)
