"""Models by name: shapes of well-known ones, with new weights. No download.

demo          1.4 M   a Llama over bytes, of the embedded default
demo-moe      1.0 M   a Qwen3-MoE over bytes: 16 experts a layer, of which a token meets 2
gpt2          124 M   Radford et al. 2019, table 2
qwen3-0.6b    0.6 B   tied embeddings
llama-3-1b    1.2 B   Llama 3.2
llama-3-8b    8.0 B   Grattafiori et al. 2024, table 3
qwen2.5-72b   72.7 B  Qwen Team 2024, table 1
mixtral-8x7b  46.7 B  Jiang et al. 2024, table 1: 8 experts a layer, of which a token meets 2
qwen3-30b-a3b 30.5 B  Qwen Team 2025, table 2: 128 experts, 8 of them
deepseek-v3   671 B   DeepSeek-AI 2024, section 4.2: 256 experts, 8 of them, and one that all tokens meet
llava-1.5-7b  7.1 B   Liu et al. 2023: Vicuna 7B with CLIP's ViT-L/14 at 336 pixels
"""

from __future__ import annotations

from typing import Any

_LLAMA_3 = {
    "model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rope_theta": 500000.0, "rms_norm_eps": 1e-5, "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip

PRESETS: dict[str, dict[str, Any]] = {
    "demo": {
        "model_type": "llama", "vocab_size": 256, "hidden_size": 192, "intermediate_size": 512,
        "num_hidden_layers": 3, "num_attention_heads": 6, "max_position_embeddings": 512, "initializer_range": 0.04,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    },
    "demo-moe": {
        "model_type": "qwen3_moe", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256,
        "moe_intermediate_size": 64, "num_experts": 16, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 512, "initializer_range": 0.04, "output_router_logits": True,
        "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0,
    },
    "gpt2": {"model_type": "gpt2"},
    "qwen3-0.6b": {
        "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "llama-3-1b": {
        **_LLAMA_3, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "num_attention_heads": 32, "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-3-8b": {
        **_LLAMA_3, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "head_dim": 128,
    },
    "qwen2.5-72b": {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568,
        "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8,
        "num_experts_per_tok": 2, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "rms_norm_eps": 1e-5,
    },
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "max_position_embeddings": 40960, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "bos_token_id": 151643, "eos_token_id": 151645,
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8,
        "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
        "max_position_embeddings": 163840, "bos_token_id": 0, "eos_token_id": 1,
    },
    "llava-1.5-7b": {
        "model_type": "llava", "image_token_index": 32000, "pad_token_id": 32001,
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
            "num_attention_heads": 16, "image_size": 336, "patch_size": 14, "projection_dim": 768, "vocab_size": 32000,
        },
        "text_config": {
            "model_type": "llama", "vocab_size": 32064, "hidden_size": 4096, "intermediate_size": 11008,
            "num_hidden_layers": 32, "num_attention_heads": 32, "max_position_embeddings": 4096, "rms_norm_eps": 1e-5,
        },
    },
}  # fmt: skip
