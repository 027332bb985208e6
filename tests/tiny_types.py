"""Tiny models of every type that AutoModelForCausalLM builds, with a layer of each kind that the type's file defines.

Configs are shrunk as those of images and text are (zero3d.tools.vision.tiny); what its rules cannot say is in OWN. Types
with towers are there.
"""

import copy

import torch
from families import CONFIGS
from hybrids import HYBRIDS

from zero3d.models.layer_kinds import with_each_kind
from zero3d.tools.vision.tiny import OWN as WITH_TOWERS, PLAIN_ROPE, _shrunk, types as types_with_images

LARGEST = 8_000_000
SIZES = {  # names that configs of text alone have
    "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_ctx": 128, "n_inner": 48, "rotary_dim": 4,
    "emb_dim": 32, "n_layers": 2, "n_heads": 4, "dff": 48, "ffn_dim": 48, "d_inner": 48, "d_head": 8,
    "num_layers": 2, "attention_heads": 4, "num_decoder_layers": 2, "num_encoder_layers": 2,
    "decoder_start_token_id": 0, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
}  # fmt: skip
OWN = {
    "blenderbot": {"vocab_size": 64, "decoder_layers": 2, "decoder_ffn_dim": 48, "decoder_attention_heads": 4},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "gemma3n_text": {"intermediate_size": 48},
    "gemma4_text": {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "attention_layers": ["global", "local"]},
    "granitemoehybrid": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "hunyuan_v1_dense": {"rope_parameters": PLAIN_ROPE | {"alpha": 1.0}, "head_dim": 8},
    "hunyuan_v1_moe": {"rope_parameters": PLAIN_ROPE | {"alpha": 1.0}, "head_dim": 8},
    "jamba": {"num_experts": 4, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
    "longcat_flash": {"head_dim": 8, "num_layers": 2, "ffn_hidden_size": 48, "expert_ffn_hidden_size": 16, "zero_expert_num": 2},
    "marian": {"decoder_vocab_size": 64, "vocab_size": 64, "pad_token_id": 2, "eos_token_id": 1},
    "ministral": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "nemotron_h": {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "moe"], "moe_intermediate_size": 16,
        "moe_shared_expert_intermediate_size": 16,
    },
    "plbart": {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_attention_heads": 4},
    "roc_bert": {"pronunciation_vocab_size": 16, "shape_vocab_size": 16, "shape_embed_dim": 8, "pronunciation_embed_dim": 8},
    "rwkv": {"rescale_every": 0},  # evaluation would divide weights in place
    "whisper": {
        "vocab_size": 64, "pad_token_id": 2, "bos_token_id": 0, "eos_token_id": 1, "decoder_layers": 2,
        "decoder_ffn_dim": 48, "decoder_attention_heads": 4,
    },
    "xmod": {"default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def types():
    """Every type that AutoModelForCausalLM builds and that has no images."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    return sorted({*NAMES} - {*types_with_images()})


def config(kind):
    """A small config of a type."""
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    usual = CONFIG_MAPPING[kind]()
    usual_values = usual.to_dict()
    given = {name: size for name, size in SIZES.items() if isinstance(usual_values.get(name), int) or name == "n_inner"}
    given = {name: size for name, size in given.items() if name in usual_values}
    values = _shrunk(usual, "") | given | CONFIGS.get(kind, {}) | HYBRIDS.get(kind, {}) | _as_beside_a_tower(kind)
    if "kv_lora_rank" in values and "num_key_value_heads" in values:
        values["num_key_value_heads"] = values["num_attention_heads"]
    values |= OWN.get(kind, {})

    def make(**options):
        made = type(usual)(**copy.deepcopy(values) | options)
        made.use_cache = False
        return made

    def build(made):
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(copy.deepcopy(made))

    return with_each_kind(make, build)


def _as_beside_a_tower(kind):
    own = WITH_TOWERS.get(kind.removesuffix("_text"), {}) if kind.endswith("_text") else {}
    return {name.removeprefix("text_config."): value for name, value in own.items() if name.startswith("text_config.")}


def model(kind):
    """A small model in training mode, the same weights at every call; biases and norms are moved."""
    from transformers import AutoModelForCausalLM

    made = config(kind)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(made)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters: no rule shrinks it")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        found = AutoModelForCausalLM.from_config(made)
        for p in found.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    if hasattr(found, "set_experts_implementation"):
        found.set_experts_implementation("eager")
    return found.train()
