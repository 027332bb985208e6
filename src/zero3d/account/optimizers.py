"""Bytes of optimizer states: which states an optimizer has, how wide each is. No torch.

stored of a master beside its weight   4 (fp32), 2 (the remainder of one in halves), 0 where the weight is the master
state                                  4, or 8 under fp64; 2 rounded to bf16; 1 and a scale for a block in 8 bits

Which states an optimizer has, and of which parameters, says its row (spec/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from fractions import Fraction
from typing import NamedTuple

from zero3d.blueprint.layout import ALIGN
from zero3d.blueprint.state_spans import Has, Span
from zero3d.spec.optimizer import ALL, MATRICES, OPTIMIZERS, REST

BF16 = 2
CODE = 1 + Fraction(4, ALIGN)  # bytes of a state in 8 bits: a code, and its part of a block's fp32 scale


def state_width(wide: int, moments: str) -> int:
    """Return the bytes of an element of a state. moments: bf16 where it is rounded to that, off the device."""
    return BF16 if moments == "bf16" else wide


def states_by_slot(optimizer: str, matrices: Collection[int]) -> dict[str, Has]:
    """Return the states of an optimizer by name, each with the slots of a unit that have it.

    matrices  numbers of the slots that are matrices
    """
    has = {ALL: lambda slot: True, MATRICES: lambda slot: slot in matrices, REST: lambda slot: slot not in matrices}
    return {name: has[of] for name, of in OPTIMIZERS[optimizer].states.items()}


def states_of(optimizer: str, matrix: bool) -> int:
    """Return how many states an optimizer keeps of a parameter. matrix: whether it is a block's matrix."""
    return sum(of in (ALL, MATRICES if matrix else REST) for of in OPTIMIZERS[optimizer].states.values())


class OptimizerBytes(NamedTuple):
    """Bytes of a unit's masters and optimizer states on one rank, padding among them.

    rate           per parameter, of the states that all elements have
    used, padding  of states that some of its parameters have alone
    """

    rate: Fraction | int
    used: Fraction | int = 0
    padding: Fraction | int = 0

    @classmethod
    def of(cls, master: int, states: Iterable[tuple[Span, Fraction | int]], elements: int) -> OptimizerBytes:
        """Sum up masters, `master` bytes an element, and states, each with its span and width, of a unit's elements."""
        rate: Fraction | int = master
        used: Fraction | int = 0
        padding: Fraction | int = 0
        for span, width in states:
            if span.stop - span.start == elements:
                rate += width
            else:
                used += span.used * width
                padding += (span.stop - span.start - span.used) * width
        return cls(rate, used, padding)
