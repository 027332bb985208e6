"""Bytes of model states on one rank: the engine's report, auto-offload and the planner all read them here. No torch.

Per trainable parameter, of four widths in bytes:

    w   compute weight       2 in bf16 and fp16, 4 in fp32, 8 in fp64
    a   reduced gradient     max(4, w)
    g   local gradient       w with one micro-batch a step, for its cast at the reduction is exact; else a
    k   optimizer            the part of a master stored beside its weight, and the optimizer's states

    stage           parameters   gradients                optimizer
    0               w            a                        k
    1               w            g + (a if g < a)/N       k/N
    2               w            a/N                      k/N
    3               w/N          a/N                      k/N

With `reduce: every_step` stages 2 and 3 have stage 1's gradients, with `release: every_step` stage 3 has stage 2's
parameters, with `weights: cast` none beside wider masters. A frozen parameter has a weight only. A second shard of
gathered weights (zero.second_shard) is w/RANKS more of parameters at stage 3, in blocks of 8 bits (1 + 4/256)/RANKS. An
element of padding costs what a parameter does. Gradients on the device are there from their first use in a step to the
unit's update: none at rest, all of them at the end of a step's last backward. With Adam in bf16 stage 3 has w + k = 14
bytes a parameter over N at rest, 12 with `weights: cast`, and a = 4 more at the end of that backward. The paper, with
gradients of 16 bits, has 14 and 16.
Source of the paper's figures: Rajbhandari et al., "ZeRO" (2020), section 5 and figure 1.
"""

from __future__ import annotations

from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

from zero3d.account.optimizers import OptimizerBytes
from zero3d.blueprint.layout import UnitLayout
from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.stages import stage_row
from zero3d.blueprint.unit import GradientPlan, Kind, UnitPlan, decide
from zero3d.distributed.block_bytes import BLOCK, CODE_BITS, block_bytes
from zero3d.spec.sections import Spec
from zero3d.spec.zero import Zero

FP32 = 4


class StateBytes(NamedTuple):
    """Bytes of model states on one rank (exact fractions: a shard of Psi/N need not be whole)."""

    parameters: Fraction
    gradients: Fraction
    optimizer: Fraction

    @property
    def total(self) -> Fraction:
        return self.parameters + self.gradients + self.optimizer

    @property
    def at_rest(self) -> Fraction:
        """Return what is there between two steps, and until the first gradients of one come."""
        return self.parameters + self.optimizer

    def times(self, params: int) -> StateBytes:
        """Scale bytes per parameter to `params` parameters."""
        return StateBytes(self.parameters * params, self.gradients * params, self.optimizer * params)

    def __add__(self, other: object) -> StateBytes:
        assert isinstance(other, StateBytes)
        return StateBytes(*(a + b for a, b in zip(self, other, strict=True)))


NO_BYTES = StateBytes(Fraction(0), Fraction(0), Fraction(0))


class Held(NamedTuple):
    """Bytes of one rank at one place: of parameters' states, and of the padding of their storages."""

    states: StateBytes
    padding: Fraction

    def times(self, count: int) -> Held:
        """Return the bytes of `count` such units."""
        return Held(self.states.times(count), self.padding * count)

    @property
    def total(self) -> Fraction:
        """Return all that is held there when gradients are."""
        return self.states.total + self.padding

    @property
    def by_category(self) -> dict[str, Fraction]:
        """Return the bytes by the arena's names of categories."""
        return {**self.states._asdict(), "padding": self.padding}

    def __add__(self, other: object) -> Held:
        assert isinstance(other, Held)
        return Held(self.states + other.states, self.padding + other.padding)


NOTHING = Held(NO_BYTES, Fraction(0))


@lru_cache(maxsize=4096)
def per_parameter(unit: UnitPlan, optimizer: Fraction | int) -> StateBytes:
    """Return the bytes per parameter, and per element of padding, that a rank's device holds of a unit.

    optimizer  k of the table
    """
    policy, row, width = unit.policy, unit.row, unit.kind.dtype.itemsize
    share = Fraction(1, unit.cut.size)
    held = NO_BYTES
    if not policy.params and not unit.from_masters:
        held = held._replace(parameters=width * (Fraction(1) if unit.whole else share))
    if unit.gradients is not None:
        held = held._replace(gradients=_gradient_rate(unit, unit.gradients, reduced=True))
        held = held._replace(optimizer=optimizer * (share if row.shards_optimizer else Fraction(1)))
    return held._replace(parameters=held.parameters + second_shard_bytes(width, unit.coded, unit.node))


