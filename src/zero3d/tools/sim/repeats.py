"""How many micro-batches of a step a dry run must make to know all of them.

From the second micro-batch on without a pipeline, and once a schedule's warm-up is over, micro-batches repeat each
other: bytes alive do not depend on how many there are, traffic and FLOPs are linear in them.

    schedule           run               why
    -----------------  ----------------  ------------------------------------------------------------------------
    no pipeline        3                 a first one, one in the middle, a last one
    1f1b               pp + 1            torch takes pp or more, of which pp - place are in flight
    interleaved,       4 pp              rounds of pp stay what they are; in flight are fewer than 2 (pp + pp)
    zero-bubble, zbv
    gpipe              M                 all are in flight
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from zero3d.distributed.degrees import DATA
from zero3d.tools.sim.result import FlopCount, TrafficEntry

PER_STEP = ("exchange", "trade", "broadcast")  # operations that a step has once, however many micro-batches


def micro_batches_to_run(schedule: str | None, pp: int, micro_batches: int, stage: int) -> tuple[int, int]:
    """Return how many micro-batches the first step (observe.py) and the measured one need. stage: of ZeRO."""
    first, second = micro_batches, micro_batches
    if pp == 1:
        first, second = 2, 3
    elif schedule == "1f1b":
        first, second = pp, pp + 1
    elif schedule == "zbv" or (schedule != "gpipe" and micro_batches % pp == 0):
        first, second = 2 * pp, 4 * pp
    if second >= micro_batches:
        first, second = micro_batches, micro_batches
    return (first if stage == 3 else 0), second


def traffic_of_all(
    first: Iterable[TrafficEntry], second: Iterable[TrafficEntry], ran: tuple[int, int], wanted: int, reduced: str
) -> tuple[TrafficEntry, ...]:
    """Compute the traffic of `wanted` micro-batches from that of two steps, of `ran` micro-batches each.

    After a step of none, all is in proportion but for what data parallelism does once per step: it gathers, and
    reduces if `reduced` (Policy.reduce) says so.
    """
    before = {(entry.op, entry.axis, entry.unit): (entry.calls, entry.elements, entry.nbytes) for entry in first}
    once = ("all_gather", "all_reduce") if reduced != "every_step" else ("all_gather", "all_reduce", "reduce_scatter")
    traffic = []
    for entry in second:
        key, now = (entry.op, entry.axis, entry.unit), [entry.calls, entry.elements, entry.nbytes]
        if entry.op not in PER_STEP and (ran[0] or entry.axis not in DATA or entry.op not in once):
            more, left = ran[1] - ran[0], wanted - ran[1]
            was = before[key] if ran[0] else (0, 0, 0)
            now = [b + (b - a) * left // more if left else b for a, b in zip(was, now, strict=True)]
        traffic.append(TrafficEntry(*key, *now))
    return tuple(traffic)


def work_of_all(work: Iterable[FlopCount], ran: int, wanted: int) -> tuple[FlopCount, ...]:
    """Compute the FLOPs of `wanted` micro-batches from those of `ran`."""
    flops: Counter[tuple[str, str, int]] = Counter()
    for count in work:
        flops[count.phase, count.kind, count.chunk] += count.flops * wanted // ran
    return tuple(FlopCount(*key, number) for key, number in sorted(flops.items()))
