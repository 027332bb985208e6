"""Recomputing activations, as arithmetic: kept inputs, interiors alive at the peak, extra compute. No torch.

    policy      kept inputs   whole interiors   attention interiors   extra forward, of a step's compute
    ----------  ------------  ----------------  --------------------  ----------------------------------
    none        0             L                 L                     0
    selective   L             L                 1                     1/3 of attention's share
    every:K     ceil(L/K)     min(K, L)         min(K, L)             1/3
    full        L             1                 1                     1/3

L blocks. An *input* is the tensor a block is called with, an *interior* all that its backward needs.
One third: a backward costs two forwards, so a step is 1 + 2 = 3 and one more forward makes it 4/3 of
that; every block is recomputed once, whatever K. Figures are of the blocks: embedding and head are
never recomputed.

Square root: every:K keeps L/K inputs, and K interiors while a segment is recomputed. If an interior
is worth r inputs, L/K + r K is least at K = sqrt(L/r); with r = 1, K = sqrt(L) and 2 sqrt(L) of L
tensors are kept.

Sources: Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), section 4; Korthikanti
et al., "Reducing Activation Recomputation in Large Transformer Models" (2022), section 5.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from zero3d.errors import ConfigError

KINDS = ("none", "full", "every:K", "selective")
EXTRA_FORWARD = Fraction(1, 3)  # forward 1 + backward 2


@dataclass(frozen=True)
class Policy:
    """A parsed `activations` value. every: blocks per segment (full is every:1), None where there are no segments."""

    kind: str
    every: int | None = None

    @classmethod
    def of(cls, text: str) -> Policy:
        """Parse none, full, selective or every:K with K >= 1. Raises ConfigError for the rest, with the nearest."""
        word, colon, number = str(text).partition(":")
        if word == "every" and number.isdecimal() and int(number) > 0:
            return cls("every", int(number))
        if word in ("none", "full", "selective") and not colon:
            return cls(word, 1 if word == "full" else None)
        if word == "every":
            raise ConfigError(f"activations={text!r}: K in every:K is a whole number from 1, such as every:4.")
        near = difflib.get_close_matches(word, KINDS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"activations={text!r} is unknown: pass one of {', '.join(KINDS)}.{hint}")


class Arithmetic(NamedTuple):
    """The tensors that a policy keeps between forward and backward, and the compute that it adds.

    kept_inputs    tensors the size of a block's input
    interiors      interiors alive at the peak, attention's part left out
    attentions     attention interiors alive at the peak
    extra_forward  as a fraction of a step's compute; None if it hangs on attention's unknown share
    """

    kept_inputs: int
    interiors: int
    attentions: int
    extra_forward: Fraction | None


def recompute_arithmetic(layers: int, policy: str, attention: Fraction | None = None) -> Arithmetic:
    """Return the row of the table for `layers` blocks. attention: its share of a block's forward compute, 0 to 1."""
    parsed = Policy.of(policy)
    if parsed.kind == "none":
        return Arithmetic(0, layers, layers, Fraction(0))
    if parsed.kind == "selective":
        return Arithmetic(layers, layers, min(1, layers), None if attention is None else attention * EXTRA_FORWARD)
    every = parsed.every or 1
    alive = min(every, layers)
    return Arithmetic(-(-layers // every), alive, alive, EXTRA_FORWARD)


def best_segment(layers: int, interior: float = 1.0) -> int:
    """Return the smallest K with the least ceil(L/K) + interior x K, near sqrt(L / interior).

    interior   of a block, in block inputs
    """
    return min(range(1, max(1, layers) + 1), key=lambda every: -(-layers // every) + interior * every)
