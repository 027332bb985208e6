"""What a step sends, by formula: elements by the paper, and calls, elements and bytes exactly. No torch.

Optimizer states appear in no formula: every rank updates the slice whose states it holds, and only
gradients go in and parameters come out. Source: Rajbhandari et al., "ZeRO" (2020), section 7.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from zero3d.pipeline.actions import Action
from zero3d.zero.stages import resolve_policies, stage_row


def traffic_elements(stage: int, params: int, n: int, micro_batches: int = 1) -> dict[str, Fraction]:
    """Elements one rank sends (and receives) per step by the paper's section 7, by operation.

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
    """Gathers per unit: how often its set of users goes from empty to non-empty."""
    users: dict[str, set[object]] = {}
    gathers: Counter[str] = Counter()
    for unit, token, acquire in events:
        held = users.setdefault(unit, set())
        if acquire:
            gathers[unit] += not held
            held.add(token)
        else:
            held.discard(token)
    return gathers


def token_order(forward: Sequence[str], root: str | None = None, no_backward: Iterable[str] = ()) -> list[TokenEvent]:
    """The tokens of one micro-batch in which units are used in the order `forward`.

    The root unit is used from its forward to the end of backward. The unit used last keeps
    its turn token, so its backward finds it gathered. Units in `no_backward` (embeddings: their
    backward needs indices only) are used in forward alone.
    """
    return _forward_tokens(forward, root) + _backward_tokens(forward, root, frozenset(no_backward))


def _forward_tokens(forward: Sequence[str], root: str | None) -> list[TokenEvent]:
    events = [TokenEvent(root, "root turn", True)] if root else []
    turn: str | None = None
    for i, unit in enumerate(forward):
        if turn not in (None, unit):
            events.append(TokenEvent(str(turn), "turn", False))
        events += [TokenEvent(unit, ("forward", i), True), TokenEvent(unit, "turn", True)]
        events.append(TokenEvent(unit, ("forward", i), False))
        turn = unit
    return events


def _backward_tokens(forward: Sequence[str], root: str | None, no_backward: frozenset[str]) -> list[TokenEvent]:
    events = [TokenEvent(root, "backward", True)] if root else []
    for i, unit in reversed(list(enumerate(forward))):
        if unit not in no_backward:
            events += [TokenEvent(unit, ("backward", i), True), TokenEvent(unit, ("backward", i), False)]
    return events + ([TokenEvent(root, "backward", False)] if root else [])


class PartUnits(NamedTuple):
    """The units of a pipeline's part, as `token_order` takes them."""

    forward: Sequence[str]
    root: str | None = None
    no_backward: frozenset[str] = frozenset()

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*self.forward, *filter(None, [self.root])]))


def pipeline_tokens(actions: Iterable[Action], parts: Mapping[int, PartUnits]) -> list[TokenEvent]:
    """The tokens of one rank's step in a pipeline, from the actions it ran; nothing recomputed.

    action   uses                                                     gathers of a unit in M micro-batches, at most
    -------  -------------------------------------------------------  ---------------------------------------------
    F        every unit                                               M
    B, I     every unit but embeddings, in reverse; I of part 0 none  M
    W        every unit: no hook tells which weights are read         M

    So 2M with whole backwards (gpipe, 1f1b, interleaved) and 3M with split ones (zero-bubble, zbv); embeddings M
    and 2M, part 0 2M in both: nothing enters it, so torch leaves its whole backward to W.

    Uses merge in one place: what a forward used last, and its root unit, stay gathered until the next F, or the
    end of the next backward, of whatever part this rank runs. If that backward is its own part's (of any
    micro-batch), it finds them gathered. So the last part under 1f1b (F0 B0 F1 B1 ...) gathers its head M times,
    under gpipe (F0 .. F3 B0 .. B3) 2M - 1 times.
    """
    events: list[TokenEvent] = []
    kept: list[TokenEvent] = []  # gives back what the last forward left gathered
    for kind, part, _ in actions:
        forward, root, no_backward = units = parts[part]
        if kind == "F":
            events += kept + _forward_tokens(forward, root)
            kept = [TokenEvent(forward[-1], "turn", False)]
            kept += [TokenEvent(root, "root turn", False)] if root else []
            continue
        if kind == "I" and part == 0:
            continue
        whole = units.names if kind == "W" else []
        events += [TokenEvent(unit, "whole", True) for unit in whole]
        events += _backward_tokens(forward, root, no_backward) + kept
        events += [TokenEvent(unit, "whole", False) for unit in whole]
        kept = []
    return events


def pipeline_gathers(actions: Iterable[Action], parts: Mapping[int, PartUnits], release: str) -> Counter[str]:
    """Gathers per unit in one rank's step at stage 3: Psi elements in all if held for the step, else per use.

    True from the second step of so many micro-batches on: one whose order differs from the step's before it
    may gather up to WINDOW units more, ahead of a use that does not come (zero/prefetch.py).
    """
    gathers = count_gathers(pipeline_tokens(actions, parts))
    return Counter(dict.fromkeys(gathers, 1)) if release == "every_step" else gathers


