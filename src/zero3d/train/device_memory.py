"""What this rank's device holds, and what its allocator has reserved for that; on the CPU what the process holds.

allocated   bytes of tensors
reserved    what the allocator has taken from the device: allocated, and what is cached or lost between blocks
"""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from zero3d.engine.engine import Engine


def memory_bytes(engine: Engine) -> int:
    """Return the most that was allocated on this rank's device; on the CPU what the process holds now."""
    device = engine.mesh.device
    if device.type == "cpu":
        return int(psutil.Process().memory_info().rss)
    return int(torch.get_device_module(device).max_memory_allocated(device))


def reserved_bytes(engine: Engine) -> int | None:
    """Return the most that the allocator of this rank's device has reserved; None on the CPU, which has none."""
    device = engine.mesh.device
    return None if device.type == "cpu" else int(torch.get_device_module(device).max_memory_reserved(device))


def memory_peak(engine: Engine) -> int:
    """Return the most memory this rank ever had: of its device, or on the CPU of its process."""
    if engine.mesh.device.type != "cpu":
        return memory_bytes(engine)
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def fullest(engine: Engine, local: int) -> tuple[int, int | None]:
    """Return the most over all ranks of these bytes, and of what allocators have reserved. All ranks call it."""
    reserved = reserved_bytes(engine)
    figures = torch.tensor([float(figure) for figure in (local, reserved) if figure is not None], dtype=torch.float64)
    most = engine.world.exchange(figures).amax(0).tolist()
    return int(most[0]), int(most[1]) if reserved is not None else None
