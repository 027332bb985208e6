"""What the machine itself gives, by which everything else is judged: links, the card's memory, a matrix product."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
from llama import matmul_tflops
from ranks import synchronize
from torch import Tensor

from campaign.account import Account, Place

GB = 1e9
COPIED, CPU_COPIED = 1 << 30, 1 << 24  # bytes
REPEATS = 5


def ceilings(place: Place, account: Account) -> None:
    """Time copies of pinned memory each way and both at once, copies on the device, and a matrix product."""
    device = torch.device(place.device)
    nbytes, pinned = (CPU_COPIED, False) if place.on_cpu else (COPIED, True)
    account.ran("shape", f"copies of {nbytes} bytes, medians of {REPEATS}")
    down, up = (torch.ones(nbytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    ours, theirs = (torch.ones(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    to_device = rate(device, lambda: copy(ours, up), nbytes)
    to_host = rate(device, lambda: copy(down, theirs), nbytes)
    account.ran("to the device, GB/s", to_device)
    account.ran("to the host, GB/s", to_host)
    if place.on_cpu:
        account.skipped("both ways at once", "the CPU has no streams")
    else:
        sides = [torch.Stream(device) for _ in range(2)]

        def both() -> None:
            with sides[0]:
                copy(ours, up)
            with sides[1]:
                copy(down, theirs)

        account.ran("both ways at once, GB/s together", rate(device, both, 2 * nbytes))
    account.ran("on the device, GB/s read and written", rate(device, lambda: copy(ours, theirs), 2 * nbytes))
    account.ran("8192 x 8192 x 8192 in bf16, TFLOP/s", matmul_tflops(device, *([256, 2] if place.on_cpu else [])))


def copy(to: Tensor, from_: Tensor) -> None:
    """Copy without waiting."""
    to.copy_(from_, non_blocking=True)


def rate(device: torch.device, work: Callable[[], None], nbytes: int) -> float:
    """Return GB/s of the median of several times, the first of which is not counted."""
    seconds = []
    for _ in range(1 + REPEATS):
        synchronize(device)
        begun = time.perf_counter()
        work()
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return nbytes / median(seconds[1:]) / GB
