"""Bytes of optimizer states: what is stored of a master, which states an optimizer has, how wide each is. No torch.

stored of a master beside its weight   4 (fp32), 2 (the remainder of one in halves), 0 where the weight is the master
state                                  4, or 8 under fp64; 2 rounded to bf16; 1 and a scale for a block in 8 bits

Which states an optimizer has, and of which parameters, says its row (spec/optimizer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple, TypeVar

from zero3d.blueprint.layout import ALIGN, Piece
from zero3d.blueprint.state_spans import Span, span_of
from zero3d.spec.optimizer import ALL, MATRICES, OPTIMIZERS, REST

T = TypeVar("T")
BF16 = 2
REMAINDER = 2  # bytes of a split master beside its bf16 weight
CODE = 1 + Fraction(4, ALIGN)  # bytes of a state in 8 bits: a code, and its part of a block's fp32 scale


def master_width(weight: int, wide: int, splits: bool) -> int:
    """Return the bytes per parameter that are stored of masters beside weights of `weight` bytes.

    wide    bytes of a master
    splits  masters are kept as bf16 weights and remainders
    """
    return 0 if weight == wide else REMAINDER if splits else wide


def state_width(wide: int, moments: str) -> int:
    """Return the bytes of an element of a state. moments: bf16 where it is rounded to that, off the device."""
    return BF16 if moments == "bf16" else wide


def state_spans(
    optimizer: str, pieces: Sequence[Piece], matrices: Collection[int], elements: int, used: Fraction | int
) -> list[Span]:
    """Return the span of each optimizer state among the elements of a unit that a rank updates, empty ones left out.

    pieces    of parameters, among so many elements
    matrices  numbers of the slots that are matrices
    used      parameters that all elements stand for
    """
    has = {ALL: lambda slot: True, MATRICES: lambda slot: slot in matrices, REST: lambda slot: slot not in matrices}
    spans = (span_of(pieces, has[of], elements, used) for of in OPTIMIZERS[optimizer].states.values())
    return [span for span in spans if span is not None]


def segments(optimizer: str, spans: Sequence[Span], elements: int) -> list[tuple[int, int]]:
    """Cut what a rank updates of a unit where its states differ: (elements, states) of each; padding has room for all.

    >>> segments("muon", [Span(4, 16, 12), Span(0, 4, 4), Span(0, 4, 4)], 16)
    [(4, 2), (12, 1)]
    """
    if not spans:
        return [(elements, len(OPTIMIZERS[optimizer].states))]
    return [(stop - start, len(those)) for start, stop, those in cut_by_states(dict(enumerate(spans)), elements)]


def cut_by_states(spans: Mapping[T, Span], elements: int) -> list[tuple[int, int, list[T]]]:
    """Cut elements where the states that they have differ: start, stop and states of each range."""
    cuts = sorted({0, elements, *(cut for span in spans.values() for cut in (span.start, span.stop))})
    return [
        (start, stop, [state for state, span in spans.items() if span.start <= start < span.stop])
        for start, stop in pairwise(cuts)
    ]


def states_of(optimizer: str, matrix: bool) -> int:
    """Return how many states an optimizer keeps of a parameter. matrix: whether it is a block's matrix."""
    return sum(of in (ALL, MATRICES if matrix else REST) for of in OPTIMIZERS[optimizer].states.values())


class OptimizerBytes(NamedTuple):
    """Bytes of a unit's masters and optimizer states on one rank, padding among them.

    rate           per parameter, of what all elements have
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
