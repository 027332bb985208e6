"""Ends, within seconds, a wait of ranks that can never meet, with one OrderError on all of them.

    every rank    a thread looks once a second whether the rank's heartbeat has changed; if so, it does nothing
                  silent for PATIENCE: it posts what the rank has begun to the store (order_log.py), once
    rank 0        silent, too: reads all posts so far; a proof that ranks cannot meet becomes the verdict
                  if a rank is in a collective of the program's own, it asks whether this goes on (own_calls.py)
    every rank    silent: sees the verdict in the store and ends its own waits; a rank that was not silent finds it when
                  its peers end its next wait

A wait is ended by its backend's means. On gloo a receive that runs out of time closes all connections of its group, so
that every wait there returns. On accelerators the host waits in `Comm.read`, which looks for the verdict. A host that
waits elsewhere, as in a program's own `loss.item()`, comes back when the group is aborted, a little later.

A silent rank may be slow, or in a debugger: that is no proof, and nothing is concluded from time. PATIENCE grows with
the world, so that the store is never asked more than `RATE` times a second by all ranks together.
"""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zero3d.distributed.order_log import GATHERS, NAMED, REDUCTIONS, Circle, Difference, OrderLog, Post, Steps, Wait
from zero3d.distributed.own_calls import OwnCalls
from zero3d.watchdog.flight_recorder import folder_of, record
from zero3d.watchdog.heartbeat import Heartbeat

if TYPE_CHECKING:
    from zero3d.distributed.axis import Axis

LOOK, PATIENCE = 1.0, 1.5  # seconds between two looks; of silence before a rank posts
RATE = 500  # posts, and as many looks, that reach the store in a second
GRACE = 5.0  # seconds until groups of accelerators are aborted, after the verdict
EXPLAINS, A_MOMENT = 1.5, 0.01  # seconds in which all ranks post their operations; between two looks
END = 2.0  # seconds that `close` waits for the thread
TAG = 0x3FFFFFFF  # of the message that never comes; units' tags are hashes of their names
KEY = "zero3d/order"


