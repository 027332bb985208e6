"""Folders of tiny vision-language models with their processors, drawn images, and data in LLaVA's format."""

import json
from pathlib import Path

import vision

WORDS = ("<unk>", "<s>", "</s>", "what", "is", "it", "a", "red", "blue", "circle", "square", "user", "assistant", ":",
         ";", "?", "system", "\n", "\n\n", "\n\n\n")  # fmt: skip
OWN = {  # tokens of a family beside <image>
    "gemma3": {"boi_token": "<boi>", "image_token": "<soft>", "eoi_token": "<eoi>"},
    "internvl": {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<ctx>",
                 "video_token": "<video>"},
    "qwen2_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "qwen2_5_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    "qwen3_vl": {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>",
                 "vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
}  # fmt: skip
MARKS = {
    "gemma3": "<boi>",
    "internvl": "<ctx>",
    "qwen2_vl": "<|image_pad|>",
    "qwen2_5_vl": "<|image_pad|>",
    "qwen3_vl": "<|image_pad|>",
}
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }} : {% if m['role'] == 'assistant' %}{% generation %}"
    "{% for c in m['content'] %}{{ c['text'] }} {% endfor %}</s>{% endgeneration %}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '\n' }}MARK{% else %} {{ c['text'] }} {% endif %}{% endfor %}"
    "{% endif %} ; {% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)
SETTINGS = {
    "llava": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "llava_next": {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
    "gemma3": {"image_seq_length": 4},
    "idefics3": {"image_seq_len": 4},
}
SQUARE = {"height": 28, "width": 28}


def tokenizer(family):
    """A tokenizer of words and of up to three line ends, with the family's own tokens."""
    import transformers as t
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|\w+|[^\w\s]+"), "removed", invert=True)
    made = t.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        extra_special_tokens=OWN.get(family, {"image_token": "<image>"}),
    )  # fmt: skip
    made.chat_template = TEMPLATE.replace("MARK", MARKS.get(family, "<image>"))
    return made


def image_processor(family):
    """What makes pixels of 28 x 28 or a few of them."""
    import transformers as t

    qwen = {"min_pixels": 28 * 28, "max_pixels": 56 * 56}
    makers = {
        "llava": lambda: t.CLIPImageProcessorPil(size={"shortest_edge": 28}, crop_size=SQUARE),
        "llava_next": lambda: t.LlavaNextImageProcessorPil(
            size={"shortest_edge": 28}, crop_size=SQUARE, image_grid_pinpoints=[[28, 56], [56, 28]]),
        "gemma3": lambda: t.Gemma3ImageProcessorPil(size=SQUARE),
        "paligemma": lambda: t.SiglipImageProcessorPil(size=SQUARE, image_seq_length=4),
        "idefics3": lambda: t.Idefics3ImageProcessorPil(
            size={"longest_edge": 28}, max_image_size={"longest_edge": 28}),
        "internvl": lambda: t.GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, max_patches=4),
        "qwen2_vl": lambda: t.Qwen2VLImageProcessorPil(**qwen),
        "qwen2_5_vl": lambda: t.Qwen2VLImageProcessorPil(**qwen),
        "qwen3_vl": lambda: t.Qwen2VLImageProcessorPil(**qwen),
    }  # fmt: skip
    return makers[family]()


def save_processor(folder, family):
    """Save a family's processor as its real folders have it; return the id of the token that images replace."""
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    words, pixels = tokenizer(family), image_processor(family)
    if family in ("internvl", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"):  # whose class needs torchvision, for videos
        words.save_pretrained(folder)
        pixels.save_pretrained(folder)
        if family == "internvl":
            (Path(folder) / "processor_config.json").write_text(json.dumps({"image_seq_length": 4}))
    else:
        kind = processor_class_from_name(PROCESSOR_MAPPING_NAMES[family])
        kind(pixels, words, chat_template=words.chat_template, **SETTINGS.get(family, {})).save_pretrained(folder)
    return words.convert_tokens_to_ids({"gemma3": "<soft>"}.get(family, MARKS.get(family, "<image>")))


def save_model(folder, family="llava", positions=64):
    """Save a tiny model of a family with its processor, for sequences of so many tokens; return the folder."""
    import transformers as t

    Path(folder).mkdir(parents=True, exist_ok=True)
    image = save_processor(folder, family)
    model = vision.model(family)
    model.save_pretrained(folder)
    file = Path(folder) / "config.json"
    config = json.loads(file.read_text())
    config |= {key: image for key in ("image_token_id", "image_token_index") if key in config}
    config.get("text_config", config)["max_position_embeddings"] = positions
    file.write_text(json.dumps(config))
    assert t.AutoConfig.from_pretrained(folder).image_token_id == image
    return str(folder)


def record(image=None, answer="a red circle", question="what is it?"):
    """A record of LLaVA's."""
    turns = [
        {"from": "human", "value": f"<image>\n{question}" if image else question},
        {"from": "gpt", "value": answer},
    ]
    return ({"image": image} if image else {}) | {"id": "0", "conversations": turns}


def save_data(folder, pictured=24, plain=0, name="data.json"):
    """Draw images and write records of them and of texts alone; return the file and the folder of the images."""
    from PIL import Image

    images = Path(folder) / "images"
    images.mkdir(parents=True)
    rows = []
    for i in range(pictured):
        colour = ("red", "blue")[i % 2]
        Image.new("RGB", (24 + 5 * (i % 7), 20 + 7 * (i % 5)), colour).save(images / f"{i}.png")
        rows.append(record(f"{i}.png", f"a {colour} circle"))
    for i in range(plain):
        rows.insert(2 * i, record(answer="a blue square"))
    file = Path(folder) / name
    file.write_text(json.dumps(rows))
    return str(file), str(images)
