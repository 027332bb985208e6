"""Rates of this rank by which its executor is chosen, measured once: the link to its device, and Adam on the host.

    down, up   copies between pinned memory of the host and the device, one way at a time
    both       the same, both ways at once on a stream each
    adam       the host executor on fp32 states and bf16 weights, unscaled and clipped, with this rank's threads

Ranks measure at the same time, as they will copy and update: what they share, each has its part of. The best of
`ROUNDS` counts, a quarter of a second in all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing

import torch
from torch import Tensor

from zero3d.blueprint.auto import MeasuredRates
from zero3d.memory.arena import Arena
from zero3d.offload.host_adam import AdamRule, BucketPiece, BucketStates, HostExecutor
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.zero.streams import wait_for_device

ROUNDS = 3  # the first one warms up
COPIED = 1 << 26  # bytes each way
UPDATED = 1 << 22  # parameters, whose states no cache holds


def measure_rates(arena: Arena, threads: int) -> MeasuredRates:
    """Return this rank's rates. Takes 4 x COPIED bytes, half of them of its device, and gives them back."""
    return MeasuredRates(*_link(arena), UPDATED / _adam_seconds(threads))


def _link(arena: Arena) -> tuple[float, float, float]:
    """Return bytes per second down, up, and of both ways together."""
    device = arena.device
    slab = HostSlab({"copies": [Record(str(number), ((torch.uint8, COPIED),)) for number in range(2)]}, device)
    into, source = slab.memory["copies"]
    here = [arena.borrow("wire", COPIED, torch.uint8) for _ in range(2)]
    streams = [torch.Stream(device) for _ in range(2)]
    moves: list[tuple[Tensor, Tensor]] = [(into, here[0]), (here[1], source)]  # down, up

    def copies(*ways: int) -> Callable[[], None]:
        def copy() -> None:
            for way in ways:
                with streams[way]:
                    to, given = moves[way]
                    to.copy_(given, non_blocking=True)
            for way in ways:
                streams[way].synchronize()

        return copy

    wait_for_device(device)
    down, up, both = (len(ways) * COPIED / _best(copies(*ways)) for ways in ((0,), (1,), (0, 1)))
    for buffer in here:
        arena.give_back("wire", buffer)
    return down, up, both


def _adam_seconds(threads: int) -> float:
    """Return the seconds of one update of UPDATED parameters on the host."""
    fields = (*[(torch.float32, UPDATED)] * 4, (torch.bfloat16, UPDATED))
    slab = HostSlab({"states": [Record("states", fields)]}, torch.device("cpu"))  # of zeros, which take as long
    master, exp_avg, exp_avg_sq, grad, weights = slab.views["states"][0]
    states = BucketStates(master, weights, exp_avg, exp_avg_sq, grad)
    pieces = [BucketPiece(0, UPDATED, AdamRule(lr=1e-3))]
    with closing(HostExecutor(threads, Arena(torch.device("cpu")))) as executor:
        return _best(lambda: executor.update(states, pieces, 1, (0.5, 0.7)))


def _best(call: Callable[[], None]) -> float:
    """Return the seconds of the fastest call but the first."""
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
