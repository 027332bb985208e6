"""Tokens/s of a 1B Llama in turns in one process: plain PyTorch, stages 0 and 3, stage 3 with cast weights, FSDP2.

A turn builds a variant, warms it up, times its steps and frees it, for all of them do not fit a card at once. Turns go
forth and back, so that each variant is early and late once.

    turns.8k, turns.16k                        tokens of a step, eager
    turns.8k-compiled, turns.16k-compiled      every block's own forward under torch.compile, one turn each
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch
from llama import BATCH, LENGTH, SHAPE, measure_speed, utilisation
from peers import Setting, build_variant, shared_mesh
from torch import nn

from campaign.account import Account, Place
from campaign.speed import CPU_BATCH, CPU_LENGTH, CPU_SHAPE, VARIANTS, build
from zero3d.activations.compilation import compile_blocks

PEER = "fsdp2-reshard"
COMPILED = "-compiled"
SAME = 0.02  # of a loss: variants sum gradients in other orders


def turns(place: Place, account: Account) -> None:
    """Time the variants; the part's name says how many tokens a step has, and whether blocks are compiled."""
    device, name = torch.device(place.device), place.part.partition(".")[2]
    compiled, times = name.endswith(COMPILED), 2 if name.startswith("16k") else 1
    shape, size, length = (CPU_SHAPE, CPU_BATCH, CPU_LENGTH) if place.on_cpu else (SHAPE, BATCH, LENGTH)
    size *= times
    account.ran("shape", {**shape, "batch": size, "length": length, "compiled": compiled})
    shared_mesh(device)  # starts torch.distributed
    order = list(order_of(1 if compiled else 2))
    best: dict[str, dict[str, Any]] = {}
    for variant in order:
        setting = Setting(lambda: made(device, shape, compiled), device)
        trained = build_variant(variant, setting)
        row = measure_speed(device, trained, place.seconds / len(order), shape, size, length)
        if variant not in best or row["median_s"] < best[variant]["median_s"]:
            row |= utilisation(device, row, shape, length, place.peak_tflops)
            best[variant] = row
            account.ran(variant, row, "" if row["loss"] < row["first_loss"] else "the loss did not fall")
        del trained
        free(device)
    peer = best[PEER]
    for variant, row in best.items():
        apart = abs(row["first_loss"] / peer["first_loss"] - 1)
        if apart > SAME:
            account.ran(f"first loss of {variant}", row["first_loss"], f"{apart:.3f} off FSDP2's")
    for variant in ("zero3d-0", "zero3d-3", "zero3d-cast-3"):
        what = f"{variant} {'compiled' if compiled else 'eager'}, {size * length:,} tokens a step"
        ratio = best[variant]["tokens_per_s"] / peer["tokens_per_s"]
        account.goal(f"{what}: tokens/s / FSDP2", 1.0, ratio)
        if compiled and best[variant].get("mfu") is not None:
            account.goal(f"{what}: MFU", 0.45, best[variant]["mfu"])
        for kind, ratio in memory_ratios(best[variant], peer).items():
            account.goal(f"{what}: {kind} / FSDP2", 1.0, ratio, most=True)


def memory_ratios(row: dict[str, Any], peer: dict[str, Any]) -> dict[str, float]:
    """Return the peaks of a way to train over another's; nothing where there is no card to ask."""
    keys = {"allocated": "peak_gib", "reserved": "peak_reserved_gib"}
    return {kind: row[key] / peer[key] for kind, key in keys.items() if key in row}


def order_of(rounds: int) -> Iterator[str]:
    """Yield the variants forth, and back where there are two rounds."""
    for number in range(rounds):
        yield from VARIANTS[:: -1 if number % 2 else 1]


def made(device: torch.device, shape: dict[str, Any], compiled: bool) -> nn.Module:
    """Make the model; on the CPU compiled blocks are traced alone."""
    model = build(device, shape)
    if compiled:
        compile_blocks(model, **({"backend": "eager"} if device.type == "cpu" else {}))
    return model


def free(device: torch.device) -> None:
    """Give back the memory of a variant that is over, and begin its peaks anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
