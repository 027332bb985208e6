"""The timeline of a pipeline: when its stages work and wait, from torch's plan and what each chunk's actions cost.

An action costs the FLOPs that were counted in it; where only some ranks were simulated, one for a forward, an input
or a weight phase and two for a whole backward. Messages cost nothing here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

from zero3d.pipeline.actions import COSTS, Action, Interval, intervals
from zero3d.tools.sim.result import Simulation


@dataclass(frozen=True)
class Gantt:
    """A timeline of a step. rows: by pipeline stage; unit: of its times; span: when the last action ends."""

    rows: tuple[tuple[Interval, ...], ...]
    unit: str
    span: int

    @property
    def bubble(self) -> Fraction:
        """Return waiting over working time of the stage that works most."""
        work = max(sum(interval.end - interval.start for interval in row) for row in self.rows)
        return Fraction(self.span - work, work)


def gantt(simulation: Simulation) -> Gantt | None:
    """Return the pipeline's timeline; None without a pipeline."""
    orders = simulation.ranks[0].orders
    if not orders:
        return None
    order = {
        stage: [Action(action.kind, action.chunk, action.micro_batch) for action in row]
        for stage, row in enumerate(orders)
    }
    costs = _flops(simulation)
    known = costs.keys() >= {(action.kind, action.chunk) for row in order.values() for action in row}
    rows = intervals(order, lambda a: costs[a.kind, a.chunk] if known else COSTS[a.kind])
    span = max(row[-1].end for row in rows.values())
    return Gantt(tuple(tuple(rows[stage]) for stage in sorted(rows)), "FLOPs" if known else "forwards", span)


def _flops(simulation: Simulation) -> Counter[tuple[str, int]]:
    """Return the FLOPs of one action, by kind and chunk."""
    total: Counter[tuple[str, int]] = Counter()
    for pp in {rank.pp for rank in simulation.ranks}:
        first = next(rank for rank in simulation.ranks if rank.pp == pp)
        for work in first.work:
            total[work.kind, work.chunk] += work.flops // simulation.accumulate
    return total
