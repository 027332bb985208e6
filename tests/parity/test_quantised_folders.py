"""Folders in 8 and 4 bits already: taken as they are, with the bits that their library decodes; others refused by name."""

import json
from unittest import mock

import pytest
import torch
from bases import base_folder
from models import adamw, batch, train_engine
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM

import zero3d
from zero3d.config import Lora, Model, load
from zero3d.models.open import open_model
from zero3d.models.quantised import QuantisedLinear
from zero3d.models.trained import open_trained
from zero3d.shards.boxes import boxes, whole
from zero3d.tools.plan.memory import memory
from zero3d.tools.plan.spec import ParallelPlan
from zero3d.tools.sim.model_spec import open_spec

with mock.patch("torch.compile", lambda function=None, **_: function or (lambda each: each)):  # takes seconds
    import bitsandbytes.functional as bnb
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute as arithmetic

BATCHES = [batch(step) for step in range(3)]
LORA = {"rank": 4, "targets": ["all-linear"]}
BNB, BLOCK = {"quant_method": "bitsandbytes"}, 16
FOUR = {**BNB, "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def in_four_bits(double, kind="nf4", storage=torch.uint8, nested=256):
    def tensors(name, weight):
        codes, state = bnb.quantize_4bit(weight, None, None, 64, double, kind, storage)
        if nested != 256:
            maxima = bnb.dequantize_blockwise(state.absmax, state.state2)
            state.absmax, state.state2 = bnb.quantize_blockwise(maxima, blocksize=nested)
        scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if double else state.absmax
        values = arithmetic(codes.view(torch.uint8).view(-1), scales, state.code, 64, weight.shape, torch.float32)
        return {name: codes} | {f"{name}.{key}": each for key, each in state.as_dict(packed=True).items()}, values

    return tensors


def in_eight_bits(name, weight):
    codes, maxima, _ = bnb.int8_vectorwise_quant(weight.half())
    beside = {name.replace("weight", "SCB"): maxima, name.replace("weight", "weight_format"): torch.tensor(0).byte()}
    return {name: codes, **beside}, bnb.int8_vectorwise_dequant(codes, maxima)


def in_fp8(name, weight):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = weight.view(weight.shape[0] // BLOCK, BLOCK, -1, BLOCK).abs().amax((1, 3)) / 448
    codes = (weight / scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)).to(torch.float8_e4m3fn)
    return {name: codes, f"{name}_scale_inv": scales}, Fp8Dequantize(None)._dequantize_one(codes, scales, torch.float32)


FOLDERS = {
    "nf4": (in_four_bits(False), FOUR),
    "nf4-double": (in_four_bits(True), FOUR | {"bnb_4bit_use_double_quant": True}),
    "nf4-double-in-bf16": (
        in_four_bits(True, storage=torch.bfloat16),
        FOUR | {"bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16"},
    ),
    "int8": (in_eight_bits, {**BNB, "load_in_8bit": True}),
    "fp8": (in_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}),
}


def with_settings(folder, settings):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    return folder


def quantised_folder(folder, name, settings=None):
    """A tiny Llama whose blocks' matrices are in a format, and what its library decodes them to."""
    make, own = FOLDERS[name] if isinstance(name, str) else (name, BNB)
    base_folder(folder, hidden_size=64, intermediate_size=96)
    tensors, decoded = {}, {}
    for key, values in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            stored, decoded[key] = make(key, values)
            tensors |= {each: value.clone() for each, value in stored.items()}
        else:
            tensors[key] = values
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return with_settings(folder, settings or own), decoded


def opened_of(folder, **settings):
    return open_trained(load({"model": {"path": str(folder)}, "lora": LORA} | settings))


