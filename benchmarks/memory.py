"""Memory of one variant, alone in fresh processes; all numbers are bytes above what the process held before.

    process  most, from before the model is built to the end of the last step, malloc as chosen
    steady   most during the last step: construction has passed
    step     the same with tensors mapped one by one: what is really alive, fragments apart
    held     between steps, mapped one by one: model states

Resident memory on the CPU, where a pass of its own with malloc "map" (`ranks.map_tensors`) makes
it follow tensors to the page; the caching allocator's reserved and allocated bytes on CUDA. Step
and process include activations, the same for every variant. A tiny model is trained first, so
that code loaded on first use is not counted. Maxima over ranks.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import Shape, batch, build_gpt
from peers import Plain, Setting, Zero3d, build_variant
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


def measure_memory(name: str, setting: Setting, data: Data, steps: int, exact: bool) -> dict[str, Any]:
    """Bytes of a variant over construction and `steps` steps; `data` gives the batch of a step."""
    _warm_up(setting)
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
    variant.step(*data(steps - 1))
    synchronize(setting.device)
    late = memory.peak()
    gc.collect()
    memory.trim()
    values = [max(early, late) - before, late - before, memory.now() - before]
    combined = over_ranks([float(value) for value in values], dist.ReduceOp.MAX, setting.device)
    account = [entry._asdict() for entry in variant.engine.memory] if isinstance(variant, Zero3d) else None
    return {**dict(zip(("process", "step", "held"), map(int, combined), strict=True)), "account": account}


def merge(chosen: dict[str, Any], exact: dict[str, Any]) -> dict[str, Any]:
    """The rows of the module docstring from the two passes, and zero3d's own account."""
    return {
        "process": chosen["process"],
        "steady": chosen["step"],
        "step": exact["step"],
        "held": exact["held"],
        "account": exact["account"],
    }


def _warm_up(setting: Setting) -> None:
    shape = Shape(layers=2, d=64, vocab=64)
    tiny = replace(setting, build=partial(build_gpt, shape))
    Plain(tiny).step(*batch(0, 1, 16, shape.vocab, setting.device))


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
