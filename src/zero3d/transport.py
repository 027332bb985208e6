"""How ranks of one axis reach each other: its process groups, pairwise messages, errors that say where."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from zero3d.errors import OrderError, Zero3dError

_NOTE = "zero3d/why a rank went away"


@dataclass
class Axis:
    """One mesh axis as this rank sees it: two groups over the same ranks, or none for degree 1.

    broken  why its ranks no longer agree on which message comes next
    """

    name: str
    rank: int
    size: int
    gathers: dist.ProcessGroup | None = None
    reductions: dist.ProcessGroup | None = None
    broken: str = ""

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
                    + _quoted()
                ) from error
            if any(word in str(error).lower() for word in ("connection", "closed", "peer", "reset")):
                message = f"{where} when a peer went away: look at the first rank that failed. ({error}){_quoted()}"
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


def messages(axis: Axis, op: str, unit: str, sends: Mapping[int, Tensor], receives: Mapping[int, Tensor]) -> None:
    """Send tensors to ranks of the axis and receive others from them, by rank; returns when all are through."""
    on_host = axis.backend == "gloo"
    group = axis.reductions
    arriving = {peer: torch.empty_like(into, device="cpu") if on_host else into for peer, into in receives.items()}
    calls = [
        dist.P2POp(dist.isend, part.cpu() if on_host else part, group=group, group_peer=peer)
        for peer, part in sends.items()
    ]
    calls += [dist.P2POp(dist.irecv, into, group=group, group_peer=peer) for peer, into in arriving.items()]
    for work in axis.call(op, unit, lambda: dist.batch_isend_irecv(calls)):
        axis.call(op, unit, work.wait)
    for peer, into in receives.items():
        if arriving[peer] is not into:
            into.copy_(arriving[peer])


def leave_note(text: str) -> None:
    """Say why this rank goes away, where its peers' errors find it; the first to fail has the word."""
    with suppress(RuntimeError, ValueError):  # a store that is gone reaches nobody
        store = _get_default_store()
        if not store.check([_NOTE]):
            store.set(_NOTE, text)


def read_note() -> str:
    """What the first rank that failed said; nothing if none did."""
    try:
        store = _get_default_store()
        return str(store.get(_NOTE).decode()) if store.check([_NOTE]) else ""
    except (RuntimeError, ValueError):
        return ""


def forget_note(axis: Axis) -> None:
    """Begin anew on all ranks of the axis: none of them quotes what failed before."""
    if axis.size == 1:
        return
    for turn in range(2):  # all have left what failed; none can fail again before the note is gone
        axis.call("barrier", "-", lambda: dist.barrier(group=axis.gathers))
        if turn == 0 and axis.rank == 0:
            with suppress(RuntimeError, ValueError):
                _get_default_store().delete_key(_NOTE)


def _quoted() -> str:
    note = read_note()
    return f" It said: {note}" if note else ""
