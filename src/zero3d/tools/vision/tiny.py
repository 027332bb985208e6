"""Tiny models of every type that AutoModelForImageTextToText builds, and micro-batches with images for each.

A type's own config, with the sizes that transformers gives it, is shrunk by rules: a rule is a key and a small value,
of text models (TEXT), of towers (TOWER), of special tokens (TOKENS). What follows from sizes, such as kinds of layers,
is made anew by the config's own class. What rules cannot say of a type is in OWN.

    tiny_model   vocabulary 64, two blocks, width 32
    micro_batch  rows of ids, text START IMAGE... END text, and their pixels as the type's processor makes them, drawn
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of
from zero3d.models.document_masks import TOLD_APART
from zero3d.models.foreign_code import no_foreign_code
from zero3d.models.images import image_features, image_inputs, repeated

IMAGE, START, END, VIDEO, AUDIO = 63, 62, 61, 60, 59  # what stands for an image's features, and what is around them
FIRST, TEXTS = 3, 50  # tokens of text: the first, and how many
LARGEST = 8_000_000  # parameters of what is still tiny

TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2, "sliding_window": 4,
    "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    # experts
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_k": 2, "moe_topk": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "n_shared_experts": 1, "moe_num_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "intermediate_size_mlp": 48,
    # latent and linear attention, embeddings by layer
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "global_head_dim": 8,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "depth": 2, "num_heads": 2, "embed_dim": 32, "head_dim": 16, "image_size": 28,
    "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "num_position_embeddings": 16,
    "out_hidden_size": 32, "projection_dim": 32, "window_size": 28, "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0, 1], "position_embedding_size": 64, "num_patches": 4, "projector_hidden_size": 32,
    "vocab_size": 64, "projection_hidden_size": 32, "mm_tokens_per_image": 4, "text_hidden_size": 32,
    "output_channels": 32, "mlp_dim": 32, "image_seq_length": 4, "initializer_range": 0.02,
    # of sounds
    "encoder_layers": 2, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "d_model": 32, "output_dim": 32,
    "output_proj_dims": 32, "downsample_hidden_size": 8,
}  # fmt: skip
TOKENS = {  # what the name of a special token has in it -> the token
    "image_token": IMAGE, "image_patch": IMAGE, "video_token": VIDEO, "audio": AUDIO, "video_start": 58,
    "video_end": 57, "start": START, "bo": START,
    "end": END, "eo": END,
}  # fmt: skip
M_ROPE = {  # sections of half a head
    "rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4, "partial_rotary_factor": 1.0,
}  # fmt: skip
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type", "indexer_types")  # by layer
TOWERS = ("vision", "audio", "vq", "sam", "high_res", "qformer", "perceiver", "adapter", "encoder_config")
RANDOM = ("drop", "jitter")  # which comparisons are not
NEITHER = ("model_type", "architectures", "dtype", "transformers_version", "per_layer_config")
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
CODES = 53  # the first of tokens that images are turned into
VQ = {  # normalisations are of 32 groups
    "embed_dim": 8, "num_embeddings": 4, "latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1],
    "num_res_blocks": 1, "attn_resolutions": None, "hidden_size": 32,
}  # fmt: skip
SAM = {"vision_config.sam_config.global_attn_indexes": [1], "vision_config.sam_config.downsample_channels": [32, 32]}
PINPOINTS = {"image_grid_pinpoints": [[28, 56], [56, 28]]}
GEMMA_TOWER = {name: TOWER[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "head_dim")} | {
    "num_attention_heads": 2, "num_key_value_heads": 2, "patch_size": 4, "position_embedding_size": 64,
}  # fmt: skip
WITH_M_ROPE = (
    "ernie4_5_vl_moe", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker",
    "qwen2_5_vl", "qwen2_vl",
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {  # of a type on top of the rules, by dotted name
    "aria": {"projector_patch_to_query_dict": {4: 4, 16: 8}},
    "aya_vision": {"vision_config.patch_size": 7},
    "cohere2_vision": {"alignment_intermediate_size": 64, "vision_config.patch_size": 7},
    "cohere_compass": {
        "text_config.layer_types": ["sliding_attention", "full_attention"],
        "text_config.rope_parameters": {"sliding_attention": PLAIN_ROPE, "full_attention": PLAIN_ROPE},
    },
    "chameleon": {"vq_config": VQ | {"resolution": 32, "attn_type": "none"}, "vocabulary_map": {
        "<image>": IMAGE, **{f"IMGIMG{letter}Z": number for number, letter in enumerate("ABCD", CODES)},
    }},
    "deepseek_ocr2": SAM | {"text_config.mlp_layer_types": ["dense", "sparse"], "text_config.num_experts_per_tok": 2},
    "deepseek_vl_hybrid": {
        "high_res_vision_config.global_attn_indexes": [1], "high_res_vision_config.output_channels": 8,
    },
    "diffusion_gemma": {
        "text_config.num_experts": 4, "text_config.top_k_experts": 2, "text_config.moe_intermediate_size": 16,
        "vision_config": GEMMA_TOWER, "canvas_length": 8,
    },
    "dots3_note": {
        "text_config.num_key_value_heads": 4, "text_config.shared_experts_intermediate_size": 16,
        "text_config.head_dim": 16, "text_config.index_n_heads": 2, "text_config.index_head_dim": 8,
        **{f"text_config.swa_{name}": size for name, size in {
            "num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "head_dim": 16,
            "qk_nope_head_dim": 8, "v_head_dim": 8,
        }.items()}, "vision_config.num_local_experts": 4, "vision_config.moe_intermediate_size": 16,
        "vision_config.adapter_in_dim": 32, "vision_config.adapter_out_dim": 32,
        "audio_config.adapter_input_size": 32, "audio_config.adapter_out_dim": 32,
    },
    "emu3": {
        "vq_config": VQ | {"codebook_size": 4, "temporal_downsample_factor": 2, "attn_resolutions": [3]},
        "vocabulary_map": {
            "<image>": IMAGE, "<|extra_200|>": CODES + 4,
            **{f"<|visual token {number:06d}|>": CODES + number for number in range(4)},
        },
    },
    "florence2": {"vision_config": {
        "model_type": "florence_vision", "depths": [1, 1], "patch_size": [7, 3], "patch_stride": [4, 2],
        "patch_padding": [3, 1], "patch_prenorm": [False, True], "embed_dim": [16, 32], "num_heads": [2, 2],
        "num_groups": [2, 2], "window_size": 4, "projection_dim": 32, "drop_path_rate": 0.0,
    }},
    "gemma4": {"vision_config": GEMMA_TOWER},
    "gemma4_unified": {
        "vision_config": {"patch_size": 4, "mm_embed_dim": 32, "mm_posemb_size": 64, "output_proj_dims": 32},
    },
    "glm5_next": {
        "text_config.num_key_value_heads": 4, "text_config.qk_rope_head_dim": 0, "text_config.head_dim": 0,
        "text_config.linear_head_dim": 8, "text_config.linear_num_heads": 4, "text_config.index_n_heads": 2,
        "text_config.index_head_dim": 8, "text_config.index_topk": 8, "text_config.index_kpool": 2,
        "vision_config.projection_intermediate_size": 32,
    },
    "granite4_vision": PINPOINTS | {
        "downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1, 2, 3, 4],
        "text_config.num_hidden_layers": 5,
        "projector_dropout": 0.0, "qformer_config": {
            "model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 32, "hidden_size": 32,
            "num_attention_heads": 2, "encoder_hidden_size": 32, "cross_attention_frequency": 1,
            "max_position_embeddings": 64, "use_qformer_text_input": False, "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        }, "vision_config.patch_size": 7, "vision_config.hidden_size": 64,
    },
    "granite_docling": {"vision_config.patch_size": 7, "vision_config.scale_factor": 2},
    "hunyuan_vl": {
        "text_config.head_dim": 8,
        "text_config.rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "alpha": 1.0, "mrope_section": [1, 1, 1, 1],
        },
        "vision_config.max_image_size": 56, "vision_config.min_image_size": 28, "vision_config.temporal_patch_size": 1,
    },
    "idefics3": {"vision_config.patch_size": 7},
    "inkling2": {
        "vision_config.projection_hidden_dim": 32, "vision_config.posemb_grid_size": 4,
        "text_config.swa_num_attention_heads": 4, "text_config.swa_num_key_value_heads": 2,
        "text_config.swa_head_dim": 8, "text_config.sliding_window_size": 4, "text_config.d_rel": 4,
        "text_config.rel_extent": 16,
    },
    "inkling_mm_model": {
        "text_config.logits_mup_width_multiplier": 1.0, "text_config.swa_num_attention_heads": 4,
        "text_config.swa_num_key_value_heads": 2, "text_config.swa_head_dim": 8, "text_config.sliding_window_size": 4,
        "text_config.d_rel": 4, "text_config.rel_extent": 16, "text_config.mlp_layer_types": ["dense", "sparse"],
        "vision_config.patch_size": 4,
        "audio_config.n_mel_bins": 2, "audio_config.mel_vocab_size": 4, "vision_config.num_hidden_layers": 5,
    },
    "internvl": {"vision_config.patch_size": [7, 7]},
    "kimi_k25": {"text_config.num_key_value_heads": 4},
    "lfm2_vl": {"text_config.layer_types": ["conv", "full_attention"]},
    "lighton_ocr": {"spatial_merge_size": 1},
    "llama4": {
        "vision_config.patch_size": 7, "vision_config.intermediate_size": 128, "vision_config.vision_output_dim": 32,
        "vision_config.projector_input_dim": 32, "vision_config.projector_output_dim": 32,
        "text_config.attention_chunk_size": 8,
    },
    "llava_next": PINPOINTS,
    "llava_next_video": PINPOINTS,
    "llava_onevision": PINPOINTS,
    "mistral3": {"spatial_merge_size": 1},
    "mistral_large4": {"spatial_merge_size": 1, "text_config.num_key_value_heads": 4},
    "minicpm_ocr": {"image_token_id": IMAGE, "insert_layer_id": 1},
    "minicpmv4_6": {"image_token_id": IMAGE, "insert_layer_id": 1},
    "minicpmv4_7": {"image_token_id": IMAGE, "insert_layer_id": 1},
    "molmo2": {"vision_config.image_size": [28, 28], "vision_config.num_position_embeddings": 4,
               "adapter_config.vision_feature_layer": [-1, -2]},
    "janus": {"vision_config.patch_size": 7, "vision_config.num_image_tokens": 16,
              "vq_config": VQ | {"projection_dim": 32, "image_token_embed_dim": 32}},
    "muse_glimmer": {"out_hidden_size": 32 * 4, "vision_config.merge_size": 2},
    "muse_spark": {
        "out_hidden_size": 32 * 4, "text_config.moe_hidden_size": 16,
        "text_config.mlp_layer_types": ["dense", "sparse"],
        "audio_config.depths": [1, 1], "audio_config.hidden_sizes": [8, 8], "audio_config.patch_sizes": [4, 2],
    },
    "nemotron_h_omni": {
        "image_token_id": IMAGE, "vision_hidden_size": 32, "text_config.num_hidden_layers": 3,
        "text_config.layers_block_type": ["mamba", "moe", "attention"],
        "vision_config.max_img_size": 56, "text_config.mamba_num_heads": 4,
        "text_config.mamba_head_dim": 8, "text_config.n_groups": 1, "text_config.ssm_state_size": 8,
        "text_config.chunk_size": 8, "text_config.moe_shared_expert_intermediate_size": 16,
    },
    "qianfan_ocr": {"vision_config.patch_size": [7, 7]},
    "qwen3_omni_moe_thinker": {"text_config.mlp_only_layers": [0]},
    "qwen3_vl_moe": {"text_config.mlp_only_layers": [0]},
    "qwen4_exp": {
        "text_config.indexer_n_heads": 2, "text_config.indexer_kv_heads": 1, "text_config.indexer_head_dim": 8,
        "text_config.indexer_budget": 8, "text_config.indexer_compress_ratio": 2, "text_config.hc_lowrank": 8,
    },
    "smolvlm": {"vision_config.patch_size": 7},
    "step3p7": {"text_config.sliding_window": 4, "text_config.share_expert_dim": 16},
    "unlimited_ocr": SAM,
    "vipllava": {"vision_feature_layer": [-1, -2]},
    **{kind: {"text_config.rope_parameters": M_ROPE} for kind in WITH_M_ROPE},
}  # fmt: skip


def types() -> dict[str, str]:
    """Return every type that AutoModelForImageTextToText builds, and the name of its class."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as NAMES

    return {kind: name if isinstance(name, str) else name[0] for kind, name in sorted(NAMES.items())}


