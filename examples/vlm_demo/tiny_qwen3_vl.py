"""A Qwen3-VL of a few hundred thousand parameters, randomly initialised, as a Hugging Face folder with its processor.

Features of two of its tower's blocks are added behind the first two blocks of the language model, too (DeepStack).
"""

import torch
import transformers
from tiny_llava import tokenizer

PATCH, MERGED = 8, 2  # pixels of a patch's side; patches of a token's side
SIZES = ((32, 32), (48, 32), (32, 48), (48, 48))  # of images: 4 to 9 tokens
TOKENS = {
    "image_token": "<|image_pad|>", "video_token": "<|video_pad|>", "vision_start_token": "<|vision_start|>",
    "vision_end_token": "<|vision_end|>",
}  # fmt: skip
SPREAD = 0.08  # of random weights: so narrow a model learns sooner than from the 0.02 of wide ones
MARK = "<|vision_start|><|image_pad|><|vision_end|>"


def save(folder, seed=0):
    """Write model, tokenizer and image processor; return the number of parameters."""
    torch.manual_seed(seed)
    words = tokenizer(MARK, **TOKENS)
    special = {f"{name}_id": words.convert_tokens_to_ids(token) for name, token in TOKENS.items()}
    tower = {
        "hidden_size": 64, "intermediate_size": 128, "depth": 3, "num_heads": 4, "patch_size": PATCH,
        "spatial_merge_size": MERGED, "out_hidden_size": 96, "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 1], "initializer_range": SPREAD,
    }  # fmt: skip
    text = {
        "vocab_size": len(words), "hidden_size": 96, "intermediate_size": 192, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 24, "max_position_embeddings": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 4, 4]},
        "initializer_range": SPREAD,
        "bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id,
    }  # fmt: skip
    config = transformers.Qwen3VLConfig(vision_config=tower, text_config=text, **special)
    model = transformers.Qwen3VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    transformers.Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGED, min_pixels=32 * 32, max_pixels=64 * 64
    ).save_pretrained(folder)  # fmt: skip
    return sum(p.numel() for p in model.parameters())
