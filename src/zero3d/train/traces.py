"""Traces of several ranks as one file for Perfetto or chrome://tracing. No torch.

    trace-rank-R.json  what the profiler of rank R wrote; its times count from an instant that the file names
    trace.json         all of them: a process for each rank and each of its devices, on the clock of the first rank

Ranks are read one after another, so that only one of their files is in memory. Clocks of hosts may differ by what the
network's time leaves, milliseconds perhaps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MERGED = "trace.json"
PROCESSES = 1000  # numbers of a rank's own
ARROWS = ("s", "t", "f")  # phases of events that a number ties to each other


def of_rank(folder: Path, rank: int) -> Path:
    """Return the file of a rank's own trace."""
    return folder / f"trace-rank-{rank}.json"


def merge(folder: Path, hosts: Sequence[str]) -> Path | None:
    """Write trace.json of the ranks' files that are there; None where none is. hosts: of each rank.

    Raises OSError, ValueError for files that cannot be read.
    """
    found = [rank for rank in range(len(hosts)) if of_rank(folder, rank).exists()]
    if not found:
        return None
    merged, base, begun = folder / MERGED, None, False
    with merged.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for rank in found:
            trace = json.loads(of_rank(folder, rank).read_text())
            own = int(trace.get("baseTimeNanoseconds", 0))
            base = own if base is None else base
            for event in moved(trace["traceEvents"], rank, hosts[rank], (own - base) / 1000):
                file.write(f"{',' if begun else ''}{json.dumps(event)}\n")
                begun = True
        file.write("]}\n")
    return merged


def moved(events: Sequence[Mapping[str, Any]], rank: int, host: str, later: float) -> Iterator[dict[str, Any]]:
    """Yield a rank's events under numbers of its own. later: microseconds from the first clock's zero to its own."""
    numbers: dict[Any, int] = {}
    for event in events:
        number = numbers.setdefault(event.get("pid"), len(numbers))
        own = {**event, "pid": rank * PROCESSES + number}
        if "ts" in own:
            own["ts"] += later
        if own.get("ph") in ARROWS and "id" in own:
            own["id"] = f"{rank}-{own['id']}"
        arguments = event.get("args") or {}
        if own.get("name") == "process_name":
            own["args"] = {"name": f"rank {rank} ({host}): {arguments.get('name', '')}"}
        if own.get("name") == "process_sort_index":
            own["args"] = {"sort_index": rank * PROCESSES + number}
        yield own
