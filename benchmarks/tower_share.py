"""A step of a small Qwen3-VL with its images beside one of text alone, in turns, and the same two as planned.

    python benchmarks/tower_share.py --rounds 15 --json out.json
    python benchmarks/tower_share.py --prepare 12                  images of a megapixel on one core, without a model

    with     one image of 1,024 patches and 256 tokens of text in each sequence, tower frozen or trained
    text     other tokens in the place of images: what a step takes without the tower
    ratio    seconds of the tower over those of all else: (with - text) / text

Seconds are a CPU's, of one thread, and the least of several, so that other programs do not count: of forwards and
backwards in fp32, since those of attention in bf16 are several times as slow as a card's on a CPU. The plan is for a
card with the rates of this core, measured first on sizes of the tower: products, attention without a mask, copies.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from zero3d import Engine
from zero3d.data.image_files import decode
from zero3d.models.images import tower_parameters
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec import ClusterSpec, ModelSpec, ParallelPlan, Patches
from zero3d.tools.sim.model_spec import of_text, trace

SIDE, TEXT, SEQUENCES = 32, 256, 2  # patches of an image's side, tokens of text, sequences of a micro-batch
LENGTH = SIDE * SIDE // 4 + TEXT
IMAGE, VOCABULARY = 1023, 1024
WIDE, BLOCKS = 512, 4  # of the language model
SEEN, DEEP, PATCH = 384, 5, 8  # width and blocks of the tower, pixels of its patches: few, since a CPU is slow on them
BESIDE = ("fixed", "optimizer")  # of a step, beside forward and backward


def small_model() -> Any:
    """Build a Qwen3-VL whose tower takes about a third of a step, with random weights."""
    import transformers as t

    text = {
        "vocab_size": VOCABULARY, "hidden_size": WIDE, "intermediate_size": 3 * WIDE, "num_hidden_layers": BLOCKS,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [12, 10, 10]},
    }  # fmt: skip
    tower = {
        "depth": DEEP, "num_heads": 6, "patch_size": PATCH, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "hidden_size": SEEN, "intermediate_size": 4 * SEEN, "out_hidden_size": WIDE, "num_position_embeddings": 1024,
        "deepstack_visual_indexes": [2],
    }  # fmt: skip
    tokens = {
        "image_token_id": IMAGE,
        "video_token_id": 1022,
        "vision_start_token_id": 1021,
        "vision_end_token_id": 1020,
    }
    torch.manual_seed(0)
    return t.Qwen3VLForConditionalGeneration(t.Qwen3VLConfig(text_config=text, vision_config=tower, **tokens))


def micro_batch(images: bool) -> dict[str, Tensor]:
    """Return sequences of as many tokens with an image each, or with text in its place."""
    ids = torch.randint(3, 1000, (SEQUENCES, LENGTH))
    made = {"input_ids": ids, "labels": ids.clone()}
    if not images:
        return made
    ids[:, 4 : 4 + SIDE * SIDE // 4] = IMAGE
    pixels = torch.randn(SEQUENCES * SIDE * SIDE, 3 * 2 * PATCH**2)
    grid = torch.tensor([[1, SIDE, SIDE]] * SEQUENCES)
    return made | {"pixel_values": pixels, "image_grid_thw": grid, "mm_token_type_ids": (ids == IMAGE).int()}


def measured(frozen: bool, rounds: int) -> dict[str, float]:
    """Return the seconds of forward and backward with images and without, in turns: the least of several."""
    model = small_model()
    for p in tower_parameters(model):
        p.requires_grad_(not frozen)
    engine = Engine(model, stage=0, precision="fp32")
    batches = {name: micro_batch(name == "with") for name in ("with", "text")}
    seconds: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(rounds + 1):
        for name, batch in batches.items():
            begun = time.process_time()
            engine.backward(engine(**batch, use_cache=False).loss)
            seconds[name].append(time.process_time() - begun)
            engine.step()
    return {name: min(each[1:]) for name, each in seconds.items()}


def planned(frozen: bool, here: ClusterSpec) -> dict[str, float]:
    """Return the same seconds as planned for this machine."""
    model = small_model()
    for p in tower_parameters(model):
        p.requires_grad_(not frozen)
    spec = trace(model, LENGTH, "a small Qwen3-VL", patches=Patches(SIDE * SIDE))
    assert spec.patches == SIDE * SIDE, spec.provenance
    text = replace(spec, parts=tuple(of_text(spec)), patches=0, pixels=0)
    return {name: _computing(each, here) for name, each in (("with", spec), ("text", text))}


def _computing(spec: ModelSpec, here: ClusterSpec) -> float:
    parts = evaluate(spec, here, ParallelPlan(micro_batch=SEQUENCES)).seconds.parts
    return sum(seconds for name, seconds in parts.items() if name not in BESIDE)


def ratio(seconds: dict[str, float]) -> float:
    """Return the tower's seconds over those of all else."""
    return (seconds["with"] - seconds["text"]) / seconds["text"]


