"""Tiny models and data sets in the place of those that TRL's tests download: made here, of the same kinds and names.

    trl-internal-testing/tiny-...       a folder in the cache of HF_HOME, which is a temporary one: random weights, a
                                        tokenizer of letters, a chat template
    trl-internal-testing/zen            rows of its columns, by datasets.load_dataset

Other names are not found, as without the network.
"""

import os
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

OWNER = "trl-internal-testing"
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,:;!?'\n"
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SIZES = {
    "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": len(LETTERS) + 3,
}  # fmt: skip
MODELS = {
    "tiny-Qwen2ForCausalLM-2.5": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "tiny-Qwen2ForSequenceClassification-2.5": (transformers.Qwen2Config, transformers.Qwen2ForSequenceClassification),
    "tiny-Qwen3ForCausalLM": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "tiny-LlamaForCausalLM-3.2": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
}
ROWS = {"train": 17, "test": 2}


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Return one of a token for each letter, with ChatML's marks."""
    words = {word: number for number, word in enumerate([PAD, START, END, *LETTERS])}
    made = Tokenizer(models.WordLevel(words, unk_token=PAD))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=PAD, eos_token=END, additional_special_tokens=[START]
    )
    fast.chat_template = TEMPLATE
    return fast


def write_models(cache: Path) -> None:
    """Write each model as the hub's cache has it."""
    for name, (config, model) in MODELS.items():
        folder = cache / f"models--{OWNER}--{name}"
        snapshot = folder / "snapshots" / "local"
        torch.manual_seed(0)
        extra = {"num_labels": 1} if "Classification" in name else {}
        made = config(**SIZES, **extra, pad_token_id=0, eos_token_id=2, bos_token_id=None, max_position_embeddings=512)
        model(made).save_pretrained(snapshot)
        tokenizer().save_pretrained(snapshot)
        (folder / "refs").mkdir()
        (folder / "refs" / "main").write_text("local")


def rows(kind: str, count: int) -> list[dict[str, Any]]:
    """Return rows of one configuration of zen, such as "conversational_preference"."""
    style, _, what = kind.partition("_")

    def said(role: str, text: str) -> Any:
        return text if style == "standard" else [{"role": role, "content": text}]

    found = []
    for number in range(count):
        prompt, good, bad = f"What is rule {number} here?", f" Better is rule {number}.", f" Worse is {number}, then!"
        ask, yes, no = said("user", prompt), said("assistant", good), said("assistant", bad)
        found.append(
            {
                "language_modeling": {"text" if style == "standard" else "messages": ask + yes},
                "prompt_only": {"prompt": ask},
                "prompt_completion": {"prompt": ask, "completion": yes},
                "preference": {"prompt": ask, "chosen": yes, "rejected": no},
                "implicit_prompt_preference": {"chosen": ask + yes, "rejected": ask + no},
                "unpaired_preference": {
                    "prompt": ask,
                    "completion": yes if number % 2 else no,
                    "label": number % 2 == 1,
                },
            }[what]
        )
    return found


def load_dataset(
    path: str, name: str | None = None, split: str | None = None, streaming: bool = False, **more: Any
) -> Any:
    """Return zen's rows; anything else as `datasets` does."""
    if path != f"{OWNER}/zen" or name is None:
        return _load_dataset(path, name, split=split, streaming=streaming, **more)
    made = datasets.DatasetDict({part: datasets.Dataset.from_list(rows(name, count)) for part, count in ROWS.items()})
    if split is None:
        return made
    part, _, cut = split.partition("[")
    chosen = made[part]
    if cut:
        chosen = chosen.select(range(int(cut.strip(":]"))))
    return chosen.to_iterable_dataset() if streaming else chosen


_load_dataset, datasets.load_dataset = datasets.load_dataset, load_dataset
if not (Path(os.environ["HF_HOME"]) / "hub").exists():  # of an earlier file of the same run
    write_models(Path(os.environ["HF_HOME"]) / "hub")
