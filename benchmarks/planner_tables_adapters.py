"""Readers of published fine-tuning runs (finetuning_runs.csv): LoRA and QLoRA of Trainer with PEFT, fsdp_qlora, LitGPT.

Models are traced as `zero3d plan MODEL --lora r=64 --quantize nf4` traces them: two blocks, then all of them. What a
row calls its memory is compared with that: allocated, reserved, or what the device shows. Rows with a doubt are sets of
their own, whose names end in "(doubt)".

LitGPT's own files (config_hub/finetune) put adapters on queries and values of Llama 2 7B, and on all linear layers of
TinyLlama and Phi-3; that is taken for rows of these, whose table has the layers from memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from planner_constants import Planner
from planner_tables import GIB, Point, Row, Unknown, filled, number, whole

from zero3d.config import Lora, Model
from zero3d.config.sections import ALL_LINEAR
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec import Estimate, Forward, ModelSpec, ParallelPlan, Part

DROPOUT = 0.05  # of adapters, as in LitGPT's files: any share above 0 keeps as many bytes


class Shape(NamedTuple):
    """The sizes of a model whose blocks are Llama's, with Qwen's biases where `biases` says."""

    blocks: int
    hidden: int
    heads: int
    kv_heads: int
    wide: int
    vocab: int
    biases: bool = False


SHAPES = {
    "qwen-1.8b": Shape(24, 2048, 16, 16, 5504, 151936, True),
    "qwen-7b": Shape(32, 4096, 32, 32, 11008, 151936, True),
    "qwen-14b": Shape(40, 5120, 40, 40, 13696, 152064, True),
    "qwen-72b": Shape(80, 8192, 64, 64, 24576, 152064, True),
    "llama2-7b": Shape(32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": Shape(40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": Shape(80, 8192, 64, 8, 28672, 32000),
    "llama3-8b": Shape(32, 4096, 32, 8, 14336, 128256),
    "llama3-70b": Shape(80, 8192, 64, 8, 28672, 128256),
    "mistral-7b": Shape(32, 4096, 32, 8, 14336, 32000),
    "yi-34b": Shape(60, 7168, 56, 8, 20480, 64000),
    "phi3-mini": Shape(32, 3072, 32, 32, 8192, 32064),
    "tinyllama": Shape(22, 2048, 32, 4, 5632, 32000),
    "falcon-40b": Shape(60, 8192, 128, 8, 21845, 65024),
}
SYSTEMS = {
    "HF Trainer + PEFT": ("qwen", "peft"),
    "HF Trainer + DeepSpeed ZeRO-3": ("qwen", "peft-zero3"),
    "fsdp_qlora": ("fsdp_qlora", "fsdp-qlora"),
    "LitGPT": ("litgpt", "litgpt"),
}
EVERYWHERE = ("phi3-mini", "tinyllama")  # of LitGPT's, adapters on all linear layers
METHODS = {"lora": None, "qlora": "nf4", "full": None}


def shape_of(name: str) -> Shape:
    """Look up a model by the letters and digits of its name. Raises Unknown."""
    plain = re.sub(r"[-_.]", "", name.lower())
    for known, shape in SHAPES.items():
        if re.sub(r"[-_.]", "", known) == plain:
            return shape
    raise Unknown(f"{name} has no shape here")


@cache
def traced(shape: Shape, length: int, rank: int | None, targets: tuple[str, ...], quantize: str | None) -> ModelSpec:
    """Trace a model of this shape with adapters of this rank on these layers; None: all of it is trained."""
    from transformers import LlamaConfig, Qwen2Config

    from zero3d.tools.sim.model_spec import open_spec

    kind = Qwen2Config if shape.biases else LlamaConfig
    config = kind(num_hidden_layers=2, hidden_size=shape.hidden, num_attention_heads=shape.heads,
                  num_key_value_heads=shape.kv_heads, intermediate_size=shape.wide, vocab_size=shape.vocab,
                  max_position_embeddings=max(length, 4096), tie_word_embeddings=False)  # fmt: skip
    lora = None if rank is None else Lora(rank=rank, targets=targets, dropout=DROPOUT)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        named = {**config.to_dict(), "architectures": [kind.__name__.replace("Config", "ForCausalLM")]}
        file.write_text(json.dumps(named))
        chosen, forward = Model(quantize=quantize), Forward(on_card=True)
        spec = open_spec(str(file), length, chosen=chosen, lora=lora, packed=False, beyond=True, forward=forward)
    first, block, _, last = spec.parts
    blocks = (_named(block, i) for i in range(shape.blocks))
    return replace(spec, parts=(first, *blocks, last))


def _named(block: Part, i: int) -> Part:
    """Return a block under another number."""
    units = [
        replace(unit, name=f"{i}.{unit.name}", weights=tuple(replace(w, name=f"{i}.{w.name}") for w in unit.weights))
        for unit in block.units
    ]
    return replace(block, units=tuple(units))


def _estimate(row: Row, planner: Planner, model: ModelSpec, system: str) -> Estimate:
    gpus, stage = whole(row, "gpus"), whole(row, "stage")
    plan = ParallelPlan(dp=gpus, stage=stage, micro_batch=whole(row, "micro"), accumulate=whole(row, "accumulate"),
                        activations=row["recompute"], tiled_loss=False)  # fmt: skip
    if row["offload"] != "none":
        raise Unknown("what is off the device is not told")
    return planner.evaluate(model, cluster(row["gpu"], gpus, 1), plan, system)


def finetuning(row: Row, planner: Planner) -> Iterator[Point]:
    """Predict a run's memory, by its kind, and its seconds."""
    if row["stack"] not in SYSTEMS:
        raise Unknown(f"{row['stack']} has no profile")
    source, system = SYSTEMS[row["stack"]]
    everywhere = row["targets"] == ALL_LINEAR or (source == "litgpt" and row["model"] in EVERYWHERE)
    targets = (ALL_LINEAR,) if everywhere else tuple(row["targets"].split(","))
    rank = None if row["method"] == "full" else whole(row, "rank")
    if system == "peft" and row["method"] == "qlora":
        system = "peft-gptq"
    model = traced(shape_of(row["model"]), whole(row, "seq"), rank, targets, METHODS[row["method"]])
    estimate = _estimate(row, planner, model, system)
    run = row["method"]
    name = f"{source}_{run}" + (" (doubt)" if row["doubt"] else "")
    if row["memory_gib"]:
        found = getattr(estimate.memory, row["memory_kind"]) / GIB
        yield Point(name, row["id"], "memory", found, number(row, "memory_gib"), unit="GiB", run=run)
        share = estimate.memory.device / cluster(row["gpu"], 1, 1).gpu.memory
        yield Point(name, row["id"], "fits", share, 1.0, run=run)
    if row["seconds"]:
        steps = 1024 / (estimate.tokens / model.length) if row["seconds_per"] == "1024 samples" else 1.0
        yield Point(name, row["id"], "time", steps * estimate.seconds.mid, number(row, "seconds"), unit="s", run=run)


