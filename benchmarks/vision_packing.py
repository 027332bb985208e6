"""Conversations with images packed beside the same ones padded: one step over all of them, in turns.

    python benchmarks/vision_packing.py --type qwen3_vl --documents 64 --rounds 5

    documents   an image each, at a random place, and text: lengths even between the image and a row
    padded      micro-batches of 4 documents in random order, as long as the longest of the 4
    packed      micro-batches of 4 rows of documents by best fit, positions and masks as `zero3d train` has them
    text        padded, with other tokens in the place of images: what a step takes without the tower

Printed are the median seconds of a CPU that a step of each way takes, packed / padded, the tower's share of a padded
step, and tokens that were computed. The losses of packed and padded are equal to rounding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import numpy
import torch
from torch import Tensor

from zero3d import Engine
from zero3d.data.packing import best_fit
from zero3d.data.sequences import IGNORED, stack
from zero3d.models.document_positions import DocumentPositions

TARGET = 0.65
IMAGE, VOCABULARY, MICRO_BATCH = 1023, 1024, 4
TEXT = {
    "vocab_size": VOCABULARY, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
         "image_size": 56, "patch_size": 14}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def model_of(kind: str, width: int, blocks: int) -> Any:
    """Build a small model of this type with random weights; an image is of 4 tokens, or of 16."""
    import transformers as t

    sizes = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": blocks}
    text = TEXT | sizes | {"head_dim": width // 8}
    if kind == "qwen3_vl":
        section = width // 8 // 2
        rope = ROPE | {"mrope_section": [section - 2 * (section // 3), section // 3, section // 3]}
        tower = {"depth": 1, "num_heads": 2, "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2,
                 "hidden_size": 32, "intermediate_size": 32, "out_hidden_size": width,
                 "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}  # fmt: skip
        config = t.Qwen3VLConfig(
            text_config=text | {"rope_parameters": rope}, vision_config=tower, image_token_id=IMAGE,
            video_token_id=IMAGE - 1, vision_start_token_id=IMAGE - 2, vision_end_token_id=IMAGE - 3,
        )  # fmt: skip
    elif kind == "gemma3":
        config = t.Gemma3Config(
            text_config=text | {"sliding_window": 128}, vision_config=TOWER, mm_tokens_per_image=4,
            image_token_index=IMAGE, boi_token_index=IMAGE - 1, eoi_token_index=IMAGE - 2,
        )  # fmt: skip
    else:
        config = t.LlavaConfig(
            text_config=text | {"model_type": "llama"}, image_token_index=IMAGE,
            vision_config=TOWER | {"model_type": "clip_vision_model", "projection_dim": 32},
        )  # fmt: skip
    torch.manual_seed(0)
    return t.AutoModelForImageTextToText.from_config(config)


def image_of(kind: str, generator: torch.Generator) -> tuple[int, dict[str, Tensor]]:
    """Return how many tokens an image is, and what a processor would make of one of 56 x 56 pixels."""
    if kind == "qwen3_vl":
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=generator)
        return 4, {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]])}
    return (4 if kind == "gemma3" else 16), {"pixel_values": torch.randn(1, 3, 56, 56, generator=generator)}


def documents_of(kind: str, count: int, row: int) -> list[dict[str, Any]]:
    """Return documents of an image and text each: `sample` [tokens] and `image`."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for place in torch.randperm(count, generator=generator).tolist():
        tokens, image = image_of(kind, generator)
        length = tokens + 2 + (row - tokens - 2) * place // (count - 1)
        ids = torch.randint(3, 1000, (length,), generator=generator)
        at = int(torch.randint(0, length - tokens, (1,), generator=generator))
        ids[at : at + tokens] = IMAGE
        labels = torch.where(ids == IMAGE, IGNORED, ids)
        labels[0] = IGNORED
        name = {"qwen3_vl": ["mm_token_type_ids"], "gemma3": ["token_type_ids"]}.get(kind, [])
        kinds = {each: (ids == IMAGE).long() for each in name}
        made.append({"sample": {"input_ids": ids, "labels": labels} | kinds, "image": image})
    return made


