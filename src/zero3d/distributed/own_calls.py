"""Collectives of the program's own, in which a rank may wait for one that waits in a call of ours.

The main thread is in a collective of the program's own if its Python frames say so. Such a call is not counted: a rank
that has left it since its post looks like a rank still inside. So the judge, when it has read who waits for whom, asks
once more. A rank answers a look later, if it is still in the same call. Some collectives (a broadcast, an all-to-all)
may be left by one rank long before another: they count between two ranks alone.
"""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import Store

from zero3d.distributed.axis import backends_of
from zero3d.distributed.order_log import Circle, Difference, OwnCall, Post, find_disagreement
from zero3d.watchdog.heartbeat import Heartbeat

MEETINGS = ("barrier", "all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single")
_SUMS = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "reduce")
OF_TWO = (*_SUMS, "all_to_all", "all_to_all_single", "broadcast", "gather", "scatter")  # on two ranks alone


class Under(NamedTuple):
    """A call of torch.distributed by the main thread for the program; `number` counts calls of its group.

    Its frame is not kept, which would keep all that its callers have.
    """

    group: dist.ProcessGroup
    number: int
    call: OwnCall


def call_under(frame: FrameType | None) -> Under | None:
    """Return the collective on gloo in which a thread with this innermost frame is; None where it is in none."""
    inner, name = None, ""
    while frame is not None:
        if frame.f_globals.get("__name__") == distributed_c10d.__name__ and not frame.f_code.co_name.startswith("_"):
            inner, name = inner or frame, frame.f_code.co_name
        frame = frame.f_back
    if inner is None:
        return None
    op: str = inner.f_code.co_name
    group: Any = inner.f_locals.get("group") or dist.group.WORLD
    if group is None or set(backends_of(group).values()) != {"gloo"}:
        return None
    ranks = dist.get_process_group_ranks(group)
    if op not in (MEETINGS if len(ranks) > 2 else MEETINGS + OF_TWO):
        return None
    return Under(group, group._get_sequence_number_for_group(), OwnCall(name, ranks))


class OwnCalls:
    """Keeps the program's call in which one rank is now; the store has the judge's last question under `key`."""

    def __init__(self, store: Store, key: str, heartbeat: Heartbeat) -> None:
        self._store, self._key = store, key
        self._heartbeat = heartbeat
        self._own: Under | None = None  # where the main thread was at the last look
        self._question = 0  # that was in the store then
        self.call: OwnCall | None = None  # that call, with the question since which it goes on
        self._read: dict[int, bytes] = {}  # what the judge has read
        self._asked: tuple[int, object] = 0, None  # the judge's own last question, and the circle it is about

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The group of the call in which the main thread was at the last look."""
        return None if self._own is None else self._own.group

    def forget(self) -> None:
        """Forget the call, and its group."""
        self._own = self.call = None

    def look(self) -> bool:
        """Look in which call the main thread is, and return whether that is another one; asks the store."""
        before, self.call = self.call, self._look()
        return self.call != before

    def _look(self) -> OwnCall | None:
        own = None
        if not self._heartbeat.waits:
            with suppress(RuntimeError, ValueError, LookupError):  # no such group any more
                own = call_under(sys._current_frames().get(threading.main_thread().ident or 0))
        if own is None:
            self._own = None
            return None
        seen = self._question if own == self._own else 0
        self._own, self._question = own, int(self._store.get(self._key)) if self._store.check([self._key]) else 0
        return own.call._replace(seen=seen)

    def judge(self, told: dict[int, bytes]) -> Difference | Circle | None:
        """Return the proof that ranks cannot meet, if new posts give one."""
        if told == self._read:
            return None
        self._read = told
        found = find_disagreement({rank: Post.unpack(text) for rank, text in told.items()})
        return found if found is not None and self._is_sure(found) else None

    def _is_sure(self, found: Difference | Circle) -> bool:
        """Return whether calls of the program's own have gone on since all of it was told; asks their ranks if not."""
        if not isinstance(found, Circle) or not found.calls:
            return True
        about = [(rank, wait._replace(seen=0) if isinstance(wait, OwnCall) else wait) for rank, wait in found.waits]
        question, asked = self._asked
        if asked != about:
            self._asked = question + 1, about
            self._store.set(self._key, str(question + 1))
            return False
        return all(call.seen == question for call in found.calls)
