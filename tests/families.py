"""Tiny models of families with ways of their own, by model type; vocabulary 64, width 32, 4 heads, in training mode."""

import torch

IMAGE = 63  # the token that images replace
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
SHARED = {  # keys and values of two layers are used by two others
    "num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 4, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8, "head_dim": 8,
}  # fmt: skip
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 1,
          "attn_layer_indices": [1]}  # fmt: skip
DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
         "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
KDA = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 8, "num_key_value_heads": 4,
    "kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 8,
    "moe_intermediate_size": 16, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 2,
}  # fmt: skip
EXPERTS = ("gpt_oss", "inkling2_text", "jamba", "qwen3_5_moe_text")
CONFIGS = {
    "bailing_hybrid": KDA,
    "bamba": MAMBA2,
    "bart": {"is_decoder": True, "is_encoder_decoder": False, "dropout": 0.0, "encoder_layers": 1, "decoder_layers": 4,
             "decoder_ffn_dim": 48, "decoder_attention_heads": 4},
    "bert": {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    "deepseek_v3": {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
                    "num_key_value_heads": 4, "first_k_dense_replace": 2, "head_dim": 4},
    "falcon": {"hidden_dropout": 0.0, "attention_dropout": 0.0, "ffn_hidden_size": 48, "bias": True, "num_kv_heads": 2},
    "falcon_mamba": {"state_size": 8, "time_step_rank": 4},
    "falcon_h1": MAMBA2 | {"head_dim": 8, "mamba_d_ssm": 32, "mamba_chunk_size": 4},
    "gemma3n_text": SHARED | {"laurel_rank": 4, "altup_num_inputs": 2, "pad_token_id": None,
                              "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0]},
    "gemma4_text": SHARED | {"global_head_dim": 8},
    "gpt_oss": {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "gptj": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "inkling2_text": {"head_dim": 8, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
                      "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "d_rel": 4,
                      "rel_extent": 16, "sliding_window_size": 4, "unpadded_vocab_size": 64},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"], "num_local_experts": 0, "shared_intermediate_size": 48},
    "jamba": {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1},
    "kimi_linear": KDA,
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 2, "state_size": 8, "expand": 2, "chunk_size": 4},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64},
    "nemotron_h": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 8,
                   "mamba_head_dim": 8, "n_groups": 2, "ssm_state_size": 8, "chunk_size": 8, "head_dim": 8},
    "olmo_hybrid": DELTA | {"linear_num_key_heads": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},
    "qwen3_5_moe_text": DELTA | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                 "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA,
    "zamba2": {"num_hidden_layers": 4, "mamba_d_state": 8, "n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_expand": 2, "mamba_headdim": 16,
               "chunk_size": 8, "attention_head_dim": 16, "num_mem_blocks": 1, "adapter_rank": 4,
               "layers_block_type": ["mamba", "mamba", "hybrid", "mamba"]},
    "stablelm": {"use_qkv_bias": True, "hidden_dropout": 0.0},
}  # fmt: skip


def family(name, **options):
    """A model of this type that computes language modelling losses."""
    import transformers as t

    torch.manual_seed(7)
    given = SIZES | CONFIGS.get(name, {}) | options
    if name in ("bloom", "mpt"):  # whose configs read other names
        given = {key: value for key, value in given.items() if not key.startswith("num_")}
    model = t.AutoModelForCausalLM.from_config(t.AutoConfig.for_model(name, **given, use_cache=False))
    if name in EXPERTS:
        model.set_experts_implementation("eager")  # the usual one has no fp64
    with torch.no_grad():  # biases and norms that matter
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    return model.train()


def llava():
    """A language model with a vision tower."""
    import transformers as t

    torch.manual_seed(3)
    text = t.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    vision = t.CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=28, patch_size=14,
        projection_dim=32,
    )  # fmt: skip
    config = t.LlavaConfig(text_config=text, vision_config=vision, image_token_index=IMAGE)
    return t.LlavaForConditionalGeneration(config).train()
