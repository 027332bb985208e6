"""transformers' Trainer on images and texts at stage 3: a rank's micro-batch may be text alone."""

import pytest
import torch
import vision
from trainers import logged

ROWS = 16
BY_TOKEN = ("input_ids", "labels", "mm_token_type_ids")


class Rows(torch.utils.data.Dataset):
    """Sequences of Qwen3-VL, every other with an image."""

    def __init__(self):
        generator = torch.Generator().manual_seed(2)
        drawn = [vision.micro_batch("qwen3_vl", generator, sequences=1) for _ in range(ROWS)]
        self.rows = [vision.text_alone(row) if number % 2 else row for number, row in enumerate(drawn)]

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        return self.rows[index]


def collate(rows):
    """A micro-batch as a processor makes it: nothing of images where there is none."""
    shown = [row for row in rows if "pixel_values" in row]
    none = torch.zeros_like(rows[0]["input_ids"])
    made = {name: torch.cat([row.get(name, none) for row in rows]) for name in BY_TOKEN[: 2 + bool(shown)]}
    return (
        made | {name: torch.cat([row[name] for row in shown]) for name in shown[0] if name not in BY_TOKEN}
        if shown
        else made
    )


def qwen3_vl():
    return vision.model("qwen3_vl")


def trained(kind, folder):
    """What a Trainer logs, and in how many of this rank's micro-batches there was no image."""
    texts = []

    def counted(rows):
        made = collate(rows)
        texts.append("pixel_values" not in made)
        return made

    given = {"train_dataset": Rows(), "eval_dataset": Rows(), "data_collator": counted}
    options = {"remove_unused_columns": False, "eval_strategy": "steps", "eval_steps": 3}
    return logged(kind, folder, options, given, model=qwen3_vl), sum(texts)


def test_a_trainer_whose_ranks_have_images_or_text_has_the_losses_of_one_process(ranks, tmp_path):
    ((wanted, _),) = ranks(1, trained, "plain", tmp_path / "plain")
    found = ranks(2, trained, 3, tmp_path / "ours")
    assert {texts for _, texts in found} != {0}
    for (steps, evaluations), _ in found:
        assert evaluations == pytest.approx(wanted[1], rel=1e-4)
        for ours, theirs in zip(steps, wanted[0], strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4)
