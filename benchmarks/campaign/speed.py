"""Profiles of a 1B Llama: what the device did in a step, kernels and the time between them, and tokens/s beside it.

Every variant is a part, with the device to itself (`llama.measure_speed`); after a few timed steps a few more run under
torch's profiler, which slows none of the timed ones. Speeds are compared in turns (turns.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from llama import BATCH, LENGTH, SHAPE, Llama, measure_speed, utilisation
from model import batch
from peers import Setting, Variant, build_variant, shared_mesh
from ranks import synchronize
from torch import nn
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from campaign.account import Account, Place

VARIANTS = ("plain", "zero3d-0", "zero3d-3", "zero3d-cast-3", "fsdp2-reshard")
CPU_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
CPU_BATCH, CPU_LENGTH = 2, 64
PROFILED = 3  # steps


def speed(place: Place, account: Account) -> None:
    """Measure the variant that the part is named after."""
    name = place.part.partition(".")[2]
    device = torch.device(place.device)
    shape, size, length = (CPU_SHAPE, CPU_BATCH, CPU_LENGTH) if place.on_cpu else (SHAPE, BATCH, LENGTH)
    account.ran("shape", {**shape, "batch": size, "length": length})
    shared_mesh(device)  # starts torch.distributed
    variant = build_variant(name, Setting(lambda: build(device, shape), device))
    row = measure_speed(device, variant, place.seconds, shape, size, length)
    account.ran("speed", row, "" if row["loss"] < row["first_loss"] else "the loss did not fall")
    account.ran("utilisation", utilisation(device, row, shape, length, place.peak_tflops))
    if place.on_cpu:
        account.skipped("kernels, idle time", "a CPU launches no kernels")
        return
    batches = [batch(step, size, length, shape["vocab_size"], device) for step in range(PROFILED)]
    account.ran("device", busy(spans(variant, batches, device), PROFILED))


def build(device: torch.device, shape: dict[str, Any]) -> nn.Module:
    """Make the model on the device at once: a 1B model takes long to fill on the CPU."""
    torch.manual_seed(0)
    with torch.device(device):
        return Llama(shape)


class Span(NamedTuple):
    """One thing that the device did, in nanoseconds."""

    name: str
    begun: int
    ended: int


def spans(variant: Variant, batches: Sequence[Any], device: torch.device) -> list[Span]:
    """Return what the device does in steps over these batches: kernels, copies and fills."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for tokens in batches:
            variant.step(*tokens)
        synchronize(device)
    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    return [
        Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]


def busy(found: Sequence[Span], steps: int) -> dict[str, float]:
    """Return counts per step, and how long nothing ran on any stream from the first to the last span."""
    if not found:
        return {"kernels": 0, "copies": 0}
    copies = sum(span.name.startswith(("Memcpy", "Memset")) for span in found)
    ordered = sorted(found, key=lambda span: span.begun)
    gaps, until = [], ordered[0].ended
    for span in ordered[1:]:
        if span.begun > until:
            gaps.append(span.begun - until)
        until = max(until, span.ended)
    return {
        "kernels": (len(found) - copies) / steps,
        "copies": copies / steps,
        "step_ms": (until - ordered[0].begun) / steps / 1e6,
        "idle_ms": sum(gaps) / steps / 1e6,
        "idle": sum(gaps) / (until - ordered[0].begun),
        "longest_gap_us": max(gaps, default=0) / 1e3,
    }
