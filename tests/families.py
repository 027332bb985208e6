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
HYBRID = {"mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1}
CONFIGS = {
    "bart": ("Bart", {"is_decoder": True, "is_encoder_decoder": False, "dropout": 0.0, "encoder_layers": 1,
                      "decoder_ffn_dim": 48, "decoder_attention_heads": 4, "decoder_layers": 4}),
    "bert": ("BertLMHead", {"is_decoder": True, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}),
    "gemma3n_text": ("Gemma3n", SHARED | {"laurel_rank": 4, "altup_num_inputs": 2,
                                          "activation_sparsity_pattern": [0.9, 0.0, 0.9, 0.0]}),
    "gemma4_text": ("Gemma4", SHARED | {"global_head_dim": 8}),
    "jamba": ("Jamba", HYBRID),
}  # fmt: skip


def family(name, **options):
    """A model of this type that computes language modelling losses."""
    import transformers as t

    kind, own = CONFIGS[name]
    torch.manual_seed(7)
    config = t.AutoConfig.for_model(name, **SIZES | own | options, use_cache=False)
    model = getattr(t, f"{kind}{'Model' if kind.endswith('Head') else 'ForCausalLM'}")(config)
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