def this_core() -> ClusterSpec:
    """Return a machine with the rates of one core of this one, as `zero3d calibrate` measures those of all."""
    rows, narrow, wide = SEQUENCES * SIDE * SIDE, SEEN, 4 * SEEN  # of an MLP's product
    a, b = torch.randn(rows, narrow), torch.randn(narrow, wide)
    heads = torch.randn(1, SEEN // 64, SIDE * SIDE, 64)
    source = torch.zeros(64 << 20, dtype=torch.uint8)
    target = torch.empty_like(source)
    products = 2.0 * rows * narrow * wide / _seconds(lambda: a @ b)
    attention = 4.0 * SEEN * (SIDE * SIDE) ** 2 / _seconds(lambda: scaled_dot_product_attention(heads, heads, heads))
    copies = 2.0 * len(source) / _seconds(lambda: target.copy_(source))
    base = cluster("cpu", 1, 1)
    gpu = replace(base.gpu, flops=products, matrix=1.0, flash=attention / products, bandwidth=copies)
    return replace(base, gpu=gpu)


def _seconds(work: Callable[[], object]) -> float:
    """Return the least seconds of a CPU that work takes."""
    taken = []
    for _ in range(40):
        begun = time.process_time()
        work()
        taken.append(time.process_time() - begun)
    return min(taken[1:])


def prepared(count: int) -> Iterator[tuple[str, float]]:
    """Yield what one core takes for an image of 1024 x 1024 pixels: to decode a JPEG file of it, and to process it."""
    import transformers as t
    from PIL import Image

    noise = torch.randint(0, 255, (128, 128, 3), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    file = BytesIO()
    Image.fromarray(noise.numpy()).resize((1024, 1024), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    processor = t.Qwen2VLImageProcessorPil(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216)
    decoding, processing, patches = [], [], 0
    for _ in range(count + 1):
        begun = time.process_time()
        image = decode(Path(), {"bytes": file.getvalue(), "path": "a.jpg"})
        decoded = time.process_time()
        made = processor(images=[image], return_tensors="pt")
        patches = len(made["pixel_values"])
        decoding.append(decoded - begun)
        processing.append(time.process_time() - decoded)
    yield "patches", patches
    yield "decoding", min(decoding[1:])
    yield "processing", min(processing[1:])


def main() -> None:
    """Measure, plan, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--prepare", type=int, metavar="N", help="prepare N images in place of steps")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any]
    if arguments.prepare:
        result = dict(prepared(arguments.prepare))
    else:
        here = this_core()
        gpu = here.gpu
        result = {"rates": {"products": gpu.flops, "attention": gpu.flops * (gpu.flash or 0), "copies": gpu.bandwidth}}
        for name, frozen in (("frozen", True), ("trained", False)):
            found, plan = measured(frozen, arguments.rounds), planned(frozen, here)
            result[name] = {
                "measured": found, "planned": plan, "ratio": ratio(found), "planned_ratio": ratio(plan),
                "off": ratio(plan) / ratio(found) - 1,
            }  # fmt: skip
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
