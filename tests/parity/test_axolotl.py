"""The plugin for Axolotl against the interface of its package, which is installed without its requirements."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from bases import base_folder
from models import hf
from trainers import Rows, arguments, launched, losses_of

import zero3d
from zero3d.models.quantised import QuantisedLinear

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("axolotl") is None, reason="needs axolotl's own package")]
QLORA = {"adapter": "qlora", "load_in_4bit": True, "zero3d_stage": 3}


@pytest.fixture
def plugin():
    from axolotl.integrations.base import load_plugin

    return load_plugin("zero3d.ways.axolotl.Zero3dPlugin")


def file(**keys):
    """A file of Axolotl's as its plugins are handed it: a key that it has not is None."""
    from axolotl.utils.dict import DictDefault

    return DictDefault(keys)


def test_the_plugin_is_one_of_axolotls(plugin, tmp_path):
    import transformers
    from axolotl.integrations.base import BasePlugin

    from zero3d.ways.huggingface.accelerate import Accelerator

    assert isinstance(plugin, BasePlugin)
    module, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(import_module(module), name)
    assert keys(zero3d_stage=2).zero3d_stage == 2
    with pytest.raises(ValueError, match="zero3d_stage"):
        keys(zero3d_stage=4)
    for key, value in {"deepspeed": "ds.json", "dp_shard_size": 2, "context_parallel_size": 2}.items():
        with pytest.raises(zero3d.ConfigError, match=f"{key} and zero3d_stage would shard the model twice"):
            plugin.get_trainer_cls(file(zero3d_stage=2, **{key: value}))
    try:
        assert plugin.get_trainer_cls(file(zero3d_stage=2)) is None
        with launched():
            trainer = transformers.Trainer(hf("llama"), arguments(tmp_path))
        assert trainer.zero3d.stage == 2
        assert isinstance(trainer.accelerator, Accelerator)
    finally:
        transformers.Trainer.zero3d_undo()


def settings_of(cfg):
    """The quantization_config of Axolotl's loader. Its module needs packages that are not here; this method does not."""
    import transformers

    (package,) = find_spec("axolotl").submodule_search_locations
    module = ast.parse(Path(package, "loaders", "model.py").read_text())
    methods = [node for node in ast.walk(module) if getattr(node, "name", None) == "_set_quantization_config"]
    names = {"torch": torch, "BitsAndBytesConfig": transformers.BitsAndBytesConfig}
    exec(compile(ast.Module(methods, []), "model.py", "exec"), names)
    loader = SimpleNamespace(cfg=cfg, model_config=object(), model_kwargs={}, is_fsdp_enabled=False)
    names["_set_quantization_config"](loader)
    return loader.model_kwargs["quantization_config"]


@pytest.mark.parametrize(("keys", "name"), [
    (QLORA, "nf4-double"), (QLORA | {"bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}}, "nf4"),
    (QLORA | {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": True}, "int8"),
])  # fmt: skip
def test_a_file_with_load_in_few_bits_trains_what_model_quantize_makes(plugin, tmp_path, keys, name):
    import transformers
    from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training

    cfg = file(torch_dtype=torch.bfloat16, **keys)
    plugin.register(cfg)
    plugin.pre_model_load(cfg)
    folder = base_folder(tmp_path / "base", hidden_size=64, intermediate_size=64)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=settings_of(cfg), dtype=cfg.torch_dtype
    )
    model = prepare_model_for_kbit_training(model)  # as Axolotl does: norms in fp32, blocks that torch recomputes
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    plugin.get_trainer_cls(cfg)
    try:
        with launched():
            trainer = transformers.Trainer(
                model, arguments(tmp_path, bf16=True, max_steps=3), train_dataset=Rows(16, seed=2)
            )
            trainer.train()
    finally:
        transformers.Trainer.zero3d_undo()
    layers = [module for module in model.modules() if isinstance(module, QuantisedLinear)]
    assert [layer.codec.format.name for layer in layers] == [name] * 14
    steps, _ = losses_of(trainer)
    assert steps[0][0] != steps[-1][0]


def test_kernels_that_keep_decoded_matrices_stay_off_beside_few_bits(plugin):
    cfg = file(**QLORA)
    plugin.register(cfg)
    assert [cfg[key] for key in ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel")] == [False] * 3
    plain = file(adapter="lora", zero3d_stage=3)
    plugin.register(plain)
    assert plain.lora_mlp_kernel is None  # Axolotl chooses


@pytest.mark.parametrize(("keys", "words"), [
    ({"lora_o_kernel": True}, "lora_o_kernel: true keeps every decoded matrix until backward"),
    ({"bnb_config_kwargs": {"bnb_4bit_quant_type": "fp4"}}, "bnb_4bit_quant_type: fp4 is not taken, nf4 is"),
    ({"nf4_backend": "torchao"}, "leave nf4_backend out"),
    ({"quantize_moe_experts": True}, r"quantize_moe_experts .* model\.quantize=nf4, which packs experts, too"),
    ({"load_in_4bit": False, "adapter": "lora", "gptq": True}, "gptq: true .* full-precision folder as base_model"),
])  # fmt: skip
def test_a_base_that_an_engine_cannot_take_over_is_refused_before_it_is_loaded(plugin, keys, words):
    cfg = file(**QLORA | keys)
    plugin.register(cfg)
    with pytest.raises(zero3d.ConfigError, match=words):
        plugin.pre_model_load(cfg)
