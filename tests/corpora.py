"""Small training data on disk and a tiny tokenizer, all made on the spot."""

import json

import numpy

from zero3d.config import Data
from zero3d.data.dataset import open_data
from zero3d.data.tokenizers import ByteTokenizer, load_tokenizer

ROLES = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
APPENDS = ROLES + "{% if add_generation_prompt %}<assistant> {% endif %}"
MARKS = (
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' %}{% generation %}{{ m.content }} <end>"
    "{% endgeneration %} {% else %}{{ m.content }} <end> {% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
REWRITES = "{{ messages | length }} " + APPENDS  # what stands in front depends on what comes later
FORGETS = (  # what an answer held is dropped once another message follows
    "{% for m in messages %}<{{ m.role }}> {% if m.role == 'assistant' and loop.last %}think {% endif %}"
    "{{ m.content }} <end> {% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}"
)
CHAT = [
    {"role": "user", "content": "what is one and one"},
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": "and two and two"},
    {"role": "assistant", "content": "four I think"},
]


def write_lines(path, records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return path


def save_tokenizer(folder, template=None, adds_start=False):
    """A word-level tokenizer's folder: words of a few sentences, a token for each role."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["what", "is", "one", "and", "two", "four", "I", "think"]
    specials = ["<unk>", "<s>", "</s>", "<user>", "<assistant>", "<end>"]
    words = {word: index for index, word in enumerate([*specials, *words])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if adds_start:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    made.save_pretrained(folder)
    return folder


def tiny_tokenizer(folder, template=None, adds_start=False):
    return load_tokenizer(str(save_tokenizer(folder, template, adds_start)))


def opened(tmp_path, *paths, tokenizer=None, vocabulary=None, multiple=1, **options):
    """The data set of some files, with its cache beside them."""
    settings = {"length": 8, "cache": str(tmp_path / "cache")} | options
    data = Data(train=tuple(map(str, paths)), **settings)
    return open_data(data, tokenizer or ByteTokenizer(), vocabulary, multiple)


def stream(tmp_path, tokens, name="stream.npy"):
    """A file with one stream of ids."""
    numpy.save(tmp_path / name, numpy.arange(tokens, dtype=numpy.int32) % 250)
    return tmp_path / name
