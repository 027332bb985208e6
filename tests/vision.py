"""Tiny vision-language models by family, and micro-batches with images for each; vocabulary 64, width 32."""

import torch

FAMILIES = ["gemma3", "idefics3", "internvl", "llava", "llava_next", "paligemma", "qwen2_5_vl", "qwen2_vl"]
NEWER = ["llama4", "qwen3_5", "qwen3_vl", "qwen3_vl_moe"]
EVERY = ["gemma4", "mistral3", *NEWER, *FAMILIES]  # also those for which there is no processor here
IMAGE, START, END = 63, 62, 61  # the token that images replace, and those around it
VIDEO = 60
WITH_VIDEOS = ("qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_vl", "qwen3_vl_moe")
TEXT = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TOWER = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
GEMMA4 = TEXT | {
    "head_dim": 8, "global_head_dim": 8, "vocab_size_per_layer_input": 64, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4,
}  # fmt: skip
QWEN_TOWER = {"depth": 2, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
QWEN3_TOWER = QWEN_TOWER | {
    "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "num_position_embeddings": 16,
}  # fmt: skip
QWEN_TEXT = TEXT | {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}}


def config(name, blocks=2, **options):
    """A config of this model type with so many blocks, which can be kept as a folder's config.json."""
    import transformers as t

    makers = {
        "gemma3": lambda: t.Gemma3Config(
            text_config=TEXT | {"head_dim": 8, "sliding_window": 4}, vision_config=TOWER, mm_tokens_per_image=4,
            image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END),
        "gemma4": lambda: t.AutoConfig.for_model(
            "gemma4", audio_config=None, image_token_id=IMAGE, boi_token_id=START, eoi_token_id=END, video_token_id=VIDEO,
            text_config=GEMMA4, vision_config=TOWER | {"num_key_value_heads": 2, "head_dim": 16, "patch_size": 4,
                                                       "position_embedding_size": 64}),
        "idefics3": lambda: t.Idefics3Config(
            text_config=TEXT | {"model_type": "llama"}, vision_config=TOWER | {"patch_size": 7}, scale_factor=2,
            image_token_id=IMAGE, pad_token_id=2),
        "internvl": lambda: t.InternVLConfig(
            text_config=TEXT | {"model_type": "qwen2"},
            vision_config=TOWER | {"image_size": [28, 28], "patch_size": [7, 7]}, image_token_id=IMAGE),
        "llama4": lambda: t.AutoConfig.for_model(
            "llama4", image_token_index=IMAGE, boi_token_index=START, eoi_token_index=END,
            text_config=TEXT | {
                "head_dim": 8, "intermediate_size_mlp": 48, "num_local_experts": 4, "moe_layers": [1],
                "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0],
                "attention_chunk_size": 8},
            vision_config=TOWER | {
                "patch_size": 7, "intermediate_size": 128, "vision_output_dim": 32, "projector_input_dim": 32,
                "projector_output_dim": 32}),
        "llava": lambda: t.LlavaConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}, image_token_index=IMAGE),
        "llava_next": lambda: t.LlavaNextConfig(
            text_config=TEXT | {"model_type": "llama"},
            vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32}, image_token_index=IMAGE,
            image_grid_pinpoints=[[28, 56], [56, 28]]),
        "mistral3": lambda: t.AutoConfig.for_model(
            "mistral3", image_token_index=IMAGE, spatial_merge_size=1, text_config=TEXT | {"model_type": "mistral"},
            vision_config=TOWER | {"model_type": "pixtral", "head_dim": 16}),
        "paligemma": lambda: t.PaliGemmaConfig(
            text_config=TEXT | {"model_type": "gemma", "head_dim": 8},
            vision_config=TOWER | {"model_type": "siglip_vision_model", "projection_dim": 32}, image_token_index=IMAGE,
            projection_dim=32),
        "qwen2_5_vl": lambda: t.Qwen2_5_VLConfig(
            text_config=QWEN_TEXT, **QWEN_TOKENS, vision_config=QWEN_TOWER | {
                "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, "window_size": 28,
                "fullatt_block_indexes": [1]}),
        "qwen3_5": lambda: t.AutoConfig.for_model(
            "qwen3_5", **QWEN_TOKENS, vision_config=QWEN3_TOWER, text_config=QWEN_TEXT | {
                "head_dim": 8, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
                "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}),
        "qwen3_vl": lambda: t.Qwen3VLConfig(
            text_config=QWEN_TEXT | {"head_dim": 8}, **QWEN_TOKENS,
            vision_config=QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]}),
        "qwen3_vl_moe": lambda: t.Qwen3VLMoeConfig(
            text_config=QWEN_TEXT | {
                "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                "decoder_sparse_step": 1},
            **QWEN_TOKENS, vision_config=QWEN3_TOWER | {"deepstack_visual_indexes": [0, 1]}),
        "qwen2_vl": lambda: t.Qwen2VLConfig(
            text_config=QWEN_TEXT, **QWEN_TOKENS, vision_config=QWEN_TOWER | {
                "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2}),
    }  # fmt: skip
    made = makers[name]()
    text = made.get_text_config()
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == text.num_hidden_layers:
            setattr(text, key, (value * blocks)[:blocks])
    text.num_hidden_layers = blocks
    made.update(options)
    return made


def model(name, **options):
    """A model of this family in training mode, the same weights at every call."""
    import transformers as t

    torch.manual_seed(3)
    made = t.AutoModelForImageTextToText.from_config(config(name, **options))
    with torch.no_grad():  # biases and norms that matter
        for p in made.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    return made.train()


def micro_batch(name, generator, sequences=2, length=24):
    """Sequences of one image each, as the family's processor would make them."""
    ids = torch.randint(3, 59, (sequences, length), generator=generator)
    tokens = {"internvl": 4, "llava_next": 4 + 8 + 2}.get(name, 4)
    ids[:, 1], ids[:, 2 : 2 + tokens], ids[:, 2 + tokens] = START, IMAGE, END
    made = {"input_ids": ids, "labels": ids.clone()}

    def drawn(*shape):
        return torch.randn(*shape, generator=generator)

    if name.startswith("qwen"):
        made["pixel_values"] = drawn(sequences * 16, 3 * 2 * 14 * 14)
        made["image_grid_thw"] = torch.tensor([[1, 4, 4]] * sequences)
        made["mm_token_type_ids"] = (ids == IMAGE).long()
    elif name == "idefics3":
        made["pixel_values"] = drawn(sequences, 1, 3, 28, 28)
        made["pixel_attention_mask"] = torch.ones(sequences, 1, 28, 28, dtype=torch.long)
    elif name == "gemma4":  # 6 x 6 patches, pooled by 3
        made["pixel_values"] = drawn(sequences, 36, 3 * 4 * 4)
        places = torch.cartesian_prod(torch.arange(6), torch.arange(6)).flip(-1)
        made["image_position_ids"] = places.expand(sequences, -1, -1)
    elif name == "mistral3":
        made["pixel_values"] = drawn(sequences, 3, 28, 28)
        made["image_sizes"] = torch.tensor([[28, 28]] * sequences)
    elif name == "llava_next":
        made["pixel_values"] = drawn(sequences, 3, 3, 28, 28)
        made["image_sizes"] = torch.tensor([[28, 56]] * sequences)
    else:
        made["pixel_values"] = drawn(sequences, 3, 28, 28)
    if name in ("gemma3", "paligemma"):
        made["token_type_ids"] = (ids == IMAGE).long()
    if name == "gemma4":
        made["mm_token_type_ids"] = (ids == IMAGE).long()
    return made


def with_videos(batch, generator):
    """The same micro-batch with a video of one frame behind each image."""
    ids = batch["input_ids"].clone()
    ids[:, 12], ids[:, 13:17], ids[:, 17] = START, VIDEO, END
    return batch | {
        "input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": (ids == IMAGE).long() + 2 * (ids == VIDEO),
        "pixel_values_videos": torch.randn(batch["pixel_values"].shape, generator=generator),
        "video_grid_thw": batch["image_grid_thw"].clone(),
    }  # fmt: skip


def videos_alone(batch):
    """The same micro-batch without its images."""
    ids = torch.where(batch["input_ids"] == IMAGE, 5, batch["input_ids"])
    kept = {name: t for name, t in batch.items() if name not in ("pixel_values", "image_grid_thw")}
    return kept | {"input_ids": ids, "labels": ids.clone(), "mm_token_type_ids": 2 * (ids == VIDEO)}


def text_alone(batch):
    """The same micro-batch without its images."""
    ids = torch.where(batch["input_ids"] == IMAGE, 5, batch["input_ids"])
    kept = {name: torch.zeros_like(ids) for name in ("token_type_ids", "mm_token_type_ids") if name in batch}
    if "image_grid_thw" in batch:  # Qwen2-VL has kinds of tokens for images alone
        del kept["mm_token_type_ids"]
    return {"input_ids": ids, "labels": ids.clone()} | kept
