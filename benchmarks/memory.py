"""Memory of one variant, alone in fresh processes; all numbers are bytes above what the process held before.

    process  most, from before the model is built to the end of the last step, malloc as chosen
    steady   most during the last step: construction has passed
    step     the same with tensors mapped one by one: what is really alive, fragments apart
    held     between steps, mapped one by one: model states

Resident memory on the CPU, where a pass of its own with malloc "map" (`ranks.map_tensors`) makes
it follow tensors to the page; the caching allocator's reserved and allocated bytes on CUDA. Step
and process include activations, the same for every variant. A tiny model is trained the same way
first, so that code loaded on first use is not counted. Maxima over ranks.

A timeline has the most that is alive between any two points of one more step, mapped one by one.
Points are the calls of layers in the forward and the gradients of their outputs in the backward:
the model's, so all variants have the same.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peers import Accumulated, Setting, Zero3d, build_variant
from ranks import over_ranks, synchronize
from torch import Tensor

Data = Callable[[int], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Gauge:
    """How memory is read: bytes now, most bytes since `reset`, and giving back what is free."""

    now: Callable[[], int]
    peak: Callable[[], int]
    reset: Callable[[], None]
    trim: Callable[[], None]


def gauge(device: torch.device, exact: bool) -> Gauge:
    """`exact`: without what an allocator keeps for later (on the CPU up to how the process was started)."""
    if device.type != "cuda":
        return Gauge(partial(_status, "VmRSS"), partial(_status, "VmHWM"), _reset_peak, _trim)
    cuda = torch.cuda
    now, peak = cuda.memory_allocated, cuda.max_memory_allocated
    if not exact:
        now, peak = cuda.memory_reserved, cuda.max_memory_reserved
    return Gauge(now, peak, cuda.reset_peak_memory_stats, cuda.empty_cache)


def warm_up(name: str, setting: Setting, data: Data) -> None:
    """Train a variant for two steps and drop it; DeepSpeed, which is built once in a process, is plain PyTorch here."""
    variant = build_variant("plain" if name.startswith("deepspeed-") else name, setting)
    for step in range(2):
        variant.step(*data(step))


def measure_memory(
    name: str, setting: Setting, data: Data, steps: int, exact: bool, timeline: bool = False
) -> dict[str, Any]:
    """Bytes of a variant over construction and `steps` steps, and the last one's loss.

    data       gives the batch of a step
    timeline   take one more step and look at each of its points
    """
    memory = gauge(setting.device, exact)
    gc.collect()
    memory.trim()
    memory.reset()
    before = memory.now()
    variant = build_variant(name, setting)
    for step in range(steps - 1):
        variant.step(*data(step))
    early = memory.peak()
    memory.reset()
    loss = float(variant.step(*data(steps - 1)))
    synchronize(setting.device)
    late = memory.peak()
    gc.collect()
    memory.trim()
    values = [max(early, late) - before, late - before, memory.now() - before]
    combined = over_ranks([float(value) for value in values], dist.ReduceOp.MAX, setting.device)
    [total] = over_ranks([loss], dist.ReduceOp.SUM, setting.device)
    account = [entry._asdict() for entry in variant.engine.memory] if isinstance(variant, Zero3d) else None
    found = dict(zip(("process", "step", "held"), map(int, combined), strict=True))
    found |= {"account": account, "loss": total / dist.get_world_size()}
    if timeline and isinstance(variant, Accumulated):
        peaks, ends = points_of(variant, data(steps), memory)
        most = over_ranks([float(peak - before) for peak in peaks], dist.ReduceOp.MAX, setting.device)
        found["timeline"] = {"bytes": list(map(int, most)), "ends": ends}
    return found


def points_of(variant: Accumulated, tokens: tuple[Tensor, Tensor], memory: Gauge) -> tuple[list[int], dict[str, int]]:
    """The peak of a step up to each of its points since the one before; at how many points each part ends."""
    peaks: list[int] = []
    ends: dict[str, int] = {}

    def look(*_: object) -> None:
        peaks.append(memory.peak())
        memory.reset()

    def look_back(*_: object) -> None:
        ends.setdefault("forward", len(peaks))  # what follows, up to here, is the loss and its gradient
        look()

    def look_behind(layer: object, given: object, output: Tensor) -> None:
        look()
        if output.requires_grad:
            output.register_hook(look_back)

    for module in variant.module.modules():
        if next(module.children(), None) is None:
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look_behind)
    memory.reset()
    variant.gradients(*tokens)
    look()
    ends["backward"] = len(peaks)
    variant.update()
    look()
    return peaks, ends | {"update": len(peaks)}


def merge(chosen: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    """The rows of the module docstring from the two passes, and what the exact one knows beside them."""
    return {**exact, "process": chosen["process"], "steady": chosen["step"]}


def _reset_peak() -> None:
    """Start the resident peak anew; where the system forbids it, it counts from the process's start."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _status(key: str) -> int:
    """A line of /proc/self/status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}: process memory is measured on Linux only")