def second_shard_bytes(weight: int, coded: bool, node: int) -> Fraction:
    """Return the bytes per parameter that a rank keeps of gathered weights, of `weight` bytes each or in blocks.

    node  neighbours who keep them together; 1: nobody keeps any
    """
    if node == 1:
        return Fraction(0)
    return (Fraction(block_bytes(CODE_BITS), BLOCK) if coded else Fraction(weight)) / node


def _gradient_rate(unit: UnitPlan, plan: GradientPlan, reduced: bool) -> Fraction:
    """Return the bytes of gradients per parameter. reduced: the unit's reduction has begun, its shard has memory."""
    if unit.policy.gradients:
        return Fraction(0)
    whole, sharded = _gradient_widths(plan, unit.policy.master.itemsize)
    return Fraction(unit.sources * whole) + Fraction(sharded * reduced, unit.cut.size)


def _gradient_widths(plan: GradientPlan, master: int) -> tuple[int, int]:
    """Return bytes per parameter of a rank's gradients: kept whole, and kept in a shard."""
    if plan.counters:
        return (0, plan.counters * master) if plan.shard else (plan.counters * master, 0)
    return plan.local.itemsize if plan.kept else 0, master if plan.shard else 0


class GradientBytes(NamedTuple):
    """Bytes of gradients that come and go with a step: of parameters, and of the padding of their storages."""

    gradients: float
    padding: float

    def __add__(self, other: object) -> GradientBytes:
        assert isinstance(other, GradientBytes)
        return GradientBytes(self.gradients + other.gradients, self.padding + other.padding)


@lru_cache(maxsize=4096)
def _gradients_per_parameter(unit: UnitPlan, reduced: bool) -> Fraction:
    return Fraction(0) if unit.gradients is None else _gradient_rate(unit, unit.gradients, reduced)


def gradient_bytes(unit: UnitPlan, layout: UnitLayout, reduced: bool = True) -> GradientBytes:
    """Return what a rank's device holds of a unit's gradients, from their first use in a step to the unit's update.

    reduced  the unit's reduction has begun: what it comes to has memory, too
    """
    rate = _gradients_per_parameter(unit, reduced)
    return GradientBytes(*(rate.numerator * many / rate.denominator for many in (layout.numel, layout.padding)))


def unit_bytes(unit: UnitPlan, layout: UnitLayout, optimizer: OptimizerBytes) -> Held:
    """Return the bytes that a rank's device holds of a unit with this layout."""
    rate = per_parameter(unit, optimizer.rate)
    states = rate.times(layout.numel)
    states = states._replace(optimizer=states.optimizer + optimizer.used)
    return Held(states, rate.total * layout.padding + optimizer.padding)


# --- by the settings of a run alone -------------------------------------------------------------


def paper_bytes(stage: int, params: int, n: int, k: int = 12) -> StateBytes:
    """Return bytes per rank by the ZeRO paper (section 5, figure 1): (2 + 2 + K) Psi with shards of 1/N."""
    row = stage_row(stage)
    share = Fraction(1, n)
    return StateBytes(
        2 * params * (share if row.shards_parameters else Fraction(1)),
        2 * params * (share if row.shards_gradients else Fraction(1)),
        k * params * (share if row.shards_optimizer else Fraction(1)),
    )


def engine_bytes(
    stage: int,
    n: int,
    precision: str = "bf16",
    accumulate: int = 1,
    optimizer: Fraction | int | None = None,
    **zero: Any,
) -> StateBytes:
    """Return bytes per *trainable* parameter that the arena really holds on one rank, padding apart.

    optimizer  k, where it is not that of Adam with fp32 masters
    zero       other keys of the section
    """
    policy = Policy.of(Spec(Zero(stage, **zero), precision=precision, accumulate=accumulate))
    unit = decide(Kind(policy.compute), policy, Ranks(Group(n)))
    adam = policy.stored(policy.compute.itemsize) + 2 * policy.master.itemsize
    return per_parameter(unit, adam if optimizer is None else optimizer)