def with_images(batch: dict[str, Tensor], documents: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Return a micro-batch with the pixels of its documents."""
    images = [document["image"] for document in documents]
    return batch | {name: torch.cat([image[name] for image in images]) for name in images[0]}


def _in_fours(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    return (items[start : start + MICRO_BATCH] for start in range(0, len(items), MICRO_BATCH))


def padded(documents: Sequence[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """Return micro-batches of documents as they come."""
    return [with_images(stack([each["sample"] for each in some], 2, 1), some) for some in _in_fours(documents)]


def packed(
    documents: Sequence[dict[str, Any]], row: int, positions: DocumentPositions | None
) -> list[dict[str, Tensor]]:
    """Return micro-batches of rows of documents."""
    sizes = numpy.array([len(each["sample"]["input_ids"]) for each in documents])
    order, pointers = best_fit(sizes, row)
    rows = [[documents[index] for index in order[start:stop]] for start, stop in pairwise(pointers)]
    batches = []
    for some in _in_fours(rows):
        made = stack([_row(of, row, positions) for of in some], 2, 1)
        batches.append(with_images(made, [each for of in some for each in of]))
    return batches


def _row(documents: Sequence[dict[str, Any]], row: int, positions: DocumentPositions | None) -> dict[str, Tensor]:
    samples = [each["sample"] for each in documents]
    rest = row - sum(len(sample["input_ids"]) for sample in samples)
    made = {name: torch.cat([sample[name] for sample in samples]) for name in samples[0]}
    fill = {"input_ids": 2, "labels": IGNORED}
    made = {name: torch.nn.functional.pad(t, (0, rest), value=fill.get(name, 0)) for name, t in made.items()}
    places = [_places(each, positions) for each in documents]
    places.append(torch.arange(rest) if positions is None else torch.arange(rest).expand(4, -1))
    return made | {"position_ids": torch.cat(places, -1)}


def _places(document: dict[str, Any], positions: DocumentPositions | None) -> Tensor:
    sample = document["sample"]
    if positions is None:
        return torch.arange(len(sample["input_ids"]))
    kinds = {name: t for name, t in sample.items() if name.endswith("type_ids")}
    return positions(sample["input_ids"], kinds, document["image"])


def without_images(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a micro-batch of as many tokens of text."""
    return {"input_ids": batch["input_ids"].where(batch["input_ids"] != IMAGE, 5), "labels": batch["labels"]}


def main(words: list[str] | None = None) -> None:
    """Take the steps in turns, and print what they took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--type", default="qwen3_vl", choices=("qwen3_vl", "llava", "gemma3"))
    parser.add_argument("--documents", type=int, default=64)
    parser.add_argument("--row", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args(words)
    model = model_of(given.type, given.width, given.blocks)
    documents = documents_of(given.type, given.documents, given.row)
    of_padded = padded(documents)
    ways = {
        "padded": of_padded,
        "packed": packed(documents, given.row, DocumentPositions.of(model)),
        "text": [without_images(batch) for batch in of_padded],
    }
    engine = Engine(model, stage=2, precision="fp32", optimizer=lambda params: torch.optim.SGD(params, lr=1e-6))
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses = {name: float(engine.evaluate(batches)) for name, batches in ways.items()}
    for _ in range(given.rounds):
        for name, batches in ways.items():
            began = time.process_time()
            engine.train_batch(batches)
            seconds[name].append(time.process_time() - began)
    took = {name: median(each) for name, each in seconds.items()}
    tokens = {name: sum(batch["input_ids"].numel() for batch in batches) for name, batches in ways.items()}
    for name in ("padded", "packed"):
        print(f"{name}: {took[name]:.3f} s, {tokens[name]:,} tokens computed, loss {losses[name]:.6f}")
    print(f"the tower's share of a padded step: {1 - took['text'] / took['padded']:.1%}")
    print(f"packed / padded: {took['packed'] / took['padded']:.2f} of the time (target: {TARGET})")


if __name__ == "__main__":
    main()
