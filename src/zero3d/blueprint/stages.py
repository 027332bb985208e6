"""The stage table, and what it allows. Pure arithmetic, no torch.

    stage | optimizer | gradients | parameters | gradients are reduced | elements per rank and step, in Psi (N-1)/N
    ------+-----------+-----------+------------+-----------------------+-------------------------------------------
      0   |           |           |            | once per step         | reduce-scatter 1 + all-gather 1 of gradients
      1   |  sharded  |           |            | once per step         | reduce-scatter 1 + all-gather 1 of parameters
      2   |  sharded  |  sharded  |            | every micro-batch     | reduce-scatter M + all-gather 1
      3   |  sharded  |  sharded  |  sharded   | every micro-batch     | reduce-scatter M + all-gather up to 2M

Psi parameters, N data-parallel degree, M micro-batches per step, K optimizer bytes per parameter. Stages give the same
bits where gradients are reduced at the same moments: M = 1, or one `reduce` for all. A sum over ranks, then over
micro-batches, is rounded in another order than one over micro-batches, then over ranks. The bytes that follow are
account/states.py's, the elements moved account/traffic.py's.
Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from zero3d.errors import ConfigError
from zero3d.spec.rules import check
from zero3d.spec.sections import Spec
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


def stage_row(number: int) -> Stage:
    """Return the row of the table. Raises ConfigError, which names the choices."""
    if type(number) is not int or number not in (0, 1, 2, 3):
        raise ConfigError(f"ZeRO stage {number!r} does not exist: pass stage=0, 1, 2 or 3.")
    return STAGES[number]


@cache
def resolve_policies(stage: Stage, release: str, reduce: str, pp: int = 1) -> tuple[str, str]:
    """Replace "auto" and refuse what a stage cannot do.

    release  when gathered parameters are given back (stage 3): after every_use | every_step
    reduce   when gradients are reduced: after every_micro_batch (stages 2, 3) | every_step

    In a pipeline both are every_step: parameters stay gathered, and gradients are summed, for the whole schedule.
    """
    if pp > 1:
        release, reduce = ("every_step" if asked == "auto" else asked for asked in (release, reduce))
    check(Spec(Zero(stage.number, release=release, reduce=reduce)))
    if reduce == "auto":
        reduce = "every_micro_batch" if stage.shards_gradients else "every_step"
    return ("every_use" if release == "auto" else release), reduce


@cache
def splits_master(master: str, precision: str) -> bool:
    """Return whether masters are kept as bf16 weights and 16-bit remainders. Raises ConfigError."""
    check(Spec(Zero(master=master), precision=precision))
    return master == "split"


def counter_buffers(summands: int) -> int:
    """Return how many sums wait for their other half while so many summands come in turn: a binary counter's ones."""
    return (summands + 1).bit_length() - 1
