"""A few numbers of every rank, gathered through the store: for ranks that come hours apart.

    rank r > 0                             rank 0
    in/k/r = its numbers                   wait for in/k/1 .. in/k/(N-1)
    wait for out/k                         out/k = all numbers, by rank
    delete in/k/r, count read              stay until all have read, or some seconds
                                           delete out/(k-1): all have read it, since they have come to k

No rank is connected to another, and each asks the store five times an exchange, rank 0 for N values; two keys stay. A
rank that waits looks for it again and again, and for the note of one that failed (`axis.leave_note`). Of one that was
killed nobody here hears: its launcher ends the others.
"""

from __future__ import annotations

import base64
import time
import zlib

import torch
from torch import Tensor
from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import Store

from zero3d.distributed.axis import read_note

A_MOMENT, LOOK = 1e-3, 1.0  # seconds between two looks: at first, and at most
LINGER = 5.0  # seconds: some times LOOK
_KEY = "zero3d/waiting"
_NAMED = 5  # ranks in a message


class StoreExchange:
    """Gathers vectors of N ranks through their store; `name` is that of these ranks and of no others.

    Its keys are its own: each rank counts in the store what it has opened under a name, all in one order.
    `known` is a note of an earlier failure, which is over.
    """

    def __init__(self, store: Store, name: str, rank: int, size: int, patience: float, known: str = "") -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._patience = patience
        self._known = known
        self._name = name
        self._opened = 0
        self._count = 0

    def exchange(self, values: Tensor) -> Tensor:
        """Return a vector [k] of every rank as [N, k]. Raises the store's errors, where a rank failed or is late."""
        mine = values.contiguous().view(torch.uint8).numpy().tobytes()
        self._opened = self._opened or self._store.add(f"{_KEY}/{self._name}/opened/{self._rank}", 1)
        self._count += 1
        if self._rank:
            key = self._key("in", self._count, self._rank)
            self._store.set(key, _pack(mine))
            self._wait([self._key("out", self._count)])
            rows = _unpack(self._store.get(self._key("out", self._count)))
            self._store.delete_key(key)
            self._store.add(self._key("read"), 1)
        else:
            keys = [self._key("in", self._count, rank) for rank in range(1, self._size)]
            self._wait(keys)
            at_once = self._store.has_extended_api()  # type: ignore[attr-defined]  # one question for all keys
            come = self._store.multi_get(keys) if at_once else [self._store.get(key) for key in keys]
            rows = mine + b"".join(map(_unpack, come))
            self._store.set(self._key("out", self._count), _pack(rows))
            self._linger()
            self._store.delete_key(self._key("out", self._count - 1))
        return torch.frombuffer(bytearray(rows), dtype=values.dtype).view(self._size, -1)

    def _key(self, *parts: object) -> str:
        return "/".join(map(str, (_KEY, self._name, self._opened, *parts)))

    def _wait(self, keys: list[str]) -> None:
        """Return once all keys are there. Raises DistStoreError where time is up, or a rank failed, perhaps before.

        It looks again and again: a store's own wait is not told of a note, and torch warns of each that runs out.
        """
        end, pause = time.monotonic() + self._patience, A_MOMENT
        while not self._store.check(keys):
            ended = time.monotonic() >= end or read_note() not in ("", self._known)
            if ended and not self._store.check(keys):  # the rank that left a note may have come before
                raise DistStoreError(f"timed out: {self._missing(keys)}")
            time.sleep(pause)
            pause = min(2 * pause, LOOK)

    def _linger(self) -> None:
        """Stay for some seconds until all have read: the store may live in this process, and end with it."""
        end = time.monotonic() + LINGER
        while self._store.add(self._key("read"), 0) < self._count * (self._size - 1) and time.monotonic() < end:
            time.sleep(A_MOMENT)

    def _missing(self, keys: list[str]) -> str:
        missing = [rank for rank, key in enumerate(keys, 1) if not self._store.check([key])] if not self._rank else [0]
        return f"of {self._size} ranks {len(missing)} did not come: {', '.join(map(str, missing[:_NAMED]))}"


def _pack(raw: bytes) -> str:
    """Return bytes as text, short where they repeat, as texts do that are filled up to the longest."""
    return base64.b64encode(zlib.compress(raw, 1)).decode()


def _unpack(text: bytes) -> bytes:
    return zlib.decompress(base64.b64decode(text))
