"""Memory of this rank's device, allocated and reserved by its allocator; on the CPU the memory of the process.

allocated   bytes of tensors
reserved    bytes that the allocator has taken from the device: allocated, cached, or lost between blocks
"""

from __future__ import annotations

import resource
import sys

import psutil
import torch

from zero3d.engine.engine import Engine


def memory_bytes(engine: Engine) -> int:
    """Return the peak of allocated bytes on this rank's device; on the CPU the process' memory now."""
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
    return process_peak() if engine.mesh.device.type == "cpu" else memory_bytes(engine)


def process_peak() -> int:
    """Return the most host memory that this process ever held."""
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def fullest(engine: Engine, local: int) -> tuple[int, int | None]:
    """Return the most over all ranks of these bytes, and of what allocators have reserved. All ranks call it."""
    reserved = reserved_bytes(engine)
    figures = torch.tensor([float(figure) for figure in (local, reserved) if figure is not None], dtype=torch.float64)
    most = engine.world.exchange(figures).amax(0).tolist()
    return int(most[0]), int(most[1]) if reserved is not None else None


def host_peak(engine: Engine) -> int:
    """Return what the ranks of the fullest host held, each at its own peak. All ranks call it.

    Processes that prepare batches are not among them; pages that ranks share count once for each.
    """
    figures = torch.tensor([float(process_peak()), float(engine.mesh.local_rank == 0)], dtype=torch.float64)
    peaks, first = engine.world.exchange(figures).unbind(1)
    host = first.cumsum(0).long()  # ranks of a host follow one another
    return int(torch.zeros(len(host) + 1, dtype=torch.float64).index_add_(0, host, peaks).max())
