"""Calls that all ranks make together are told apart before anybody waits: a rank may ask for weights of stage 3 alone.

Each rank posts what it calls, under the number of that call, in the store of torch.distributed. Who gathers weights
reads the posts of the others first. One that waits for everyone gives none of its weights, and would wait for ever:

    if accelerator.is_main_process:              rank 0 posts "save_pretrained", and reads "wait_for_everyone"
        unwrapped.save_pretrained(folder)
    accelerator.wait_for_everyone()              rank 1 posts "wait_for_everyone", and waits

A rank that posts nothing for a while is left to the comparison of collectives, which has its own errors.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import PrefixStore, Store

from zero3d.distributed.agreement import name_ranks
from zero3d.errors import ConfigError

WHILE = timedelta(seconds=60)  # until ranks that post nothing are left to themselves
WAITS = "wait_for_everyone"


class Meeting:
    """Counts the calls of one rank that all ranks make, in a part of the store of its own."""

    def __init__(self, store: Store, name: str, rank: int, world: int) -> None:
        self._store = PrefixStore(f"zero3d/meeting/{name}", store)
        self._rank, self._world = rank, world
        self._number = 0

    def post(self, call: str) -> None:
        """Tell what this rank calls next."""
        self._number += 1
        self._store.set(self._key(self._rank), call)

    def expect(self, call: str) -> None:
        """Post a call and read the others' posts. Raises ConfigError where a rank waits for everyone instead."""
        self.post(call)
        others = [rank for rank in range(self._world) if rank != self._rank]
        with suppress(DistStoreError):
            self._store.wait([self._key(rank) for rank in others], WHILE)
        posts = {rank: self._store.get(self._key(rank)).decode() for rank in others if self._has(rank)}
        if waiting := [rank for rank, post in posts.items() if post == WAITS != call]:
            self._number -= 1  # a program that catches this goes on with the call that the others wait in
            verb = "waits" if len(waiting) == 1 else "wait"
            raise ConfigError(
                f"{call}() was called on rank {self._rank}, while {name_ranks(waiting)} {verb} in {WAITS}(): at stage "
                f"3 a rank has a part of the weights. Call {call}() on all ranks, not under `if "
                "accelerator.is_main_process:`; rank 0 alone writes."
            )

    def _key(self, rank: int) -> str:
        return f"{self._number}/{rank}"

    def _has(self, rank: int) -> bool:
        return bool(self._store.check([self._key(rank)]))
