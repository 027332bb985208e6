"""Folders of the processors of all image-text types, without weights: a tokenizer of words, a config, an image processor."""

import inspect
import json
from pathlib import Path

WORDS = ("<unk>", "<s>", "</s>", "what", "is", "it", "\n", "\n\n", "TILE", "TILE_GLOBAL", "0", "1")
NAMED = {  # special tokens that processors ask a tokenizer for by name
    "image_token": "<image>", "video_token": "<video>", "audio_token": "<audio>", "boi_token": "<boi>", "eoi_token": "<eoi>",
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<ctx>",
    "image_boundary_token": "<ib>", "image_start_token": "<is>", "image_end_token": "<ie>", "image_break_token": "<br>",
    "video_start_token": "<vs>", "video_end_token": "<ve>", "vision_start_token": "<vis>", "vision_end_token": "<vie>",
    "vision_bos_token": "<vb>", "vision_eos_token": "<veo>", "image_thumbnail": "<th>", "slice_start_token": "<ss>",
    "slice_end_token": "<se>", "boa_token": "<boa>", "eoa_token": "<eoa>", "image_id_start_token": "<iis>", "image_id_end_token": "<iie>",
}  # fmt: skip
OTHERS = (  # those that they have themselves
    "<global-img>", "<fake_token_around_image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<imgpad>",
    "<|IMAGE_PAD|>", "<|imgpad|>", "<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>", *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
)  # fmt: skip
SETTINGS = {  # of the processor's own class, whose names are few
    "patch_size": 14, "vision_feature_select_strategy": "default", "num_image_tokens": 4, "image_seq_length": 4,
    "image_seq_len": 4, "num_query_tokens": 4,
}  # fmt: skip
IMAGES = {  # what makes an image processor quick, or is not in its defaults
    "idefics3": {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 64}},
    "paligemma": {"image_seq_length": 4}, "florence2": {"image_seq_length": 4},
    "qwen3_vl_moe": {}, "glm4v_moe": {},
}  # fmt: skip
MISSING = {"qwen3_vl_moe": "Qwen2VLImageProcessorPil", "glm4v_moe": "Glm4vImageProcessorPil"}  # in transformers' table


def tokenizer(name):
    """A tokenizer of words and all special tokens, for the processor of this model type."""
    import transformers as t
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[\w]+|[^\w\s]+"), "removed", invert=True)
    made = t.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        extra_special_tokens=NAMED | ({"image_token": "<|IMAGE_PAD|>"} if name == "cohere_compass" else {}),
    )  # fmt: skip
    made.add_tokens(list(OTHERS), special_tokens=True)
    made.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    return made


def save_folder(folder, name):
    """Save what a folder of this model type has beside weights; return the arguments of its model's forward."""
    import transformers as t
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    tokenizer(name).save_pretrained(folder)
    CONFIG_MAPPING[name]().save_pretrained(folder)
    kind = MISSING.get(name) or IMAGE_PROCESSOR_MAPPING_NAMES[name]["pil"]
    getattr(t, kind)(**IMAGES.get(name, {})).save_pretrained(folder)
    own = PROCESSOR_MAPPING_NAMES[name]
    takes = inspect.signature(getattr(t, own).__init__).parameters
    settings = {key: value for key, value in SETTINGS.items() if key in takes} | {"processor_class": own}
    (Path(folder) / "processor_config.json").write_text(json.dumps(settings))
    model = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]
    return frozenset(inspect.signature(getattr(t, model).forward).parameters)
