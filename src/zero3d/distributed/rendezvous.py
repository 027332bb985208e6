"""How the ranks of an attempt find each other in a store that earlier, dead attempts have written to.

torchrun's agent keeps one store for all its restarts, and torch looks up addresses there by rank: restarted ranks
would read those of the dead. Each attempt gets a prefix of its own, which its ranks agree on:

    rank 0                                       rank r
    session = S (new)                            S = session, perhaps still a dead attempt's
    for each r: n = hello/S/r, welcome/n = S     hello/S/r = n (new), wait for welcome/n, else look again
    prefix S                                     prefix S

A dead rank 0 welcomes nobody. The agents' restart counts would not do: each node counts for itself.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from datetime import timedelta

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
