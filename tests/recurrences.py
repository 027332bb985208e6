"""Tiny models with recurrences or short convolutions, by model type; vocabulary 64, width 32, in training mode."""

import torch
from families import SIZES

DELTA = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip
KIMI = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8,
    "num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 1,
          "attn_layer_indices": [1]}  # fmt: skip
CONFIGS = {
    "bailing_hybrid": KIMI,
    "bamba": MAMBA2,
    "falcon_h1": MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 32, "mamba_chunk_size": 4},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 4,
                                  "num_experts_per_tok": 2, "shared_intermediate_size": 48},
    "jamba": {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
    "kimi_linear": KIMI,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_experts": 4, "num_experts_per_tok": 2,
                 "moe_intermediate_size": 16, "num_dense_layers": 1},
    "mamba": {"state_size": 8, "time_step_rank": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "expand": 2, "chunk_size": 8},
    "minimax": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, "block_size": 8,
                "num_local_experts": 2},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
                   "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8},
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4},
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "recurrent_gemma": {"lru_width": 32, "block_types": ["recurrent", "attention"], "attention_window_size": 16,
                        "head_dim": 8},
    "rwkv": {"attention_hidden_size": 32, "context_length": 128},
    "xlstm": {"embedding_dim": 32, "num_blocks": 2, "num_heads": 2, "chunk_size": 8},
    "zamba2": {"num_hidden_layers": 3, "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_expand": 2,
               "mamba_headdim": 16, "chunk_size": 8, "attention_head_dim": 16,
               "layers_block_type": ["mamba", "hybrid", "mamba"], "num_mem_blocks": 1, "adapter_rank": 4},
}  # fmt: skip


def hybrid(name, **options):
    """A model of this type that computes language modelling losses."""
    import transformers as t

    torch.manual_seed(7)
    config = t.AutoConfig.for_model(name, **(SIZES | CONFIGS[name] | options))
    if hasattr(config, "use_cache"):
        config.use_cache = False
    model = t.AutoModelForCausalLM.from_config(config)
    if "moe" in name or "experts" in str(options):
        model.set_experts_implementation("eager")
    if torch.get_default_device().type != "meta":
        with torch.no_grad():  # biases, rates and norms that matter
            for p in model.parameters():
                if p.dim() == 1:
                    p.add_(torch.randn(p.shape) * 0.1)
    return model.train()
