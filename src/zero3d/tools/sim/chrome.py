"""A simulation for chrome://tracing or Perfetto: memory by category and actions of each rank, and the pipeline.

process "rank R"     counters of bytes alive; slices for what the step does. One event of its log is one us
process "pipeline"   a row per pipeline stage: actions in units of FLOPs, or of one forward where not all are known
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from zero3d.tools.sim.gantt import gantt
from zero3d.tools.sim.result import Instant, RankResult, Simulation

PIPELINE = 1 << 20  # the process number


def chrome_trace(simulation: Simulation) -> dict[str, Any]:
    """Return the trace as plain values."""
    events = [event for rank in simulation.ranks for event in _rank_events(rank)]
    if (chart := gantt(simulation)) is not None:
        events.append(_name("process_name", PIPELINE, 0, f"pipeline ({chart.unit})"))
        scale = max(1, chart.span // 1_000_000)
        for row, intervals in enumerate(chart.rows):
            events.append(_name("thread_name", PIPELINE, row, f"pp {row}"))
            events += [
                {
                    "name": f"{i.action.kind} {i.action.micro_batch} (part {i.action.chunk})",
                    "ph": "X",
                    "pid": PIPELINE,
                    "tid": row,
                    "ts": i.start // scale,
                    "dur": (i.end - i.start) // scale,
                }
                for i in intervals
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _rank_events(rank: RankResult) -> Iterator[dict[str, Any]]:
    """Yield the memory of a rank as counters, and the phases of its step as slices."""
    line = rank.timeline
    yield _name("process_name", rank.rank, 0, f"rank {rank.rank} (pp {rank.pp}), peak {rank.peak.nbytes:,} bytes")
    for event, row in zip(line.events, line.rows, strict=True):
        sizes = dict(zip(line.categories, row, strict=True))
        yield {"name": "bytes alive", "ph": "C", "pid": rank.rank, "ts": event, "args": sizes}
    ends = [mark.event for mark in line.marks[1:]] + [line.total]
    for mark, end in zip(line.marks, ends, strict=True):
        name = describe(mark.at)
        yield {"name": name, "ph": "X", "pid": rank.rank, "tid": 0, "ts": mark.event, "dur": end - mark.event}
    yield {"name": "peak", "ph": "i", "s": "p", "pid": rank.rank, "tid": 0, "ts": rank.peak.event}


def describe(at: Instant) -> str:
    """Put an instant in words, without its module."""
    return at.phase if at.micro_batch < 0 else f"{at.phase} of micro-batch {at.micro_batch}"


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}
