"""How far a plan's memory may be off, what a device must have beyond it, and what would no longer fit. No torch.

    low                  planned                high        the card
    |--------------------|----------------------|--- left ---|
    planned x (1 - m)                  planned x (1 + m)

A plan fits where `high` does. m is of the kind of run: of nine in ten published runs of this kind (of all, where they
are few), predicted by constants that saw none of their source, memory is at most m above the plan (constants.py). A
caller may say another m.

    full     all is trained
    lora     little is trained beside frozen weights in 16 bits
    qlora    the same, frozen weights in fewer bits
    offload  states or kept inputs are off the device, whatever is trained
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from math import lcm
from typing import NamedTuple

from zero3d.spec.offload import AUTO
from zero3d.tools.plan.constants import constant, source_of
from zero3d.tools.plan.spec import ClusterSpec, Evaluate, ModelSpec, ParallelPlan

KINDS = ("full", "lora", "qlora", "offload")
MARGIN = constant("plan", "margin full")
LITTLE = 0.5  # of parameters: a model of which less is trained is adapted
GRAIN, PARTS = 256, 16  # tokens, and the part of a sequence, to which the longest one is found
MOST = 64  # times a plan's sequence or micro-batch, up to which is looked


class Range(NamedTuple):
    """Bytes from the lucky to the unlucky."""

    low: float
    mid: float
    high: float

    @classmethod
    def of(cls, nbytes: float, margin: float) -> Range:
        """Return the range around planned bytes."""
        return cls((1 - margin) * nbytes, nbytes, (1 + margin) * nbytes)


class Margin(NamedTuple):
    """What a kind of run must have beyond its planned bytes, as a share of these, and where that is from."""

    share: float
    kind: str
    origin: str


@cache
def margin_of_kind(kind: str) -> Margin:
    """Return the margin of a kind of run, one of KINDS."""
    return Margin(constant("plan", f"margin {kind}"), kind, source_of("plan", f"margin {kind}"))


def margin_for(asked: float | None, model: ModelSpec, plan: ParallelPlan) -> Margin:
    """Return the margin of a plan: as a caller says, else that of its kind of run."""
    kind = kind_of(model, plan)
    if asked is not None:
        return Margin(asked, kind, "as --margin says")
    known = margin_of_kind(kind)
    return known._replace(origin=f"{known.origin} (--margin)")


def kind_of(model: ModelSpec, plan: ParallelPlan) -> str:
    """Return the kind of a run, one of KINDS."""
    if plan.offload.states or plan.offload.activations_leave:
        return "offload"
    if model.trainable >= LITTLE * model.weights:
        return "full"
    return "qlora" if model.weights > model.params else "lora"


def usable(room: float, margin: float = MARGIN) -> float:
    """Return the most bytes that may be planned for so many, so that they fit with the margin."""
    return room / (1 + margin)


class Ends(NamedTuple):
    """What still fits: the longest sequence and the largest micro-batch. None: no end was found, or none is known."""

    length: int | None
    micro_batch: int | None


def ends(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, limit: float, evaluate: Evaluate) -> Ends:
    """Find what would end a plan that fits. limit: bytes of a device that may be planned.

    Lengths are multiples of a sixteenth of the model's, or of 256 tokens. Where attention keeps its scores, whose
    bytes grow with the square of the length, no length is told. A plan that leaves tiles of the loss to the run may
    have them sooner (train.tiled_loss=true): what fits with them fits.
    """
    tiled = plan.tiled_loss == AUTO and plan.tp == 1 and model.tiles
    plans = (plan, plan.replace(tiled_loss=True)) if tiled else (plan,)

    def fits(length: int, micro_batch: int) -> bool:
        longer = model if length == model.length else replace(model, length=length)
        memories = (evaluate(longer, cluster, each.replace(micro_batch=micro_batch)).memory for each in plans)
        return any(memory.device <= limit and not memory.lacks(cluster) for memory in memories)

    step = lcm(max(GRAIN, model.length // PARTS // GRAIN * GRAIN), plan.tp * plan.sp)
    eager = any(part.operations.eager for part in model.blocks)
    longest = (
        None if eager else _last(lambda more: fits(model.length + more * step, plan.micro_batch), model.length // step)
    )
    largest = _last(lambda more: fits(model.length, plan.micro_batch + more), plan.micro_batch)
    return Ends(
        None if longest is None else model.length + longest * step,
        None if largest is None else plan.micro_batch + largest,
    )


def _last(fits: Callable[[int], bool], unit: int) -> int | None:
    """Return the last number from 0 on that fits, by doubling and halving; None if all up to MOST units do."""
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
        if high > MOST * max(1, unit):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
