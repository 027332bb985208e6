"""Whether every group begins with all of its ranks, and whether its ranks call the same collectives.

A communicator is made at the group's first operation, by all of its ranks together. A collective is one of all ranks;
a batch of messages may be one of a few, who then wait for the others: torch demands that all ranks take part in a
group's first batch. Messages sent alone have communicators of their own.
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


def order_faults(logs: Logs) -> list[str]:
    """Return the groups whose ranks call other collectives, in another order or of other sizes, in words."""
    faults = []
    for (group, ranks), asked in by_group(logs).items():
        rows = {rank: [o[2:5] for o in asked.get(rank, []) if o.peer is None] for rank in ranks}
        first = rows[ranks[0]]
        for rank, row in rows.items():
            at = next((i for i, (a, b) in enumerate(zip(first, row, strict=False)) if a != b), None)
            if at is not None:
                faults.append(f"group {group}: rank {rank} has {row[at]} where rank {ranks[0]} has {first[at]}")
            elif len(row) != len(first):
                faults.append(f"group {group}: rank {rank} has {len(row)} collectives, rank {ranks[0]} {len(first)}")
    return faults
