"""Steps of a 1B Llama with its states on the device and on the host, a way a part, with the device to itself.

Two sizes of a step: of one micro-batch, where the states' way over the link and the update have little to hide behind,
and of sixteen. Every way has the batches of `resident`. Losses are compared by `bits` alone, which fixes the
algorithms: they are those of `resident`, to the bit, but for the host's own Adam, whose kernel is another.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from llama import BATCH, LENGTH, SHAPE, utilisation
from model import batch
from peers import CLIP, adamw, shared_mesh
from ranks import synchronize

from campaign.account import Account, Place
from campaign.speed import CPU_BATCH, CPU_LENGTH, CPU_SHAPE, build
from campaign.training import BF16_TOLERANCE, MIDDLE, compare, engine_of, run_of, train
from zero3d import Engine, make_deterministic
from zero3d.activations.recomputation import recompute
from zero3d.distributed.mesh import Mesh

WAYS: Mapping[str, dict[str, Any]] = {
    "resident": {},
    "host": {"optimizer": "host", "executor": "host"},
    "device": {"optimizer": "host", "executor": "device"},
    "gradients": {"optimizer": "host", "executor": "host", "gradients": "host"},
    "params": {"optimizer": "host", "executor": "device", "params": "host"},
    "activations": {"activations": "host"},
    "disk": {"optimizer": "disk", "executor": "device"},
}
STEPS = {1: 3, 16: 2, 32: 1}  # timed, by micro-batches of a step; one more before them is not
SHORT, MOST = ("offload.activations", "offload.disk"), 16  # parts without the largest step
CPU_STEPS = {1: 3, 2: 2, 4: 1}


def bits(place: Place, account: Account) -> None:
    """Train a GPT with deterministic algorithms, by every way: the card's update is `resident`'s, to the bit."""
    make_deterministic(place.device)
    run = run_of(place, account, MIDDLE._replace(precision="bf16"))
    mesh = Mesh(device=place.device)
    reference = train(engine_of(mesh, run, 3), run)
    for name, options in WAYS.items():
        same = place.on_cpu or options.get("executor") != "host"
        with in_folder(options) as settings:
            engine = engine_of(mesh, run, 3, offload=settings, recomputes="activations" in settings)
            curve = train(engine, run)
            engine.close()
        compare(account, name, curve, reference, 0.0 if same else BF16_TOLERANCE)


@contextmanager
def in_folder(options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Give options of records on a disk a folder for them inside."""
    if "disk" not in options.values():
        yield dict(options)
        return
    with tempfile.TemporaryDirectory(prefix="gpu-check-disk-") as folder:
        yield {**options, "directory": folder}


def offload(place: Place, account: Account) -> None:
    """Measure the way that the part is named after, with a thread of the host's Adam for every core."""
    with in_folder(WAYS[place.part.partition(".")[2]]) as settings:
        measure(place, account, settings)


def measure(place: Place, account: Account, settings: dict[str, Any]) -> None:
    """Measure steps with these settings of offload; blocks whose inputs leave the device are recomputed."""
    device = torch.device(place.device)
    shape, size, length = (CPU_SHAPE, CPU_BATCH, CPU_LENGTH) if place.on_cpu else (SHAPE, BATCH, LENGTH)
    account.ran("shape", {**shape, "batch": size, "length": length})
    torch.set_num_threads(1 if place.on_cpu else len(os.sched_getaffinity(0)))
    model = build(device, shape)
    if "activations" in settings:
        recompute(model, "full")
    engine = Engine(
        model, stage=3, mesh=shared_mesh(device), precision="bf16", clip_norm=CLIP, optimizer=adamw, offload=settings
    )
    account.ran("threads", torch.get_num_threads())
    tokens = 0
    for micro_batches, steps in (CPU_STEPS if place.on_cpu else STEPS).items():
        if micro_batches > MOST and place.part in SHORT:
            continue
        seconds: list[float] = []
        losses: list[float] = []
        for _ in range(1 + steps):
            batches = [batch(tokens + k, size, length, shape["vocab_size"], device) for k in range(micro_batches)]
            tokens += micro_batches
            seconds.append(timed(engine, batches, device, losses))
        row: dict[str, Any] = {
            "tokens_per_s": micro_batches * size * length / median(seconds[1:]),
            "median_s": median(seconds[1:]),
        }
        row |= {"seconds": seconds, "losses": losses, "micro_batches": micro_batches}
        account.ran(f"{micro_batches * size * length} tokens a step", row)
        account.ran(
            f"utilisation, {micro_batches} micro-batches", utilisation(device, row, shape, length, place.peak_tflops)
        )
    account.ran(
        "bytes", {f"{entry.category}, {entry.place}": entry.measured for entry in engine.memory if entry.measured}
    )
    engine.close()


def timed(engine: Engine, batches: list[Any], device: torch.device, losses: list[float]) -> float:
    """Return seconds of a step over these micro-batches."""
    synchronize(device)
    begun = time.perf_counter()
    loss = engine.train_batch([{"ids": ids, "targets": targets} for ids, targets in batches])
    synchronize(device)
    seconds = time.perf_counter() - begun
    losses.append(float(loss))
    return seconds
