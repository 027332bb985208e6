"""deepspeed.runtime.utils for programs: `see_memory_usage` alone."""

from __future__ import annotations

import torch.distributed as dist

from zero3d.ways.deepspeed.accelerator import get_accelerator
from zero3d.ways.deepspeed.names import refusing

GIB = 2**30


def see_memory_usage(message: str, force: bool = False) -> None:
    """Print on rank 0 what the device's allocator has, now and at its peak, and begin the peak anew; only if forced."""
    if not force or (dist.is_initialized() and dist.get_rank() != 0):
        return
    device = get_accelerator()
    print(
        f"{message}: allocated {device.memory_allocated() / GIB:.2f} GiB, peak "
        f"{device.max_memory_allocated() / GIB:.2f} GiB, reserved {device.memory_reserved() / GIB:.2f} GiB"
    )
    device.reset_peak_memory_stats()


__getattr__ = refusing("runtime.utils")
