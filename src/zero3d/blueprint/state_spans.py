"""Finds which elements of a unit have an optimizer state on a rank, where not all of them do. Pure integers, no torch.

    what a rank updates    | norms, biases |       matrices        | padding |
    exp_avg, exp_avg_sq    |<- AdamW's  -->|
    momentum_buffer                        |<------- Muon's ---------------->|

Slots of one group follow one another, so that a state's elements do. Where they do not, as with experts that are laid
out one by one with their biases, all elements have room for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from zero3d.blueprint.layout import Piece, UnitLayout

Has = Callable[[int], bool]  # whether the slot of this number has a state


class Span(NamedTuple):
    """A range of a rank's updated elements, and the number of parameters that formulas count for it."""

    start: int
    stop: int
    used: Fraction | int


def span_of(pieces: Sequence[Piece], has: Has, elements: int, used: Fraction | int) -> Span | None:
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


class Updated(NamedTuple):
    """Describes a rank's updated part of a unit: so many elements of its storage, padding among them.

    used    parameters that formulas count for these
    pieces  parts of parameters among them; none in a shard of padding alone
    """

    elements: int
    used: Fraction | int
    pieces: Sequence[Piece]

    @classmethod
    def of(cls, layout: UnitLayout, rank: int | None) -> Updated:
        """Return the updated part of a unit. rank: among the ranks that it is cut over; None where each updates all."""
        if rank is None:
            return cls(layout.total, layout.numel, layout.whole_pieces())
        return cls(layout.shard, layout.used_per_shard, layout.pieces(rank))

    def spans(self, states: Mapping[str, Has]) -> dict[str, Span]:
        """Return the span of each state; states that no parameter has are left out."""
        spans = {name: span_of(self.pieces, has, self.elements, self.used) for name, has in states.items()}
        return {name: span for name, span in spans.items() if span is not None}

    def segments(self, states: Mapping[str, Has]) -> Segments:
        """Cut the elements where the states that they have differ; padding has room for all of them."""
        if not self.pieces:
            return [(0, self.elements, list(states))]
        spans = self.spans(states)
        cuts = sorted({0, self.elements, *(cut for span in spans.values() for cut in (span.start, span.stop))})
        return [
            (start, stop, [name for name, span in spans.items() if span.start <= start < span.stop])
            for start, stop in pairwise(cuts)
        ]


Segments = list[tuple[int, int, list[str]]]  # start, stop and names of states


def _numel(pieces: Sequence[Piece], of: Has) -> int:
    return sum(piece.stop - piece.start for piece in pieces if of(piece.slot))
