"""A training step of the benchmarks' GPT on one rank: optimizer states on the device, the host and the disk, in turns.

Every way has an engine of its own in one process, and the same batches; losses are compared as bits. A step of a way
is `train_batch`, whose update is behind the next forward at stage 3.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from model import Shape, batch, build_gpt

import zero3d
from offloading.turns import in_turns

LENGTH, SEQUENCES = 256, 4
SLOWEST = 1.15  # of a resident step
WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "host": {"offload": {"optimizer": "host"}},
    "host, split master": {"offload": {"optimizer": "host"}, "master": "split"},
    "host, split master, bf16 moments": {"offload": {"optimizer": "host", "moments": "bf16"}, "master": "split"},
    "host, device executor": {"offload": {"optimizer": "host", "executor": "device"}},
    "params and optimizer on host": {"offload": {"optimizer": "host", "params": "host"}},
    "disk": {"offload": {"optimizer": "disk"}, "master": "split"},
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return seconds of a step by way, and bytes of states by place."""
    engines = {name: _engine(options, arguments.scratch / name) for name, options in WAYS.items()}
    losses: dict[str, list[float]] = {name: [] for name in engines}

    def step(name: str) -> None:
        ids, targets = batch(len(losses[name]), SEQUENCES, LENGTH, Shape().vocab, torch.device("cpu"))
        losses[name].append(engines[name].train_batch([{"ids": ids, "targets": targets}]).item())

    seconds = in_turns({name: partial(step, name) for name in engines}, arguments.rounds)
    rows: dict[str, dict[str, Any]] = {}
    resident = sorted(seconds["resident"])[len(seconds["resident"]) // 2]
    for name, times in seconds.items():
        middle = sorted(times)[len(times) // 2]
        places = _bytes(engines[name])
        rows[name] = {"median s": middle, "of resident": middle / resident}
        rows[name]["same losses"] = losses[name] == losses["resident"]
        rows[name] |= {f"{place} GB": nbytes / 1e9 for place, nbytes in places.items()}
    slowest = rows["host"]["of resident"]
    target = {"what": "step with the optimizer on the host, of resident", "reached": slowest, "target": SLOWEST}
    return {"rows": rows, "seconds": seconds, "targets": [target | {"met": slowest <= SLOWEST}]}


def _engine(options: Mapping[str, Any], folder: Path) -> zero3d.Engine:
    """The model returns the mean loss, as `train_batch` takes it."""
    offload = options.get("offload", {})
    if "disk" in offload.values():
        offload = {**offload, "directory": folder}
    return zero3d.Engine(build_gpt(Shape()), stage=3, **{**options, "offload": offload})


def _bytes(engine: zero3d.Engine) -> dict[str, int]:
    """Return bytes of model states by place."""
    places: dict[str, int] = {}
    for entry in engine.memory:
        if entry.planned is not None:
            places[entry.place] = places.get(entry.place, 0) + entry.measured
    return places
