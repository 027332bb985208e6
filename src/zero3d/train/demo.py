"""The embedded demo: a byte-level Llama trained on the standard library's text, with everything measured.

model       LlamaForCausalLM from its config, 1.4 M parameters, no download
data        train/data.py: each rank draws its own windows
training    engine(**batch), engine.backward(loss), engine.step()
afterwards  held-out loss, a generated sample, a checkpoint, a Hugging Face folder that is loaded back
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from zero3d.engine import Engine
from zero3d.errors import ConfigError
from zero3d.mesh import Mesh
from zero3d.train.data import (
    SEPARATOR,
    VOCABULARY,
    Batch,
    Corpus,
    decode,
    encode,
    held_out_batches,
    read_corpus,
    training_batch,
)
from zero3d.train.measure import MemoryRow, TrafficRow, activation_meter, memory_rows, traffic_rows
from zero3d.train.progress import Progress
from zero3d.zero.collectives import broadcast_ints

FOLDER = "zero3d-demo"
BATCH, LENGTH = 8, 128  # windows per rank and step, bytes per window
PEAK_LR, FINAL_LR, WARM_UP = 1.5e-3, 1.5e-4, 20
HELD_OUT_BATCHES = 8
PROMPT, SAMPLE_LENGTH = "def ", 240


@dataclass(frozen=True)
class Recipe:
    """What the command line chooses."""

    stage: int
    precision: str
    steps: int


class StepRecord(NamedTuple):
    """One line of metrics.jsonl; the loss is that of rank 0's windows, in nats per byte."""

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens_per_s: float
    applied: bool


@dataclass(frozen=True)
class Result:
    """What a run found out, as seen by rank 0."""

    recipe: Recipe
    ranks: int
    params: int
    history: Sequence[StepRecord]
    seconds: float
    memory: Sequence[MemoryRow]
    traffic: Sequence[TrafficRow]
    held_out_loss: float
    reloaded_loss: float
    sample: str
    folder: Path
    checkpoint: Path
    export: Path


