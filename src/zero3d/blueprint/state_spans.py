"""Where the elements of a unit that have a state lie on a rank, where not all have it. Pure integers, no torch.

    what a rank updates    | norms, biases |       matrices        | padding |
    exp_avg, exp_avg_sq    |<- AdamW's  -->|
    momentum_buffer                        |<------- Muon's ---------------->|

Slots of one group follow one another, so that a state's elements do. Where they do not, as with experts that are laid
out one by one with their biases, all elements have room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

from zero3d.blueprint.layout import Piece


class Span(NamedTuple):
    """A range of what a rank updates, and the parameters that it stands for in formulas."""

    start: int
    stop: int
    used: Fraction | int


def span_of(pieces: Sequence[Piece], has: Callable[[int], bool], elements: int, used: Fraction | int) -> Span | None:
    """Return the span of a state; None where no parameter has it.

    pieces    of parameters, among so many elements
    has       whether the slot of this number has the state
    used      parameters that all elements stand for
    """
    own = [piece.offset for piece in pieces if has(piece.slot)]
    others = [piece.offset for piece in pieces if not has(piece.slot)]
    if not own:
        return None
    if others and max(own) < min(others):
        return Span(0, min(others), _numel(pieces, has))
    if others and max(others) < min(own):
        return Span(min(own), elements, used - _numel(pieces, lambda slot: not has(slot)))
    return Span(0, elements, used)


def _numel(pieces: Sequence[Piece], of: Callable[[int], bool]) -> int:
    return sum(piece.stop - piece.start for piece in pieces if of(piece.slot))