def tiny_config(kind: str, **options: Any) -> Any:
    """Return a small config of a type, without dropout. Raises ConfigError where its class takes no such sizes."""
    from transformers import CONFIG_MAPPING

    try:
        usual = CONFIG_MAPPING[kind]()
        values = _shrunk(usual, "")
        for name, value in OWN.get(kind, {}).items():
            *path, last = name.split(".")
            at = values
            for step in path:
                at = at.setdefault(step, {})
            at[last] = copy.deepcopy(value)
        return type(usual)(**values | {"architectures": [types()[kind]]} | options)
    except Exception as error:  # any error of the config's own, quoted
        raise ConfigError(f"there is no tiny config of {kind} ({_said(error)})") from error


def tiny_model(kind: str, seed: int = 3, **options: Any) -> nn.Module:
    """Return a small model of a type in training mode, the same weights at every call of a seed.

    Biases and norms are moved and matrices of zeros drawn, so that everything has an influence. Raises ConfigError.
    """
    config = tiny_config(kind, **options)
    try:
        return _built(config, seed)
    except Exception as error:  # any error of the model's own, quoted
        raise ConfigError(f"there is no tiny model of {kind} ({_said(error)})") from error


def micro_batch(
    model: nn.Module, generator: torch.Generator, images: Sequence[int] = (1, 1), text: int = 12
) -> dict[str, Tensor]:
    """Return what a tiny model's forward takes of rows with so many images each, and at least `text` tokens beside.

    ids and labels [rows, length]; pixels, and what is beside them, in the form that the type's processor makes, drawn.
    """
    count = sum(images)
    one = image_inputs(model, smallest=True) if count else {}
    tokens = image_tokens(model, one) if count else 0
    ids = torch.randint(FIRST, FIRST + TEXTS, (len(images), max(images) * (tokens + 2) + text), generator=generator)
    for row, shown in zip(ids, images, strict=True):
        for number in range(shown):
            at = 1 + number * (tokens + 2)
            row[at], row[at + 1 : at + 1 + tokens], row[at + 1 + tokens] = START, IMAGE, END
    made = {"input_ids": ids, "labels": ids.clone(), **_kinds_of_tokens(model, ids)}
    for name, value in (repeated(one, count) if count else {}).items():
        made[name] = torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
    return made


