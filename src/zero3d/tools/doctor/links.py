"""The pace between each two neighbouring hosts: a slow cable or adapter is named, which an all-reduce over all hides.

    0 -- 1    2 -- 3    4     hosts pass bytes both ways, every second link at a time
         1 -- 2    3 -- 4     then the others

Bytes go from GPU to GPU over NCCL where every host has one, else from host to host over gloo.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from zero3d.tools.doctor.finding import BROKEN, OK, WARNING, Finding, rate

ON_HOST, ON_CARD, REPEATS = 1 << 20, 64 << 20, 3  # bytes of a message: 1 s on a link of 10 Mbit/s
SLOW = 0.5  # of the median link
Link = tuple[int, float]  # the lower host, in the order of ranks; bytes per second each way


def backend() -> str:
    """Return the backends of a process group that passes tensors of the host, and of a GPU where there is one."""
    import torch

    return "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"


def links(place: int, hosts: int) -> list[Link]:
    """Pass bytes to both neighbours, and return the pace of each link whose lower host this is. All hosts call it."""
    import torch
    import torch.distributed as dist

    has_card = torch.tensor([float(torch.cuda.is_available())])
    dist.all_reduce(has_card, dist.ReduceOp.MIN)
    device = torch.device("cuda", 0) if has_card else torch.device("cpu")
    dist.all_reduce(torch.zeros(1, device=device))  # NCCL connects all hosts or none, and one may have no neighbour yet
    found = []
    for first in (0, 1):
        lower = place - (place - first) % 2
        if lower >= 0 and lower + 1 < hosts:
            pace = _pace(torch, dist, 2 * lower + 1 - place, device)
            if place == lower:
                found.append((lower, pace))
        dist.barrier()
    return found


def _pace(torch: Any, dist: Any, peer: int, device: Any) -> float:
    """Return the bytes per second that go to a neighbour while as many come from it; the first time sets up."""
    sent = torch.ones((ON_CARD if device.type == "cuda" else ON_HOST) // 4, device=device)
    got = torch.empty_like(sent)
    seconds = []
    for _ in range(REPEATS + 1):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        works = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, got, peer)])
        for work in works:
            work.wait()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if not bool((got == 1).all()):
        raise RuntimeError(f"what host {peer} sent came with other values")
    return float(sent.nbytes / median(seconds[1:]))


def judge_links(passed: Sequence[Sequence[Link] | str], hosts: Sequence[str]) -> Finding:
    """Give the verdict on what hosts have measured, a fault where one has not ended. hosts: names by their order."""
    faults = [each for each in passed if isinstance(each, str)]
    if faults:
        remedy = "NCCL_DEBUG=INFO shows where; NCCL_SOCKET_IFNAME=NAME; NCCL_IB_HCA=NAMES"
        return Finding(BROKEN, f"bytes from one host to the next: {faults[0]}", remedy)
    measured = [link for each in passed if not isinstance(each, str) for link in each]
    paces = {int(lower): float(pace) for lower, pace in measured}
    middle = median(paces.values())
    slowest = min(paces, key=lambda lower: paces[lower])
    names = f"{hosts[slowest]} and {hosts[slowest + 1]}"
    figures = {"bandwidth": {f"{hosts[lower]}-{hosts[lower + 1]}": pace for lower, pace in paces.items()}}
    text = f"{len(paces)} links between neighbours: {rate(middle)} each way (median)"
    if paces[slowest] < SLOW * middle:
        text += f", {rate(paces[slowest])} between {names}"
        return Finding(WARNING, text, f"look at cables and adapters of {names}, or leave one out", figures)
    return Finding(OK, f"{text}, at least {rate(paces[slowest])} ({names})", figures=figures)
