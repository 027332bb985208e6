"""Copies in memory, by one thread: between records of a host slab and ordinary memory, beside ordinary memory alone.

    memory to memory    two tensors of torch's allocator
    slab to memory      a record of a host slab into a tensor: what a fetch of a host tier does on the CPU
    memory to slab      the way back

The slab has large pages where the kernel gives some, so it should lose nothing against ordinary memory. A copy of n
bytes reads n and writes n, and counts once. All pages are there before the clock runs.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

import torch

from offloading.turns import at_least, in_turns, rates
from zero3d.memory.budget import host_budget
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record

TARGET = 0.95  # of ordinary memory's rate
CPU = torch.device("cpu")


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return GB/s of copies, and what the slab reaches of ordinary memory."""
    nbytes = int(arguments.gigabytes * 1e9)
    records = [Record("record", ((torch.uint8, nbytes),))]
    [slab] = HostSlab({"records": records}, CPU, host_budget(1)).memory["records"]
    here, there = (torch.ones(nbytes, dtype=torch.uint8) for _ in range(2))
    ways = {
        "memory to memory": lambda: there.copy_(here),
        "slab to memory": lambda: there.copy_(slab),
        "memory to slab": lambda: slab.copy_(here),
    }
    seconds = in_turns(ways, arguments.rounds)
    rows = rates(seconds, dict.fromkeys(seconds, nbytes))
    plain, *ours = (median(times) for times in seconds.values())
    return {
        "rows": rows,
        "seconds": seconds,
        "targets": [at_least("the slab's slower way, of ordinary memory's rate", plain / max(ours), TARGET)],
    }
