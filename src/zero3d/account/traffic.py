"""Traffic: what operations send, and the formula of the dp axis: elements by the paper; calls, bytes exactly. No torch.

Optimizer states appear in no formula: every rank updates the slice whose states it holds, and only
gradients go in and parameters come out. Source: Rajbhandari et al., "ZeRO" (2020), section 7.
Other axes' formulas lie with what they describe: tensor_parallel/, pipeline/, expert_parallel/, optim/owners.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zero3d.blueprint.layout import CANONICAL
from zero3d.blueprint.policy import Policy
from zero3d.blueprint.stages import Stage, stage_row
from zero3d.blueprint.unit import UnitPlan
from zero3d.distributed.block_bytes import CODE_BITS, message_bytes, sum_of_copies
from zero3d.spec.sections import Spec
from zero3d.spec.zero import SAME, Zero


class Moved(NamedTuple):
    """Calls of one operation, and the elements and bytes that a rank sends in them."""

    calls: int = 0
    elements: int = 0
    bytes: int = 0

    def times(self, count: int) -> Moved:
        """Return the traffic of `count` such operations."""
        return Moved(*(count * figure for figure in self))

    @classmethod
    def total(cls, moved: Iterable[Moved]) -> Moved:
        """Return the sum of calls, of elements and of bytes."""
        return cls(*(sum(figures) for figures in zip(cls(), *moved, strict=True)))


class Sent(NamedTuple):
    """A row: what one operation on one axis sends for one unit, module or layer ("-": for none)."""

    axis: str
    op: str
    unit: str
    moved: Moved


def traffic_elements(stage: int, params: int, n: int, micro_batches: int = 1) -> dict[str, Fraction]:
    """Return the elements one rank sends (and receives) per step by the paper's section 7, by operation.

    A ring reduce-scatter or all-gather of Psi elements takes N - 1 hops of Psi/N: Psi (N-1)/N
    elements per rank; an all-reduce is one of each, 2 Psi (N-1)/N.
    """
    row = stage_row(stage)
    ring = Fraction(params * (n - 1), n)
    return {
        "reduce_scatter": ring * (micro_batches if row.shards_gradients else 1),
        "all_gather": ring * (2 * micro_batches if row.shards_parameters else 1),
    }


def gathered_width(row: Stage, weight: int, reduced: int) -> int:
    """Return the bytes of an element that is gathered behind a reduction: of a weight, at stage 0 of a gradient."""
    return weight if row.shards_optimizer else reduced


class UnitTraffic(NamedTuple):
    """What the exact formulas need of a unit: padded elements, and bytes per element.

    weight   of a compute weight
    reduced  of a reduced gradient
    wire     of a gradient on its way to the reduction
    ranks    over which experts are cut, where an ep axis shares them out; None: as all other units
    coded    its weights travel in blocks of 8 bits (zero.gather_wire)
    node     neighbours who keep a second shard of it together; 1: nobody does (zero.second_shard)
    sums     of a reduced gradient on its way to the sum over copies of shards; None: `reduced`
    slow     the form in which it travels there (zero.slow_wire)
    """

    name: str
    elements: int
    weight: int
    reduced: int
    wire: int
    trainable: bool
    ranks: int | None = None
    coded: bool = False
    node: int = 1
    sums: int | None = None
    slow: str = SAME

    @property
    def as_gathered(self) -> tuple[int, int]:
        """Return what travels of it when it is gathered: elements, and bytes of each; of blocks every byte is one."""
        return (message_bytes(self.elements, CODE_BITS), 1) if self.coded else (self.elements, self.weight)

    def gathers_across(self, gathers: int) -> int:
        """Return how many of so many gathers in a step are over all ranks: of second shards one, after an update."""
        return gathers if self.node == 1 else min(gathers, int(self.trainable))


def traffic_of(name: str, unit: UnitPlan, elements: int, ranks: int | None) -> UnitTraffic:
    """Return the formulas' inputs for a unit. ranks: of experts that ep shares out, the ranks they are cut over."""
    plan = unit.gradients
    return UnitTraffic(
        name,
        elements,
        unit.kind.dtype.itemsize,
        reduced=0 if plan is None else unit.policy.master.itemsize,
        wire=0 if plan is None else plan.travels.itemsize,
        trainable=plan is not None,
        ranks=ranks,
        coded=unit.coded,
        node=unit.node,
        sums=None if plan is None else plan.sums.itemsize,
        slow=SAME if plan is None else unit.policy.slow,
    )