class UnitTraffic(NamedTuple):
    """What the exact formulas need of a unit: padded elements, and bytes per element.

    weight   of a compute weight
    reduced  of a reduced gradient
    wire     of a gradient on its way to the reduction
    """

    name: str
    elements: int
    weight: int
    reduced: int
    wire: int
    trainable: bool


class Moved(NamedTuple):
    calls: int
    elements: int
    bytes: int


EXCHANGES_PER_STEP = (3, 1)  # values per rank: [token weight, gather order, reduction order], [partial norm]
SEGMENTS = 64  # of a unit, layout.CANONICAL


def step_traffic(
    stage: int,
    units: Sequence[UnitTraffic],
    n: int,
    gathers: Mapping[str, int],
    micro_batches: int = 1,
    reduce: str = "auto",
    exact: bool = False,
) -> dict[tuple[str, str], Moved]:
    """Exact traffic of one applied step, by (operation, unit): the ledger must equal it.

    units    padded sizes, as laid out
    gathers  parameter gathers per unit and *step* at stage 3 (`count_gathers` of the token order)
    exact    an all-to-all of as many elements in the place of each reduce-scatter; every micro-batch's weight and
             the norms of a rank's segments are exchanged
    """
    row = stage_row(stage)
    _, reduce = resolve_policies(row, "auto", reduce)
    moved: dict[tuple[str, str], Moved] = {}

    def add(operation: str, unit: UnitTraffic, calls: int, width: int) -> None:
        if calls:
            elements = calls * unit.elements * (n - 1) // n
            moved[operation, unit.name] = Moved(calls, elements, elements * width)

    for unit in units:
        if row.shards_parameters:
            add("all_gather", unit, gathers.get(unit.name, 0), unit.weight)
        elif unit.trainable:
            add("all_gather", unit, 1, unit.weight if row.shards_optimizer else unit.reduced)
        if unit.trainable:
            calls = micro_batches if reduce == "every_micro_batch" else 1
            add("all_to_all" if exact and n > 1 else "reduce_scatter", unit, calls, unit.wire)
    exchanged = (micro_batches + 2, SEGMENTS // n) if exact else EXCHANGES_PER_STEP
    values = sum(exchanged) * (n - 1)
    moved["exchange", "-"] = Moved(len(exchanged), values, 8 * values)
    return moved


def pipeline_traffic(
    mine: Sequence[int], micro_batches: int, cuts: Sequence[Sequence[tuple[int, int]]]
) -> dict[tuple[str, str], Moved]:
    """What passes between parts, and its gradients, that a rank sends in one step, by (operation, part).

    mine  the parts of this rank; between neighbours on one rank nothing is sent
    cuts  what of one micro-batch passes from part i to part i+1: (elements, bytes of each) of every tensor,
          the hidden state and, behind layers whose router logits the loss needs, those
    """
    sent: dict[tuple[str, str], Moved] = {}
    for part in mine:
        for operation, cut, neighbour in (("send_forward", part, part + 1), ("send_backward", part - 1, part - 1)):
            if 0 <= cut < len(cuts) and neighbour not in mine:
                elements, size = (sum(each) for each in zip(*((n, n * width) for n, width in cuts[cut]), strict=True))
                moved = len(cuts[cut]), elements, size
                sent[operation, f"part {part}"] = Moved(*(micro_batches * figure for figure in moved))
    return sent


class Passage(NamedTuple):
    """Where activations of every micro-batch pass between a tp rank's own and common ones, under a module's name.

    forward, backward  all_reduce, all_gather, reduce_scatter, or "" where nothing is sent
    width              elements per token of the whole tensor
    least              bytes of an element where those of the compute dtype are fewer
    again              recomputation runs the forward a second time
    """

    name: str
    forward: str
    backward: str
    width: int
    least: int = 0
    again: bool = False


def tensor_traffic(
    passages: Iterable[Passage], tokens: int, micro_batches: int, n: int, width: int
) -> dict[tuple[str, str], Moved]:
    """What one of n tp ranks sends in so many micro-batches of `tokens` tokens in all, by (operation, module).

    width  bytes of the compute dtype
    Of Psi elements an all-gather or a reduce-scatter sends Psi (N-1)/N, an all-reduce twice that. A Llama's layer
    has four passages: q, k, v and gate, up all-reduce backward, o and down forward (Shoeybi et al. 2019, section 3).
    """
    moved: dict[tuple[str, str], Moved] = {}
    for passage in passages:
        for op, times in ((passage.forward, 1 + passage.again), (passage.backward, 1)):
            if op:
                hops = (2 if op == "all_reduce" else 1) * (n - 1)
                elements = times * tokens * passage.width * hops // n
                size = max(width, passage.least)
                calls, before, sent = moved.get((op, passage.name), (0, 0, 0))
                moved[op, passage.name] = Moved(
                    calls + times * micro_batches, before + elements, sent + elements * size
                )
    return moved
