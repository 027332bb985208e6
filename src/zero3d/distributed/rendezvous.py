"""How the ranks of an attempt find each other in a store that earlier, dead attempts have written to.

torchrun's agent keeps one store for all its restarts, and torch looks up addresses there by rank: restarted ranks
would read those of the dead. Each attempt gets a prefix of its own, which its ranks agree on:

    rank 0                                       rank r
    session = S (new)                            S = session, perhaps still a dead attempt's
    for each r: n = hello/S/r, welcome/n = S     hello/S/r = n (new), wait for welcome/n, else look again
    prefix S                                     prefix S

A dead rank 0 welcomes nobody. The agents' restart counts would not do: each node counts for itself.

Ranks that have ended torch.distributed and begin it again keep their store: one that rank 0 opened anew would have the
port of the old one, to which a rank may still connect. Each world has a prefix by its number, which ranks count alike.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Mapping
from datetime import timedelta
from typing import NamedTuple

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from zero3d.errors import Zero3dError

A_MOMENT, LOOK = 0.1, 1.0  # seconds between two looks at the answer, at the session
_KEY = "zero3d/attempt"


def shared_store(environment: Mapping[str, str], patience: timedelta) -> tuple[Store, int, int]:
    """Open the store of RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT; return it, this rank and the world.

    Under torchrun's agent it is this attempt's part of the store. Raises Zero3dError when ranks do not come.
    """
    store, rank, world = next(rendezvous("env://", timeout=patience))
    restarts = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "TORCHELASTIC_RESTART_COUNT" in environment
    if restarts and world > 1:
        store = PrefixStore(f"{_KEY}/{attempt(store, rank, world, patience.total_seconds())}", store)
    return store, rank, world


class _World(NamedTuple):
    """A world that has begun: its launcher's store, this rank, the number of ranks, and which one of them it is."""

    store: Store
    rank: int
    size: int
    number: int


_KNOWN_BY = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
_worlds: dict[tuple[str | None, ...], _World] = {}  # the last one that has begun, by process and launcher
_ended: set[tuple[str | None, ...]] = set()  # those that all ranks have ended by closing their meshes


def world_store(environment: Mapping[str, str], patience: timedelta) -> tuple[Store, int, int]:
    """Return what `shared_store` does, for a world of its own; one after an ended world is in that one's store.

    Raises Zero3dError when ranks do not come.
    """
    known = _known(environment)
    if known in _ended:
        last = _worlds[known]
        _worlds[known] = found = last._replace(number=last.number + 1)
        _ended.discard(known)
        return PrefixStore(f"zero3d/world/{found.number}", found.store), found.rank, found.size
    _worlds[known] = _World(*shared_store(environment, patience), 1)
    return _worlds[known][:3]


def end_world(environment: Mapping[str, str]) -> None:
    """Note that all ranks have ended the world that has begun last, so that another one may begin in its store."""
    if _known(environment) in _worlds:
        _ended.add(_known(environment))


def _known(environment: Mapping[str, str]) -> tuple[str | None, ...]:
    return str(os.getpid()), *map(environment.get, _KNOWN_BY)


def attempt(store: Store, rank: int, world: int, patience: float) -> str:
    """Return a name that the living ranks of this attempt agree on, and no earlier one had. Raises Zero3dError."""
    token = uuid.uuid4().hex
    try:
        if rank == 0:
            store.set(f"{_KEY}/session", token)
            for peer in range(1, world):
                _wait(store, f"{_KEY}/hello/{token}/{peer}", patience)
                store.set(f"{_KEY}/welcome/{store.get(f'{_KEY}/hello/{token}/{peer}').decode()}", token)
            return token
        return _welcome(store, rank, token, patience)
    except DistStoreError as error:
        raise Zero3dError(
            f"rank {rank} of {world} waited {patience:.0f} s at the start for a rank that never came: look at what the "
            "other ranks say."
        ) from error


def _welcome(store: Store, rank: int, token: str, patience: float) -> str:
    end = time.monotonic() + patience
    while True:
        _wait(store, f"{_KEY}/session", patience)
        session = store.get(f"{_KEY}/session").decode()
        store.set(f"{_KEY}/hello/{session}/{rank}", token)
        again = time.monotonic() + LOOK
        while not store.check([f"{_KEY}/welcome/{token}"]) and time.monotonic() < again:
            time.sleep(A_MOMENT)  # torch warns of each wait of a store's own that runs out
        if store.check([f"{_KEY}/welcome/{token}"]):
            return store.get(f"{_KEY}/welcome/{token}").decode()
        if time.monotonic() > end:
            raise DistStoreError(f"rank 0 did not answer in {patience:.0f} s")


def _wait(store: Store, key: str, seconds: float) -> None:
    store.wait([key], timedelta(seconds=seconds))