def build_model() -> nn.Module:
    """A small Llama over bytes; the same weights on every rank and in every run."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=192, intermediate_size=512, num_hidden_layers=3, num_attention_heads=6,
        max_position_embeddings=4 * LENGTH, initializer_range=0.04,
        bos_token_id=SEPARATOR, eos_token_id=SEPARATOR, pad_token_id=SEPARATOR,
    )  # fmt: skip
    model: nn.Module = LlamaForCausalLM(config)
    return model


def build_engine(recipe: Recipe) -> Engine:
    """AdamW without decay on norms, warm-up and a cosine."""

    def cosine(step: int) -> float:
        warm = min(WARM_UP, recipe.steps // 10 + 1)
        if step < warm:
            return (step + 1) / warm
        done = (step - warm) / max(recipe.steps - warm, 1)
        floor = FINAL_LR / PEAK_LR
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * done))

    def adamw(params: Any) -> Optimizer:
        return torch.optim.AdamW(params, lr=PEAK_LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    return Engine(
        build_model(),
        stage=recipe.stage,
        mesh=Mesh(),
        precision=recipe.precision,
        optimizer=adamw,
        scheduler=lambda optimizer: LambdaLR(optimizer, cosine),
        param_groups=[{"match": "*norm*", "weight_decay": 0.0}],
    )


def run(recipe: Recipe, progress: Progress) -> Result:
    """The whole demo on this rank; the result of rank 0 is the one to print."""
    engine, corpus = build_engine(recipe), read_corpus()
    folder = claim_folder(engine)
    ranks, rank = engine.comm.size, engine.comm.rank
    progress.say(
        f"zero3d train: stage {recipe.stage}, {recipe.precision}, {ranks} rank{'s' if ranks > 1 else ''} on "
        f"{engine.mesh.device.type}; Llama with {count_params(engine):,} parameters"
    )
    progress.say(
        f"{recipe.steps} steps of {ranks * BATCH * LENGTH:,} bytes out of {corpus.files} files of the Python standard "
        f"library; writing to {folder}"
    )
    engine.traffic.reset()  # from here on it counts training only
    begun = time.monotonic()
    history, activations = train(engine, corpus, recipe.steps, folder, progress)
    seconds = time.monotonic() - begun
    applied = sum(record.applied for record in history)
    memory = memory_rows(engine, engine.memory, activations)
    traffic = traffic_rows(engine, engine.traffic, applied, len(history) - applied)
    progress.say("trained; now the held-out loss, a sample, a checkpoint and the export")
    batches = held_out_batches(corpus, -(-HELD_OUT_BATCHES // ranks) * ranks, BATCH, LENGTH)
    batches = [_to(batch, engine.mesh.device) for batch in batches]
    held_out = float(engine.evaluate(batches[rank::ranks]))
    sample = generate(engine)
    checkpoint = engine.save(folder / "checkpoints")
    engine.export(folder / "hf")
    reloaded = reload_and_evaluate(folder / "hf", batches) if rank == 0 else math.nan
    return Result(
        recipe, ranks, count_params(engine), history, seconds, memory, traffic, held_out, reloaded, sample, folder,
        folder / "checkpoints" / checkpoint.name, folder / "hf",
    )  # fmt: skip


def count_params(engine: Engine) -> int:
    """Psi."""
    return sum(unit.layout.numel for unit in engine.units)


def claim_folder(engine: Engine) -> Path:
    """Make the first free one of zero3d-demo, zero3d-demo-2, ... in the current directory."""
    number = 1
    while engine.comm.rank == 0:
        try:
            _folder(number).mkdir()
            break
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"{_folder(number).resolve()} cannot be created ({error.strerror}): run zero3d train in a directory "
                "you may write to."
            ) from error
    return _folder(broadcast_ints(engine.comm, [number])[0])


def _folder(number: int) -> Path:
    return Path(FOLDER if number == 1 else f"{FOLDER}-{number}")


def train(
    engine: Engine, corpus: Corpus, steps: int, folder: Path, progress: Progress
) -> tuple[list[StepRecord], Mapping[str, int]]:
    """All steps; what each did, and the bytes autograd saved in the first forward."""
    history: list[StepRecord] = []
    activations: Mapping[str, int] = {}
    with (folder / "metrics.jsonl").open("w") if engine.comm.rank == 0 else nullcontext() as metrics:
        for step in progress.track(range(1, steps + 1)):
            begun = time.monotonic()
            batch = training_batch(corpus, engine.comm.rank, step, BATCH, LENGTH)
            with activation_meter(engine.units) if step == 1 else nullcontext(activations) as activations:
                loss = engine(**_to(batch, engine.mesh.device)).loss
            engine.backward(loss)
            done = engine.step()
            seen = (float(loss.detach()), float(done.grad_norm), float(done.lr))
            rate = engine.comm.size * BATCH * LENGTH / (time.monotonic() - begun)
            history.append(StepRecord(step, *seen, rate, bool(done.applied)))
            progress.show(history[-1]._asdict())
            if metrics is not None:
                metrics.write(
                    json.dumps({k: v if math.isfinite(v) else None for k, v in history[-1]._asdict().items()})
                )
                metrics.write("\n")
    return history, activations


def generate(engine: Engine) -> str:
    """A sampled continuation of PROMPT, the same on all ranks."""
    torch.manual_seed(0)
    ids = engine.generate(encode(PROMPT), SAMPLE_LENGTH, do_sample=True, temperature=0.7, top_k=40)
    return decode(ids[0])


def reload_and_evaluate(export: Path, batches: Sequence[Batch]) -> float:
    """The mean loss of the exported model as anybody would load it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(export, dtype="auto").to(batches[0]["input_ids"].device).eval()
    with torch.no_grad():
        losses = [float(model(**batch).loss) for batch in batches]
    return sum(losses) / len(losses)


def _to(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}
