"""Ranks that are threads of one process, and share the device: its allocator, its kernels, streams of their own.

Collectives are copies between their streams, ordered by events (instruments/groups.py), so what is late or freed early
on one rank is read by another. Each run has the parameters of one process in fp64, with a hole on one rank and without.
"""

from __future__ import annotations

from typing import Any

from instruments import rendezvous, unequal
from instruments.unequal import Hole

from campaign.account import Account, Place

DEPTH, STEPS = 6, 3
RUNS: dict[str, tuple[int, Hole | None, dict[str, Any]]] = {
    "2 ranks, stage 3": (2, None, {}),
    "2 ranks, stage 3, a hole": (2, Hole(3), {}),
    "2 ranks, stage 2, a hole": (2, Hole(3), {"stage": 2}),
    "2 ranks, one communicator, a hole": (2, Hole(1), {"communicators": 1}),
    "4 ranks, second shards": (4, Hole(2, rank=3), {"second_shard": 2}),
    "8 ranks, stage 3, a hole": (8, Hole(5, rank=6), {}),
}


def threads(place: Place, account: Account) -> None:
    """Train on threads, beside one process on the host."""
    account.ran("shape", {"blocks": DEPTH, "width": unequal.WIDTH, "steps": STEPS})
    for name, (world, hole, options) in RUNS.items():
        ran = unequal.run(hole, DEPTH, world, STEPS, place.device, **options)
        wanted = unequal.expected(hole, DEPTH, world, STEPS)
        wrong = [repr(error)[:200] for error in ran.errors] + ran.stuck[:1] + rendezvous.replay(ran.logs)[:1]
        if not wrong and not ran.equals(wanted):
            wrong = ["the parameters are not those of one process"]
        account.ran(name, len(ran.logs[0]), "; ".join(wrong))