class OrderWatch:
    """Watches the axes of one mesh for this rank.

    verdict  why its ranks can never meet; empty while that is not known
    closes   called with the verdict before the waits are ended, on the rank that found it
    """

    verdict = ""

    def __init__(
        self, store: Store, rank: int, world: int, heartbeat: Heartbeat, closes: Callable[[str], object]
    ) -> None:
        self.store = store
        self._rank = rank
        self._world = world
        self._heartbeat = heartbeat
        self._closes = closes
        self._number = store.add(f"{KEY}/meshes/{rank}", 1)  # ranks make their meshes in one order
        self._axes: dict[str, tuple[weakref.ref[Axis], Sequence[int]]] = {}
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self._beats = -1
        self._since = time.monotonic()
        self._asked: float | None = None  # when it asked the store last, in this silence
        self._ends = 0  # how often it has done something to end waits
        self._proof: Difference | Circle | None = None  # of what some ranks have told, at the look before
        self._own = OwnCalls(store, self._key("question"), heartbeat)

    def add(self, axis: Axis, ranks: Sequence[int]) -> None:
        """Watch an axis of these ranks of the world from now on; one that has another's log goes on with it."""
        axis.log, axis.watch = axis.log or OrderLog(self._begin, blocks=axis.backend == "gloo"), self
        self._axes[axis.name] = weakref.ref(axis), ranks

    def found(self) -> str:
        """Return the verdict, also one that this rank has not heard of; asks the store."""
        with suppress(RuntimeError, ValueError):
            self._hear()
        return self.verdict

    def explain(self) -> str:
        """Return the proof that ranks differ, empty if it does not come; all ranks ask for it at one time."""
        end = time.monotonic() + EXPLAINS
        self.store.set(self._key("post", self._rank), self.post().pack())
        while not self.verdict and time.monotonic() < end:
            if self._rank == 0:
                self._judge()
            else:
                self._hear()
            time.sleep(A_MOMENT)
        return self.verdict

    def close(self) -> None:
        """End the thread."""
        self._over.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(END)

    # --- the thread -----------------------------------------------------------------------------

    def _begin(self) -> None:
        if self._thread is None and not self._over.is_set():
            self._thread = threading.Thread(
                target=_look_again_and_again, args=(weakref.ref(self), self._over), name="zero3d order", daemon=True
            )
            with suppress(RuntimeError):  # at the interpreter's end no thread begins
                self._thread.start()

    def look(self, now: float) -> None:
        """Look, at a moment in seconds, whether this rank is silent, and whether ranks can never meet."""
        beats = self._heartbeat.beats
        if beats != self._beats:
            self._beats, self._since = beats, now
            self._asked = None
            self._proof = None
            self._own.forget()
        silent, every = now - self._since, self._world / RATE
        if silent < max(PATIENCE, every):
            return
        with suppress(RuntimeError, ValueError):  # a store that is gone: so are the peers
            self._look_at_others(now, max(every, LOOK))
        if self.verdict:
            self._end_waits(now, silent)

    def _look_at_others(self, now: float, every: float) -> None:
        if self.verdict or (self._asked is not None and now - self._asked < every):
            return
        if self._own.look() or self._asked is None:
            self.store.set(self._key("post", self._rank), self.post().pack())
        self._asked = now
        self._hear()
        if self._rank == 0 and not self.verdict:
            self._judge()

    def peers(self, axis: str, op: str) -> str:
        """Return what other ranks of an axis have told of its last operations, beside `op`; asks the store."""
        ranks = next((ranks for name, _, ranks in self._alive() if name == axis), ())
        told: list[str] = []
        for rank in ranks:
            if rank != self._rank and len(told) < NAMED and self.store.check([key := self._key("post", rank)]):
                told.append(f"rank {rank} {Post.unpack(self.store.get(key)).last(axis, op)}")
        return f"When nothing moved any more, {'; '.join(told)}." if told else ""

    def post(self) -> Post:
        """Return this rank's operations, from any thread, and the call in which it waits while they are read."""
        axes = {name: list(ranks) for name, _, ranks in self._alive()}
        logs = {name: axis.log for name, axis, _ in self._alive() if axis.log is not None}
        before = [log.wait for log in logs.values()]
        counts = self._heartbeat.counts
        entries = {(name, kind): log.recent(kind) for name, log in logs.items() for kind in (GATHERS, REDUCTIONS)}
        after = [log.wait for log in logs.values()]
        waits = [wait for wait, still in zip(before, after, strict=True) if wait is not None and wait is still]
        steps = [log.steps for log in logs.values()]
        most = Steps(max(each.stage for each in steps), max(each.left_out for each in steps)) if steps else Steps()
        call = None if waits else self._own.call
        return Post.of(axes, entries, counts, Wait(*waits[0]) if waits else None, call, most)

    def _alive(self) -> Iterator[tuple[str, Axis, Sequence[int]]]:
        for name, (known, ranks) in list(self._axes.items()):
            axis = known()
            if axis is not None and axis.gathers is not None:
                yield name, axis, ranks

    def _judge(self) -> None:
        """Read the posts of ranks and look for a proof, if there is a new post."""
        keys = {rank: self._key("post", rank) for rank in range(self._world)}
        told = {rank: self.store.get(key) for rank, key in keys.items() if self.store.check([key])}
        found = self._own.judge(told)
        if found is not None and self._proof is None and len(told) < self._world:
            self._proof = found  # the next look has all who tell by then, and names them
            return
        if (found := found or self._proof) is not None:
            self.store.set(self._key("verdict"), found.text())
            self._closes(found.text())
            self._hear()

    def _hear(self) -> None:
        """Take the verdict from the store, if it is there; before a wait ends for it, NCCL's record is written."""
        key = self._key("verdict")
        if not self.verdict and self.store.check([key]):
            file = record(self._rank, folder_of(self._heartbeat.told))
            said = "" if file is None else f" NCCL's flight recorder: {file}."
            self.verdict = self.store.get(key).decode() + said

    def _end_waits(self, now: float, silent: float) -> None:
        """End this rank's waits in our collectives; after a while also its other waits."""
        if self._ends == 0:
            if self._own.group is not None:  # what is raised there is torch's
                sys.stderr.write(f"zero3d: OrderError: {self.verdict}\n")
                end_waits_on(self._own.group)
            self._since = now
            end, there = end_waits_on_gloo, True
        elif self._ends == 1 and silent > GRACE:
            end, there = abort, False
        else:
            return
        self._ends += 1
        for _, axis, _ in self._alive():
            if (axis.backend == "gloo") is there:
                end(axis)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (KEY, self._number, *parts)))


def end_waits_on_gloo(axis: Axis) -> None:
    """Close all connections of an axis' groups: what waits there, on this rank and its peers, raises RuntimeError.

    A receive that runs out of time does it, but for one from a peer that has closed its own connection before.
    """
    for group in _groups(axis):
        end_waits_on(group, axis.rank, axis.size)


def end_waits_on(group: dist.ProcessGroup, rank: int | None = None, size: int | None = None) -> None:
    """Do so with one group, of so many ranks, of which this one is number `rank`."""
    rank, size = group.rank() if rank is None else rank, group.size() if size is None else size
    for peer in range(size):
        if peer != rank:
            with suppress(RuntimeError):
                group.recv([torch.zeros(1)], peer, TAG).wait(timedelta(milliseconds=1))


def abort(axis: Axis) -> None:
    """Abort an axis' groups: kernels that wait for peers end, and with them all waits for the device."""
    for group in _groups(axis):
        with suppress(RuntimeError, AttributeError):
            group.abort()


def _groups(axis: Axis) -> set[dist.ProcessGroup]:
    return {group for group in (axis.gathers, axis.reductions) if group is not None}


def _look_again_and_again(known: weakref.ref[OrderWatch], over: threading.Event) -> None:
    """Look until the watch is closed, or nobody has it any more."""
    while not over.wait(LOOK):
        watch = known()
        if watch is None:
            return
        watch.look(time.monotonic())
        del watch
