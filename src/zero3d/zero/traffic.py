"""What a step sends over the dp axis, by formula: elements by the paper; calls, elements, bytes exactly. No torch.

Optimizer states appear in no formula: every rank updates the slice whose states it holds, and only
gradients go in and parameters come out. Source: Rajbhandari et al., "ZeRO" (2020), section 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zero3d.zero.layout import CANONICAL
from zero3d.zero.stages import resolve_policies, stage_row

TURN, ROOT_TURN = "turn", "root turn"  # tokens that the units used last in a forward, and the root, keep


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


class TokenEvent(NamedTuple):
    """A user of a unit starts (acquire) or stops needing its full parameters."""

    unit: str
    token: object
    acquire: bool


def count_gathers(events: Iterable[TokenEvent]) -> Counter[str]:
    """Count gathers per unit: how often its set of users goes from empty to non-empty."""
    users: dict[str, set[object]] = {}
    gathers: Counter[str] = Counter()
    for unit, token, acquire in events:
        holders = users.setdefault(unit, set())
        if acquire:
            gathers[unit] += not holders
            holders.add(token)
        else:
            holders.discard(token)
    return gathers


def token_order(forward: Sequence[str], root: str | None = None, no_backward: Iterable[str] = ()) -> list[TokenEvent]:
    """Return the tokens of one micro-batch in which units are used in the order `forward`.

    The root unit is used from its forward to the end of backward. The unit used last keeps
    its turn token, so its backward finds it gathered. Units in `no_backward` (embeddings: their
    backward needs indices only) are used in forward alone.
    """
    return forward_tokens(forward, root) + backward_tokens(forward, root, frozenset(no_backward))


def forward_tokens(forward: Sequence[str], root: str | None) -> list[TokenEvent]:
    """Return the tokens of a forward: what it used last, and the root unit, keep one."""
    events = [TokenEvent(root, ROOT_TURN, True)] if root else []
    turn: str | None = None
    for i, unit in enumerate(forward):
        if turn not in (None, unit):
            events.append(TokenEvent(str(turn), TURN, False))
        events += [TokenEvent(unit, ("forward", i), True), TokenEvent(unit, TURN, True)]
        events.append(TokenEvent(unit, ("forward", i), False))
        turn = unit
    return events


def backward_tokens(forward: Sequence[str], root: str | None, no_backward: frozenset[str]) -> list[TokenEvent]:
    """Return the tokens of a backward, in reverse; the root unit's ends last."""
    events = [TokenEvent(root, "backward", True)] if root else []
    for i, unit in reversed(list(enumerate(forward))):
        if unit not in no_backward:
            events += [TokenEvent(unit, ("backward", i), True), TokenEvent(unit, ("backward", i), False)]
    return events + ([TokenEvent(root, "backward", False)] if root else [])


class UnitTraffic(NamedTuple):
    """What the exact formulas need of a unit: padded elements, and bytes per element.

    weight   of a compute weight
    reduced  of a reduced gradient
    wire     of a gradient on its way to the reduction
    ranks    over which experts are cut, where an ep axis shares them out; None: all of dp
    """

    name: str
    elements: int
    weight: int
    reduced: int
    wire: int
    trainable: bool
    ranks: int | None = None


class Moved(NamedTuple):
    calls: int
    elements: int
    bytes: int


ORDERS = 2  # values per rank and axis of units: the orders of gathers and reductions


def step_traffic(
    stage: int, units: Sequence[UnitTraffic], n: int, gathers: Mapping[str, int], micro_batches: int = 1,
    reduce: str = "auto", exact: bool = False, cells_of_experts: bool = False,
) -> dict[tuple[str, str], Moved]:  # fmt: skip
    """Return the exact traffic of one applied step, by (operation, unit): the ledger must equal it.

    units    padded sizes, as laid out
    gathers  parameter gathers per unit and *step* at stage 3 (`count_gathers` of the token order)
    exact    an all-to-all of as many elements in the place of each reduce-scatter; every micro-batch's weight and
             the norms of a rank's cells are exchanged, those of experts apart if there are any (`cells_of_experts`)

    A step exchanges each rank's weight with its orders, and its norms.
    """
    row = stage_row(stage)
    _, reduce = resolve_policies(row, "auto", reduce)
    moved: dict[tuple[str, str], Moved] = {}

    def add(operation: str, unit: UnitTraffic, calls: int, width: int) -> None:
        ranks = n if unit.ranks is None else unit.ranks
        if calls and ranks > 1:
            elements = calls * unit.elements * (ranks - 1) // ranks
            moved[operation, unit.name] = Moved(calls, elements, elements * width)

    for unit in units:
        if row.shards_parameters:
            add("all_gather", unit, gathers.get(unit.name, 0), unit.weight)
        elif unit.trainable:
            add("all_gather", unit, 1, unit.weight if row.shards_optimizer else unit.reduced)
        if unit.trainable:
            calls = micro_batches if reduce == "every_micro_batch" else 1
            add("all_to_all" if exact and n > 1 else "reduce_scatter", unit, calls, unit.wire)
    orders = ORDERS * (1 + any(unit.ranks is not None for unit in units))
    norms = CANONICAL // n * (2 if cells_of_experts else 1) if exact else 1
    exchanged = ((micro_batches if exact else 1) + orders, norms)
    values = sum(exchanged) * (n - 1)
    moved["exchange", "-"] = Moved(len(exchanged), values, 8 * values)
    return moved