ALPACA = 1304  # tokens of its longest document
LITGPT = {"Llama-2-7B": "llama2-7b", "Llama-2-13B": "llama2-13b", "Falcon-40B": "falcon-40b"}
FORMATS = {"none": None, "nf4": "nf4", "nf4-dq": "nf4-double", "int8": "int8"}


def lit_gpt(row: Row, planner: Planner) -> Iterator[Point]:
    """Predict LitGPT's earlier table of LoRA on queries and values. Host memory and free-text rows have no reader."""
    match = re.match(r"(\S+) LoRA r(\d+) bf16-true, quant (\S+), Alpaca", row["workload"])
    if not match or "GB max allocated" not in row["memory_kind"]:
        raise ValueError("workload")
    quantize = FORMATS[match[3]]
    model = traced(SHAPES[LITGPT[match[1]]], ALPACA, int(match[2]), ("q_proj", "v_proj"), quantize)
    plan = ParallelPlan(micro_batch=whole(row, "batch_per_gpu"), accumulate=2, tiled_loss=False)
    card = float(re.findall(r"(\d+)GB", row["hw"])[0])
    estimate = planner.evaluate(model, cluster(f"a100-{card:.0f}", 1, 1), plan, "litgpt")
    out, run = row["memory"] == "OOM", "qlora" if quantize else "lora"
    name = f"litgpt_{run}"
    yield Point(name, row["id"], "fits", filled(estimate, card), float(not out), run=run)
    if not out:
        yield Point(
            name, row["id"], "memory", estimate.memory.allocated / 1e9, number(row, "memory"), unit="GB", run=run
        )


ADAPTERS: dict[str, Callable[[Row, Planner], Iterator[Point]]] = {
    "finetuning_runs": finetuning,
    "measured_memory_misc_llava": lit_gpt,
}
