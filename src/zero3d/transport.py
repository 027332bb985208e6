"""How ranks of one axis reach each other: its process groups, pairwise messages, errors that say where."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero3d.errors import OrderError, Zero3dError


@dataclass
class Axis:
    """One mesh axis as this rank sees it: two groups over the same ranks, or none for degree 1."""

    name: str
    rank: int
    size: int
    gathers: dist.ProcessGroup | None = None
    reductions: dist.ProcessGroup | None = None

    def close(self) -> None:
        """Drop the groups: their threads must end before the interpreter does."""
        self.gathers = self.reductions = None

    @property
    def backend(self) -> str:
        """Name of the torch.distributed backend; "none" for degree 1."""
        return "none" if self.gathers is None else str(dist.get_backend(self.gathers))

    def call(self, op: str, unit: str, call: Callable[[], Any]) -> Any:
        """Run a torch.distributed call; a timeout or a lost peer becomes an error that says where."""
        begun = time.monotonic()
        try:
            return call()
        except RuntimeError as error:
            waited = time.monotonic() - begun
            where = f"rank {self.rank} of axis {self.name} waited {waited:.1f} s in {op} of unit {unit!r}"
            if "timed out" in str(error).lower() or "timeout" in str(error).lower():
                raise OrderError(
                    f"{where} and no peer came: ranks used units in different orders or numbers, or a peer is stuck. "
                    "At stage 3 all ranks must run the same units in the same order; look at what the other ranks say."
                ) from error
            if any(word in str(error).lower() for word in ("connection", "closed", "peer", "reset")):
                message = f"{where} when a peer went away: look at the first rank that failed. ({error})"
                raise Zero3dError(message) from error
            raise


def swap(
    axis: Axis, group: dist.ProcessGroup | None, op: str, unit: str, sends: list[Tensor], receives: list[Tensor]
) -> Callable[[], None]:
    """Send slot i of `sends` to rank i and receive slot i of `receives` from it; the result waits for all.

    Messages carry a tag made of (operation, unit): ranks that disagree time out, where untagged
    ones of equal size would be taken for each other.
    """
    tag = zlib.crc32(f"{op} {unit}".encode()) & 0x3FFFFFFF
    targets = receives
    if receives[0].device.type != "cpu":  # gloo's point-to-point operations take host memory only
        sends = [part.cpu() for part in sends]
        targets = [torch.empty_like(part, device="cpu") for part in receives]
    works = []
    for step in range(1, axis.size):  # start with the next rank, so that no rank is everyone's first
        source, peer = (axis.rank - step) % axis.size, (axis.rank + step) % axis.size
        receive = partial(dist.irecv, targets[source], group=group, group_src=source, tag=tag)
        send = partial(dist.isend, sends[peer], group=group, group_dst=peer, tag=tag)
        works += [axis.call(op, unit, receive), axis.call(op, unit, send)]

    def wait() -> None:
        for work in works:
            axis.call(op, unit, work.wait)
        for peer, (part, host) in enumerate(zip(receives, targets, strict=True)):
            if host is not part and peer != axis.rank:
                part.copy_(host)
        sends.clear()  # what travels must live until here

    return wait


def trade(axis: Axis, peer: int, unit: str, mine: Tensor, theirs: Tensor) -> None:
    """Send `mine` to one rank of the axis and receive `theirs` from it."""
    on_host = axis.backend == "gloo"
    out, into = (mine.cpu(), torch.empty_like(theirs, device="cpu")) if on_host else (mine, theirs)
    group = axis.reductions
    calls = [
        dist.P2POp(dist.isend, out, group=group, group_peer=peer),
        dist.P2POp(dist.irecv, into, group=group, group_peer=peer),
    ]
    for work in axis.call("trade", unit, lambda: dist.batch_isend_irecv(calls)):
        axis.call("trade", unit, work.wait)
    if into is not theirs:
        theirs.copy_(into)
