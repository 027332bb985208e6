"""Whether every group begins with all of its ranks.

A communicator is made at the group's first operation, by all of its ranks together. A collective is one of all ranks;
a batch of messages may be one of a few, who then wait for the others: torch demands that all ranks take part in a
group's first batch. Messages sent alone have communicators of their own. Whether a group's ranks call the same
collectives in the same order is what rendezvous.py says: all that a look at their lists would find, it finds, too.
"""

from __future__ import annotations

from collections import defaultdict

from instruments.groups import Logs, Operation


def by_group(logs: Logs) -> dict[tuple[str, tuple[int, ...]], dict[int, list[Operation]]]:
    """Return what every rank asked of every group, in order."""
    found: dict[tuple[str, tuple[int, ...]], dict[int, list[Operation]]] = defaultdict(dict)
    for rank, log in enumerate(logs):
        for entry in log:
            if isinstance(entry, Operation):
                found[entry.group, entry.ranks].setdefault(rank, []).append(entry)
    return found


def first_operation_faults(logs: Logs) -> list[str]:
    """Return the groups that begin with a batch of messages between a few of their ranks, in words."""
    faults = []
    for (group, ranks), asked in by_group(logs).items():
        for rank, operations in asked.items():
            shared = [o for o in operations if o.peer is None or o.op.startswith("batched")]
            if not shared or shared[0].peer is None:
                continue
            together = {rank, *(o.peer for o in shared if o.batch == shared[0].batch)}
            if together != set(ranks):
                faults.append(
                    f"group {group} of {ranks} begins on rank {rank} with messages of {sorted(together)} alone"
                )
    return faults