class Levels(NamedTuple):
    """Counts the ranks of a dp axis: the ranks that states are cut over, and the copies of each shard.

    shard x replicate = dp
    """

    shard: int
    replicate: int = 1

    @property
    def axes(self) -> int:
        """Count the axes on which a step compares the order of operations: dp, and the axes of both levels."""
        return 1 if self.replicate == 1 else 2 if self.shard == 1 else 3


ORDERS = 2  # values per rank and axis of units: the orders of gathers and reductions


def step_traffic(
    stage: int,
    units: Sequence[UnitTraffic],
    n: int | Levels,
    gathers: Mapping[str, int],
    micro_batches: int = 1,
    reduce: str = "auto",
    exact: bool = False,
    cells_of_experts: bool = False,
) -> dict[tuple[str, str], Moved]:
    """Return the exact traffic of one applied step, by (operation, unit): the ledger must equal it.

    units    padded sizes, as laid out
    n        ranks of dp, over all of which states are cut; else of both levels
    gathers  parameter gathers per unit and *step* at stage 3 (`count_gathers` of the token order)
    exact    an all-to-all of as many elements in the place of each reduce-scatter; every micro-batch's weight and
             the norms of a rank's cells are exchanged, those of experts apart if there are any (`cells_of_experts`)

    A step exchanges each rank's weight with its orders, and its norms. Where shards have copies, a step sums its
    reduced gradients over these, in exact mode behind every reduction. What gathers from second shards send is
    `node_traffic`.
    """
    row, levels = stage_row(stage), n if isinstance(n, Levels) else Levels(n)
    dp = levels.shard * levels.replicate
    often = Policy.of(Spec(Zero(stage, reduce=reduce))).often
    moved: dict[tuple[str, str], Moved] = {}

    def add(operation: str, unit: UnitTraffic, calls: int, width: int, elements: int | None = None) -> None:
        ranks = levels.shard if unit.ranks is None else unit.ranks
        if calls and ranks > 1:
            sent = calls * ((unit.elements if elements is None else elements) * (ranks - 1) // ranks)
            moved[operation, unit.name] = Moved(calls, sent, sent * width)

    def add_copies(unit: UnitTraffic, calls: int) -> None:
        ranks = levels.shard if unit.ranks is None else unit.ranks
        if levels.replicate > 1:
            sent = sum_of_copies(unit.elements // ranks, levels.replicate, unit.reduced, unit.slow)
            if unit.slow == SAME and not exact:
                sent[0] = sent[0][0], unit.reduced if unit.sums is None else unit.sums
            elements, nbytes = sum(n for n, _ in sent), sum(n * width for n, width in sent)
            moved["all_reduce", unit.name] = Moved(1, elements, nbytes).times(calls)

    for unit in units:
        if row.shards_parameters:
            elements, width = unit.as_gathered
            add("all_gather", unit, unit.gathers_across(gathers.get(unit.name, 0)), width, elements)
        elif unit.trainable:
            add("all_gather", unit, 1, gathered_width(row, unit.weight, unit.reduced))
        if unit.trainable:
            calls = micro_batches if often else 1
            add("all_to_all" if exact and dp > 1 else "reduce_scatter", unit, calls, unit.wire)
            add_copies(unit, calls if exact else 1)
    orders = ORDERS * (levels.axes + any(unit.ranks is not None for unit in units))
    norms = CANONICAL // levels.shard * (2 if cells_of_experts else 1) if exact else 1
    exchanged = ((micro_batches if exact else 1) + orders, norms)
    values = sum(exchanged) * (dp - 1)
    moved["exchange", "-"] = Moved(len(exchanged), values, 8 * values)
    return moved


def node_traffic(units: Sequence[UnitTraffic], gathers: Mapping[str, int]) -> dict[tuple[str, str], Moved]:
    """Return what a rank sends to its neighbours in one step of stage 3, by (operation, unit): second shards.

    gathers  as of `step_traffic`; the first of a trainable unit was over all ranks
    """
    moved = {}
    for unit in units:
        calls = gathers.get(unit.name, 0) - unit.gathers_across(gathers.get(unit.name, 0))
        if calls and unit.node > 1:
            elements, width = unit.as_gathered
            sent = calls * (elements * (unit.node - 1) // unit.node)
            moved["all_gather", unit.name] = Moved(calls, sent, sent * width)
    return moved
