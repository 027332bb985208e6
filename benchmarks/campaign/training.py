"""Short trainings that parts compare: the GPT of model.py on seeded tokens, by an engine or by a plain loop.

Nothing is read before the last step, so that nothing waits between steps: what a race spoils stays spoiled.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from model import Shape, batch, build_gpt
from peers import CLIP, Plain, Setting, adamw
from ranks import over_ranks
from torch import Tensor

from campaign.account import Account, Place
from zero3d import Engine
from zero3d.activations.recomputation import recompute
from zero3d.distributed.mesh import Mesh

STAGES = (0, 1, 2, 3)
FP32_TOLERANCE = 1e-4  # relative, over a few steps of Adam
BF16_TOLERANCE = 5e-3


class Run(NamedTuple):
    """A short training; `batch` sequences per step over all ranks, in `accumulate` micro-batches."""

    shape: Shape
    batch: int
    seq: int
    steps: int
    precision: str = "fp32"
    accumulate: int = 1


SMALL = Run(Shape(layers=2, d=128, vocab=512), batch=8, seq=64, steps=4)
SMALLEST = Run(Shape(layers=2, d=64, vocab=256), batch=8, seq=32, steps=3)
MIDDLE = Run(Shape(layers=4, d=512, vocab=8192), batch=8, seq=256, steps=4)


class Curve(TypedDict):
    """Mean loss over ranks and gradient norm (before clipping) of every step."""

    losses: list[float]
    norms: list[float]


def run_of(place: Place, account: Account, of_card: Run) -> Run:
    """Return the training for a card, or the smallest where the CPU stands in; the account says which."""
    run = SMALLEST._replace(precision=of_card.precision, accumulate=of_card.accumulate) if place.on_cpu else of_card
    shape = run.shape
    account.ran("shape", f"GPT layers={shape.layers}, d={shape.d}, vocab={shape.vocab}; {run.batch} x {run.seq} tokens")
    return run


def setting_of(device: torch.device, run: Run) -> Setting:
    """Return what all variants of a run are built from; no reduced-precision matrix products in fp32."""
    torch.set_float32_matmul_precision("highest")
    return Setting(partial(build_gpt, run.shape), device, run.precision)


def own_batch(device: torch.device, run: Run, step: int) -> tuple[Tensor, Tensor]:
    """Return this rank's share of a step's global batch."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    ids, targets = batch(step, run.batch, run.seq, run.shape.vocab, device)
    return ids.chunk(ranks)[rank], targets.chunk(ranks)[rank]


def engine_of(
    mesh: Mesh, run: Run, stage: int, exact: bool = False, reduce_dtype: str = "fp32", reduce_scatter: str = "auto",
    offload: dict[str, Any] | None = None, recomputes: bool = False,
) -> Engine:  # fmt: skip
    """Build the engine of a run, with the optimizer and the clip of every variant of `peers`."""
    model = setting_of(mesh.device, run).build()
    if recomputes:
        recompute(model, "full")
    return Engine(
        model, stage=stage, mesh=mesh, precision=run.precision, reduce_dtype=reduce_dtype,
        clip_norm=CLIP, optimizer=adamw, exact=exact, accumulate=run.accumulate,
        reduce_scatter=reduce_scatter, offload=offload or {},
    )  # fmt: skip


def train(engine: Engine, run: Run) -> Curve:
    """Train; the values are read after the last step."""
    device = engine.mesh.device
    losses, norms = [], []
    for step in range(run.steps):
        ids, targets = own_batch(device, run, step)
        parts = zip(ids.chunk(run.accumulate), targets.chunk(run.accumulate), strict=True)
        of_step = [one_loss(engine, *part) for part in parts]
        norms.append(engine.step().grad_norm)
        losses.append(torch.stack(of_step).mean())
    shared = over_ranks([float(loss) for loss in losses], dist.ReduceOp.SUM, device)
    return Curve(losses=[loss / dist.get_world_size() for loss in shared], norms=[float(norm) for norm in norms])


def one_loss(engine: Engine, ids: Tensor, targets: Tensor) -> Tensor:
    """Run forward and backward of one micro-batch; its loss on the device."""
    loss: Tensor = engine(ids, targets)
    engine.backward(loss)
    return loss.detach()


def train_plainly(device: torch.device, run: Run) -> Curve:
    """Train by the loop one would write without an engine, in one process with the whole batch."""
    plain = Plain(setting_of(device, run))
    losses, norms = [], []
    for step in range(run.steps):
        losses.append(float(plain.step(*batch(step, run.batch, run.seq, run.shape.vocab, device))))
        norms.append(float(plain.norm))
    return Curve(losses=losses, norms=norms)


def difference(a: Curve, b: Curve) -> float:
    """Return the largest relative difference of losses and norms; NaN when either has one."""
    pairs = [*zip(a["losses"], b["losses"], strict=True), *zip(a["norms"], b["norms"], strict=True)]
    values = [abs(x - y) / max(abs(y), 1e-30) for x, y in pairs]
    return max(values) if all(value == value for value in values) else float("nan")


def compare(account: Account, what: str, found: Curve, reference: Curve, tolerance: float) -> None:
    """Note how far a curve is from its reference; more than the tolerance is wrong, 0 asks for equal bits."""
    apart = difference(found, reference)
    holds = found == reference if tolerance == 0 else apart <= tolerance  # NaN is wrong
    row = {"difference": apart, "identical": found == reference, "losses": found["losses"]}
    account.ran(what, row, "" if holds else f"{apart:.2e} off, {tolerance:g} allowed: {found} for {reference}")