def image_tokens(model: nn.Module, one: Mapping[str, Tensor]) -> int:
    """Return how many tokens stand for an image of this form."""
    dtype = next(model.parameters()).dtype
    given = {name: t.to(dtype) if t.is_floating_point() else t for name, t in one.items()}
    with torch.no_grad():
        return sum(t.numel() // t.shape[-1] for t in image_features(model, given))


def _kinds_of_tokens(model: nn.Module, ids: Tensor) -> dict[str, Tensor]:
    """Return what tells tokens of images from others, where a forward takes such.

    Without images M-RoPE models get none: from such kinds they make positions of images.
    """
    takes, shown = inspect.signature(model.forward).parameters, ids == IMAGE
    if not shown.any() and hasattr(base_of(model), "get_rope_index"):
        return {}
    return {name: shown.long() for name in TOLD_APART if name in takes}


def _built(config: Any, seed: int) -> nn.Module:
    from transformers import AutoModelForImageTextToText as Auto

    with no_foreign_code(), torch.device("meta"):
        size = sum(p.numel() for p in Auto.from_config(copy.deepcopy(config), trust_remote_code=False).parameters())
    if size > LARGEST:
        raise ValueError(f"{size:,} parameters: no rule shrinks it")
    with no_foreign_code(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: Any = Auto.from_config(config, trust_remote_code=False)
        for name, p in model.named_parameters():
            if "vqmodel" in name:  # codes of an image: none is the nearest to all images
                p.mul_(0.01 if "quantize" in name else 1.0 if p.dim() == 1 else 5.0)
            elif p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.1)
            elif not p.any():  # Gemma 3's projector: its images would have no influence
                p.normal_(std=0.3)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.train()  # type: ignore[no-any-return]


def _shrunk(config: Any, at: str) -> dict[str, Any]:
    """Return what a small config is made of: rules, and what transformers gives this type beside its class's values.

    `at` is the config's name in the one around it.
    """
    from transformers import PreTrainedConfig

    usual, values = type(config)().to_dict(), config.to_dict()
    layers = values.get("num_hidden_layers") or values.get("depth")
    of_text = {"vocab_size", "num_hidden_layers"} <= usual.keys() and not at.startswith(TOWERS)
    rules: dict[str, Any] = TEXT if of_text else TOWER
    made: dict[str, Any] = {}
    for name, value in values.items():
        inner = vars(config).get(name)
        if isinstance(inner, PreTrainedConfig):
            made[name] = _shrunk(inner, name) | {"model_type": inner.model_type}
        elif value is None or name in NEITHER:
            pass
        elif any(part in name for part in RANDOM) and not isinstance(value, bool):
            made[name] = 0 if isinstance(value, int) else 0.0
        elif name in KINDS:
            made[name] = _one_of_each(value)
        elif name in rules:
            rule = copy.deepcopy(rules[name])
            lists = isinstance(value, (list, tuple)) and isinstance(rule, int)
            made[name] = [rule] * (2 if len(value) == layers else len(value)) if lists else rule
        elif name == "rope_parameters" and "mrope_section" in value:
            made[name] = M_ROPE
        elif name.endswith(("_id", "token_index")) and (token := _token(name)) is not None:
            made[name] = token
        elif value != usual.get(name) and not (isinstance(value, (list, tuple)) and len(value) == layers):
            made[name] = value
    return made


def _one_of_each(layers: Sequence[str]) -> list[str]:
    """Return the kinds of two layers: the first two of a model's, or one kind twice."""
    each = list(dict.fromkeys(layers))
    return (each * 2)[:2]


def _token(name: str) -> int | None:
    return next((token for part, token in TOKENS.items() if part in name), None)


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
