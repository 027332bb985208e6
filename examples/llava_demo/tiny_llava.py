"""A LLaVA of a few hundred thousand parameters, randomly initialised, as a Hugging Face folder with its processor."""

import torch
import transformers
from shapes import COLOURS, FIRST, NEW, QUESTION, SIZES
from tokenizers import Tokenizer, models, pre_tokenizers

PATCH, SIZE = 8, SIZES[0][0]
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}user : {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}MARK {% else %}{{ part['text'] }} {% endif %}{% endfor %}"
    "{% else %}assistant : {% generation %}{% for part in message['content'] %}{{ part['text'] }} {% endfor %}"
    "</s>{% endgeneration %}{% endif %}{% endfor %}{% if add_generation_prompt %}assistant : {% endif %}"
)


def tokenizer(mark="<image>", **special):
    """Return a tokenizer of the words that the demos have, and of special tokens, whose chats have a mark an image."""
    words = ["<unk>", "<s>", "</s>", "user", "assistant", ":", "a", *QUESTION.split(), *COLOURS, *FIRST, *NEW]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="</s>",
        extra_special_tokens=special,
    )  # fmt: skip
    made.chat_template = TEMPLATE.replace("MARK", mark)
    return made


def save(folder, seed=0):
    """Write model, tokenizer and processor; return the number of parameters."""
    torch.manual_seed(seed)
    words = tokenizer(image_token="<image>")
    tower = transformers.CLIPVisionConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=SIZE,
        patch_size=PATCH, projection_dim=64,
    )  # fmt: skip
    text = transformers.LlamaConfig(
        vocab_size=len(words), hidden_size=96, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id,
    )  # fmt: skip
    image = words.convert_tokens_to_ids("<image>")
    config = transformers.LlavaConfig(vision_config=tower, text_config=text, image_token_index=image)
    model = transformers.LlavaForConditionalGeneration(config)
    model.save_pretrained(folder)
    pixels = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    )  # fmt: skip
    transformers.LlavaProcessor(
        pixels, words, patch_size=PATCH, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=words.chat_template,
    ).save_pretrained(folder)  # fmt: skip
    return sum(p.numel() for p in model.parameters())
