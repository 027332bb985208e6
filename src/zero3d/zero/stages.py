"""The stage table, and every byte that follows from it. Pure arithmetic, no torch.

    stage | optimizer | gradients | parameters | gradients are reduced | elements per rank and step, in Psi (N-1)/N
    ------+-----------+-----------+------------+-----------------------+-------------------------------------------
      0   |           |           |            | once per step         | reduce-scatter 1 + all-gather 1 of gradients
      1   |  sharded  |           |            | once per step         | reduce-scatter 1 + all-gather 1 of parameters
      2   |  sharded  |  sharded  |            | every micro-batch     | reduce-scatter M + all-gather 1
      3   |  sharded  |  sharded  |  sharded   | every micro-batch     | reduce-scatter M + all-gather up to 2M

Psi parameters, N data-parallel degree, M micro-batches per step, K optimizer bytes per parameter. Stages give the same
bits where gradients are reduced at the same moments: M = 1, or one `reduce` for all. A sum over ranks, then over
micro-batches, is rounded in another order than one over micro-batches, then over ranks.
Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
Models" (2020), section 5 (memory); the elements moved are zero/traffic.py's.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import NamedTuple

from zero3d.errors import ConfigError
from zero3d.spec.rules import Spec, check
from zero3d.spec.zero import Zero


@dataclass(frozen=True)
class Stage:
    """One row of the table."""

    number: int
    shards_optimizer: bool
    shards_gradients: bool
    shards_parameters: bool


STAGES = (
    Stage(0, False, False, False),
    Stage(1, True, False, False),
    Stage(2, True, True, False),
    Stage(3, True, True, True),
)

WINDOW = 2  # gathers that run ahead of their use, and reductions in flight: both cost a unit's memory


def stage_row(number: int) -> Stage:
    """Return the row of the table. Raises ConfigError, which names the choices."""
    if type(number) is not int or number not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO stage {number!r} does not exist: pass stage=0, 1, 2 or 3.")
    return STAGES[number]


@cache
def resolve_policies(stage: Stage, release: str, reduce: str) -> tuple[str, str]:
    """Replace "auto" and refuse what a stage cannot do.

    release  when gathered parameters are given back (stage 3): after every_use | every_step
    reduce   when gradients are reduced: after every_micro_batch (stages 2, 3) | every_step
    """
    check(Spec(Zero(stage.number, release=release, reduce=reduce)))
    if reduce == "auto":
        reduce = "every_micro_batch" if stage.shards_gradients else "every_step"
    return ("every_use" if release == "auto" else release), reduce


@cache
def splits_master(master: str, precision: str) -> bool:
    """Return whether masters are kept as bf16 weights and 16-bit remainders. Raises ConfigError."""
    check(Spec(Zero(master=master), precision=precision))
    return master == "split"


# --- bytes --------------------------------------------------------------------------------------


class StateBytes(NamedTuple):
    """Bytes of model states on one rank (exact fractions: a shard of Psi/N need not be whole)."""

    parameters: Fraction
    gradients: Fraction
    optimizer: Fraction

    @property
    def total(self) -> Fraction:
        return self.parameters + self.gradients + self.optimizer

    def times(self, params: int) -> StateBytes:
        """Scale bytes per parameter to `params` parameters."""
        return StateBytes(self.parameters * params, self.gradients * params, self.optimizer * params)

    def __add__(self, other: object) -> StateBytes:
        assert isinstance(other, StateBytes)
        return StateBytes(*(a + b for a, b in zip(self, other, strict=True)))


NO_BYTES = StateBytes(Fraction(0), Fraction(0), Fraction(0))


class Widths(NamedTuple):
    """Bytes per parameter: compute weight (w), reduced gradient (a), optimizer states (k)."""

    weight: int
    reduced: int
    optimizer: int


# In fp32 and fp64 the weight shard is the master, so k counts only m and v.
REMAINDER = 2  # of a split master, beside its bf16 weight: k is 10
WIDTHS = {"bf16": Widths(2, 4, 12), "fp16": Widths(2, 4, 12), "fp32": Widths(4, 4, 8), "fp64": Widths(8, 8, 16)}


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
    stage: int, n: int, precision: str = "bf16", release: str = "auto", reduce: str = "auto", accumulate: int = 1,
    optimizer: Fraction | int | None = None, exact: bool = False,
) -> StateBytes:  # fmt: skip
    """Return bytes per *trainable* parameter that the arena really holds on one rank, padding apart.

    `optimizer` replaces k for optimizers other than Adam and other masters (what is stored of those included).
    Local gradients stay in the compute dtype when accumulate is 1, because their cast at the
    reduction is exact; accumulated ones are kept in the reduced dtype. `exact` keeps sums of summands instead.
    """
    row = stage_row(stage)
    release, reduce = resolve_policies(row, release, reduce)
    w, _, usual = WIDTHS[precision]
    k = usual if optimizer is None else optimizer
    share = Fraction(1, n)
    parameters = frozen_bytes(stage, n, w, release).parameters
    whole, sharded = _gradient_bytes(stage, precision, reduce, accumulate, exact)
    return StateBytes(parameters, whole + sharded * share, k * (share if row.shards_optimizer else Fraction(1)))


def source_bytes(stage: int, precision: str, reduce: str, accumulate: int, exact: bool) -> Fraction:
    """Return bytes per parameter of experts that gradients of each rank whose tokens come take, behind the first's."""
    _, reduce = resolve_policies(stage_row(stage), "auto", reduce)
    return Fraction(_gradient_bytes(stage, precision, reduce, accumulate, exact)[0])


def _gradient_bytes(stage: int, precision: str, reduce: str, accumulate: int, exact: bool) -> tuple[int, int]:
    """Return bytes per parameter of the gradients that a rank keeps whole, and of those that it keeps a shard of."""
    w, a, _ = WIDTHS[precision]
    g = w if accumulate == 1 else a
    if exact:
        sums = counter_buffers(accumulate) * a
        alone = accumulate == 1 and stage > 0
        return (0, sums) if reduce == "every_micro_batch" or alone else (sums, 0)
    if stage == 0:
        return a, 0
    return (g, a if g < a else 0) if reduce == "every_step" else (0, a)


def counter_buffers(summands: int) -> int:
    """Return how many sums wait for their other half while so many summands come in turn: a binary counter's ones."""
    return (summands + 1).bit_length() - 1


def frozen_bytes(stage: int, n: int, weight: int, release: str = "auto") -> StateBytes:
    """Return bytes per *frozen* parameter: its weight, a shard at stage 3 unless kept gathered for a whole step."""
    sharded = stage_row(stage).shards_parameters and release != "every_step"
    return NO_BYTES._replace(parameters=Fraction(weight, n) if sharded else Fraction(weight))
