"""Steps of small models, timed on this machine: what `zero3d calibrate` fits its profile on.

    a run differs from the first in       what that tells apart
    ------------------------------------  ----------------------------------------------------------
    blocks                                what the host adds for each; the rest of a step
    micro-batches                         what is of a micro-batch, and what of a step
    width                                 products and the update, which grow with its square
    length                                attention
    vocabulary                            the loss
    stage (on more ranks than one)        gathers of parameters

All models are Llamas with new weights on random tokens, in bf16. Their engines take steps in turn, so that what slows
the machine for a while slows all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.models.build import RandomWeights, build
from zero3d.tools.plan.corrected import Timed
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan
from zero3d.tools.sim.model_spec import trace

WARM, ROUNDS = 2, 7  # steps before and of the timing
HEAD = 64


class Small(NamedTuple):
    """A small run: the shape of its model, and how it trains."""

    blocks: int = 2
    hidden: int = 256
    length: int = 128
    vocab: int = 1024
    micro_batch: int = 4
    accumulate: int = 1
    stage: int = 0

    @property
    def name(self) -> str:
        """Return what the model is called."""
        return f"llama of {self.blocks} x {self.hidden}"


def small_runs(device: str, ranks: int) -> list[Small]:
    """Return the runs for a kind of device. An accelerator's are larger, or it would wait for its host in all."""
    first = Small() if device == "cpu" else Small(hidden=1024, length=1024, vocab=8192)
    runs = [
        first,
        first._replace(blocks=3 * first.blocks),
        first._replace(accumulate=3),
        first._replace(hidden=2 * first.hidden),
        first._replace(length=4 * first.length, micro_batch=1),
        first._replace(length=2 * first.length),
        first._replace(vocab=8 * first.vocab),
    ]
    return runs if ranks == 1 else [*runs, first._replace(stage=3), first._replace(hidden=2 * first.hidden, stage=3)]


def timed_runs(mesh: Mesh, runs: Sequence[Small], rounds: int = ROUNDS) -> list[Timed]:
    """Return the seconds of each run's steps, rank 0's on all. All ranks call it together."""
    prepared = [_prepared(mesh, run) for run in runs]
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(WARM + rounds):
        for (_, step), times in zip(prepared, seconds, strict=True):
            begun = time.perf_counter()
            step()
            times.append(time.perf_counter() - begun)
    figures = torch.tensor([median(times[WARM:]) for times in seconds], dtype=torch.float64, device=mesh.device)
    if mesh.world > 1:
        mesh.everyone.broadcast(figures, "-")
    return [
        Timed(model, _plan(mesh, run), float(figure))
        for (model, _), run, figure in zip(prepared, runs, figures, strict=True)
    ]


def _plan(mesh: Mesh, run: Small) -> ParallelPlan:
    return ParallelPlan(dp=mesh.world, stage=run.stage, micro_batch=run.micro_batch, accumulate=run.accumulate)


def _prepared(mesh: Mesh, run: Small) -> tuple[ModelSpec, Callable[[], None]]:
    """Return the model as the planner's data, and what takes one step of it and waits until it is over."""
    from transformers import LlamaConfig

    heads = run.hidden // HEAD
    config = LlamaConfig(
        vocab_size=run.vocab,
        hidden_size=run.hidden,
        intermediate_size=HEAD * round(run.hidden * 8 / 3 / HEAD),
        num_hidden_layers=run.blocks,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=run.length,
    )
    model = build(config)
    spec = trace(model, run.length, run.name)
    engine = Engine(
        model, mesh=mesh, stage=run.stage, accumulate=run.accumulate, weights=RandomWeights(model, 0), precision="bf16"
    )
    random = torch.Generator().manual_seed(mesh.rank)

    def batch() -> dict[str, Tensor | bool]:
        tokens = torch.randint(run.vocab, (run.micro_batch, run.length), generator=random).to(mesh.device)
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    def step() -> None:
        engine.train_batch([batch() for _ in range(run.accumulate)])
        if mesh.device.type != "cpu":
            torch.get_device_module(mesh.device).synchronize(mesh.device)

    return spec, step
