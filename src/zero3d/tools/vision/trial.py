"""A trial of a type: what trains a tiny model of it, at stage 3 on two ranks, beside plain PyTorch.

    step    rank 0         rank 1
    1       an image each  text alone      the tower runs on both
    2       an image each  an image each

Losses, norms and weights after each step must be those of one process, which has all micro-batches; with SGD a weight
has moved by its gradient, so that every gradient is compared. What comes of it is a verdict:

    trained    they are
    refused    the engine said no, in its own words
    failed     they are not, or the ranks raised something else, or did not come back
    not tried  there is no tiny model, or plain PyTorch does not train it, and why
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.tools.vision.tiny import micro_batch, tiny_model

RANKS = 2
IMAGES = (((1, 1), (0, 0)), ((1, 1), (1, 1)))  # by step, of each rank: images of each row
CLIP = 0.5
NEAR, ROUNDING = 1e-4, 1e-6  # of the largest gradient of a tensor, of its largest weight
SECONDS = 90.0  # that a trial may take
GRACE = 5.0  # seconds that the second rank has after the first one has failed
TRAINED, REFUSED, FAILED, UNTRIED = "trained", "refused", "failed", "not tried"


class Found(NamedTuple):
    """Says what came of a trial, and why."""

    verdict: str
    why: str = ""


class Step(NamedTuple):
    """Holds a step's mean loss, its gradients' norm, and the weights after it."""

    loss: float
    norm: float
    weights: dict[str, Tensor]


def trial(kind: str, seconds: float = SECONDS) -> Found:
    """Return what comes of a type's trial on two ranks, each a process of its own, which are ended after `seconds`."""
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    with tempfile.TemporaryDirectory(prefix="zero3d-vision-") as folder:
        ranks, ends = [], []
        for rank in range(RANKS):
            ours, theirs = context.Pipe(duplex=False)
            ranks.append(context.Process(target=_rank, args=(kind, rank, str(Path(folder) / "store"), theirs)))
            ends.append(ours)
            ranks[-1].start()
            theirs.close()
        try:
            return _first(ends, time.monotonic() + seconds) or Found(FAILED, f"no word of it in {seconds:.0f} s")
        finally:
            for process in ranks:
                process.kill()
                process.join()


def on_this_rank(kind: str) -> Found:
    """Return what comes of a type's trial in a group of two ranks, each of which calls this."""
    try:
        given = tiny_model(kind)
        batches = _batches(given)
        wanted = train_plain(given, batches)
    except ConfigError as error:
        return Found(UNTRIED, _said(error))
    except Exception as error:  # noqa: BLE001 (any error of the model's own, quoted)
        return Found(UNTRIED, f"plain PyTorch does not train it on images ({_said(error)})")
    try:
        found = train_engine(tiny_model(kind), batches)
    except ConfigError as error:
        return Found(REFUSED, _said(error))
    except Exception as error:  # noqa: BLE001 (whatever ranks raise, quoted)
        return Found(FAILED, _said(error))
    before = {name: p.detach() for name, p in tiny_model(kind).named_parameters()}
    why = _difference(before, wanted, found)
    return Found(FAILED, why) if why else Found(TRAINED)


def train_plain(model: nn.Module, batches: Sequence[Sequence[dict[str, Tensor]]]) -> list[Step]:
    """Return steps of the loop that everyone writes, in one process that has the micro-batches of all ranks."""
    optimizer, steps = _sgd(model.parameters()), []
    for step in batches:
        losses = [_loss(model(**batch, use_cache=False)) for batch in step]
        torch.autograd.backward(torch.stack(losses).mean())
        norm = float(nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], CLIP))
        optimizer.step()
        optimizer.zero_grad()
        steps.append(Step(sum(loss.item() for loss in losses) / len(step), norm, _weights(model)))
    return steps


def train_engine(model: nn.Module, batches: Sequence[Sequence[dict[str, Tensor]]]) -> list[Step]:
    """Return the same steps of an engine at stage 3, whose ranks have a micro-batch each."""
    engine = Engine(model, mesh=Mesh(device="cpu"), stage=3, precision="fp32", clip_norm=CLIP, optimizer=_sgd)
    steps = []
    for step in batches:
        loss = engine(**step[dist.get_rank()], use_cache=False).loss
        engine.backward(loss)
        norm = float(engine.step().grad_norm)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        with engine.full_params():
            steps.append(Step(float(mean) / RANKS, norm, _weights(engine.module)))
    return steps


def _batches(model: nn.Module) -> list[list[dict[str, Tensor]]]:
    generator = torch.Generator().manual_seed(1)
    return [[micro_batch(model, generator, images) for images in step] for step in IMAGES]


def _loss(output: Any) -> Tensor:
    if output.loss is None:
        raise ConfigError("its forward makes no loss of labels")
    loss: Tensor = output.loss
    return loss


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def _difference(before: dict[str, Tensor], wanted: Sequence[Step], found: Sequence[Step]) -> str:
    """Return what is first not as wanted, "" where all is."""
    for number, (want, have) in enumerate(zip(wanted, found, strict=True), 1):
        for name, one, other in (("loss", want.loss, have.loss), ("norm", want.norm, have.norm)):
            if not abs(one - other) <= NEAR * abs(one):
                return f"in step {number} the {name} is {other:.6g}, and {one:.6g} in plain PyTorch"
        for name, weight in want.weights.items():
            moved, off = (weight - before[name]).abs().max(), (weight - have.weights[name]).abs().max()
            if not off <= NEAR * moved + ROUNDING * weight.abs().max():
                return f"after step {number} {name} is off by {float(off):.1e}, and has moved by {float(moved):.1e}"
        before = want.weights
    return ""


def _rank(kind: str, rank: int, store: str, end: Connection) -> None:
    """Run a rank in a process of its own, and send what it finds."""
    from transformers.utils import logging as quiet_transformers

    warnings.filterwarnings("ignore")
    quiet_transformers.set_verbosity_error()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    end.send(tuple(on_this_rank(kind)))
    end.close()
    os._exit(0)  # the other rank may still wait for this one


def _first(ends: Sequence[Connection], deadline: float) -> Found | None:
    """Return what the first rank finds that has not trained, else that both have; None where there is no word."""
    waiting = list(ends)
    found: list[Found] = []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(waiting, left):
            assert isinstance(end, Connection)
            waiting.remove(end)
            try:
                found.append(Found(*end.recv()))
            except EOFError:
                found.append(Found(FAILED, "a process of it died"))
            deadline = min(deadline, time.monotonic() + GRACE) if found[-1].verdict != TRAINED else deadline
    bad = [each for each in found if each.verdict != TRAINED]
    return next(iter(bad), found[0] if len(found) == len(ends) else None)


def _said(error: Exception) -> str:
    line = " ".join(str(error).split())[:300]
    return line if isinstance(error, ConfigError) else f"{type(error).__name__}: {line}"
