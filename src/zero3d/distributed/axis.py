"""How ranks of one axis reach each other: its process groups, pairwise messages, errors that say where."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from zero3d.errors import FAULT, OrderError, Zero3dError

_NOTE = "zero3d/why a rank went away"
_TEXT, _SHOWN = 2000, 200  # letters of a note, of an error of the network


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
            lost = _lost(where, str(error))
            if lost is None:
                raise
            raise lost from error


class Pending:
    """A collective under way. `wait()` completes it once; later calls do nothing."""

    def __init__(self, finish: Callable[[], object] | None = None) -> None:
        self._finish = finish

    def wait(self) -> None:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()


DONE = Pending()
Take = Callable[[list[Tensor]], object]  # is given what has come from the ranks, in their order


class Call(NamedTuple):
    """One operation on one unit, over one of an axis' groups."""

    axis: Axis
    group: dist.ProcessGroup | None
    op: str
    unit: str

    def run(self, call: Callable[[], Any]) -> Any:
        """Run a torch.distributed call; a timeout or a lost peer becomes an error that says where."""
        return self.axis.call(self.op, self.unit, call)


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


def leave_note(text: str, code: int = FAULT) -> None:
    """Leave why this rank goes away, and its exit code, where its peers' errors find it; only the first one's stays.

    A store that is gone reaches nobody.
    """
    with suppress(RuntimeError, ValueError):
        store = _get_default_store()
        if not store.check([_NOTE]):
            store.set(_NOTE, json.dumps([text[:_TEXT], code]))


def read_note() -> str:
    """Return what the first rank that failed left; nothing if none did."""
    return _note()[0]


def _note() -> tuple[str, int]:
    try:
        store = _get_default_store()
        text, code = json.loads(store.get(_NOTE)) if store.check([_NOTE]) else ("", FAULT)
    except (RuntimeError, ValueError):
        return "", FAULT
    return text, code


def forget_note(axis: Axis) -> None:
    """Remove the note on all ranks of the axis, so that none quotes what failed before."""
    if axis.size == 1:
        return
    for turn in range(2):  # all have left what failed; none can fail again before the note is gone
        axis.call("barrier", "-", lambda: dist.barrier(group=axis.gathers))
        if turn == 0 and axis.rank == 0:
            with suppress(RuntimeError, ValueError):
                _get_default_store().delete_key(_NOTE)


def _lost(where: str, message: str) -> Zero3dError | None:
    """Return the error of a rank whose peer went away, with its note if it left one; None for other errors of torch."""
    late = any(word in message.lower() for word in ("timed out", "timeout"))
    if not late and not any(word in message.lower() for word in ("connection", "closed", "peer", "reset")):
        return None
    note, code = _note()
    if note:
        lost = Zero3dError(f"{note} ({where} {'and no peer came' if late else 'when a peer went away'}.)")
        lost.agreed = code
        return lost
    if late:
        return OrderError(
            f"{where} and no peer came: ranks used units in different orders or numbers, or a peer is stuck. "
            "At stage 3 all ranks must run the same units in the same order; look at what the other ranks say."
        )
    shown = " ".join(message.split())[:_SHOWN]
    return Zero3dError(f"{where} when a peer went away: look at the first rank that failed. ({shown})")