@pytest.mark.parametrize("name", FOLDERS)
def test_what_is_decoded_has_the_librarys_bits(tmp_path, name):
    folder, decoded = quantised_folder(tmp_path, name)
    opened = opened_of(folder)
    layers = {
        n.replace(".base_layer", ""): m for n, m in opened.module.named_modules() if isinstance(m, QuantisedLinear)
    }
    assert {f"{layer}.weight" for layer in layers} == decoded.keys()
    source = opened.weights.source
    for layer, module in layers.items():
        assert module.codec.format.name == name.removesuffix("-in-bf16")
        shape = tuple(module.packed.shape)
        packed = source(f"{layer}.packed", whole(shape))
        assert module.codec.decode(packed, module.shape, torch.float32).equal(decoded[f"{layer}.weight"])
        assert source(f"{layer}.weight", whole(module.shape)).equal(decoded[f"{layer}.weight"].bfloat16())
        for start, stop in ((0, 5), (packed.numel() // 3, packed.numel() - 2), (packed.numel() - 9, packed.numel())):
            parts = [source(f"{layer}.packed", box).reshape(-1) for box in boxes(shape, start, stop)]
            assert torch.cat(parts).equal(packed.view(-1)[start:stop])
    plain = open_model(Model(path=str(folder)))
    assert plain.weights("model.layers.1.mlp.up_proj.weight", ((3, 9), (1, 40))).equal(
        decoded["model.layers.1.mlp.up_proj.weight"][3:9, 1:40]
    )
    assert not hasattr(plain.module.config, "quantization_config")


@pytest.mark.long
@pytest.mark.parametrize("name", ["nf4-double", *(pytest.param(each, marks=pytest.mark.long) for each in FOLDERS)])
def test_losses_are_those_of_adapters_on_the_decoded_base(tmp_path, name):
    from transformers import AutoModelForCausalLM

    folder, decoded = quantised_folder(tmp_path / "quantised", name)
    full = base_folder(tmp_path / "full", hidden_size=64, intermediate_size=96)
    model = AutoModelForCausalLM.from_pretrained(full)
    model.load_state_dict({key: values.bfloat16() for key, values in decoded.items()}, strict=False)  # half to even
    model.save_pretrained(full)
    made = []
    for each in (folder, full):
        opened = opened_of(each)
        engine = zero3d.Engine(opened.module, weights=opened.weights, optimizer=adamw, clip_norm=1e-3, stage=3)
        made.append(train_engine(engine, BATCHES)[:2])
        engine.export(tmp_path / f"{each.name}-merged", "merged")
        spec = open_spec(str(each), 32, lora=Lora(rank=4, targets=("all-linear",)))
        (held,) = [entry.measured for entry in engine.memory if entry.category == "parameters"]
        assert memory(spec, ParallelPlan(stage=3)).parts["parameters"] == held or name == "fp8"  # blocks of other sizes
    assert made[0] == made[1]
    assert made[0][0][0] != made[0][0][-1]
    merged, wanted = (load_file(tmp_path / f"{each.name}-merged" / "model.safetensors") for each in (folder, full))
    assert all(values.equal(wanted[key]) for key, values in merged.items())
    assert "quantization_config" not in json.loads((tmp_path / "quantised-merged" / "config.json").read_text())


def test_experts_in_mxfp4_are_decoded_as_transformers_does(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    GptOssForCausalLM(GptOssConfig(**sizes, **heads)).save_pretrained(tmp_path)
    tensors, decoded = load_file(tmp_path / "model.safetensors"), {}
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        experts, inputs, outputs = tensors.pop(key).shape
        blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
        tensors |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
        decoded[key] = convert_moe_packed_tensors(blocks, scales)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    weights = open_model(Model(path=str(with_settings(tmp_path, {"quant_method": "mxfp4"})))).weights
    for key, values in decoded.items():
        assert weights(key, whole(tuple(values.shape))).equal(values)
        assert weights(key, ((1, 3), (0, 8), (3, 7))).equal(values[1:3, :8, 3:7])


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_what_no_library_here_decodes_is_refused_by_name(tmp_path, method):
    folder = with_settings(base_folder(tmp_path), {"quant_method": method, "bits": 4, "group_size": 64})
    with pytest.raises(zero3d.ConfigError, match=rf"\({method}\), .* bitsandbytes, fp8, mxfp4 .*model\.quantize=nf4"):
        opened_of(folder)


@pytest.mark.parametrize("kind", [{"bnb_4bit_quant_type": "fp4"}, {}])
def test_a_plan_refuses_bitsandbytes_fp4_which_is_its_default(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": BNB | {"load_in_4bit": True} | kind}))
    with pytest.raises(zero3d.ConfigError, match=r"bitsandbytes' fp4, .* model\.quantize=nf4"):
        open_spec(str(tmp_path), lora=Lora(rank=4))


def test_other_layouts_and_other_formats_are_refused(tmp_path):
    folder, _ = quantised_folder(tmp_path / "fp4", in_four_bits(False, "fp4"))
    with pytest.raises(zero3d.ConfigError, match=r"bitsandbytes' fp4 .* model\.quantize=nf4"):
        opened_of(folder)
    folder, _ = quantised_folder(tmp_path / "nested", in_four_bits(True, nested=128))
    with pytest.raises(zero3d.ConfigError, match=r"^model\..* nf4 with a scale for 64 weights and one for 128 scales;"):
        opened_of(folder)
    folder, _ = quantised_folder(tmp_path / "int8", "int8")
    with pytest.raises(zero3d.ConfigError, match=r"has model\..* in int8 already, .* leave model\.quantize out"):
        opened_of(folder, model={"path": str(folder), "quantize": "nf4"})
    folder, _ = quantised_folder(tmp_path / "fp8", "fp8", {"quant_method": "fp8", "weight_block_size": None})
    with pytest.raises(zero3d.ConfigError, match=r"other tensors than the quantization_config"):
        opened_of(folder)
