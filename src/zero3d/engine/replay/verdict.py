"""Pairs ranks that compute each other's micro-batch, and finds the one at fault. Ranks are numbers on the dp axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from enum import Enum, auto
from typing import NamedTuple


def partner_of(rank: int, n: int, turn: int) -> int:
    """Return the neighbour with which a rank trades micro-batches; the rank itself where one is left over.

    turn  0: ranks 0 and 1, 2 and 3, ...; 1: ranks 1 and 2, 3 and 4, ... and, if n is even, the last and the first; and
          so on in turns
    """
    first = turn % 2
    position = (rank - first) % n
    if position == n - 1 and n % 2:
        return rank
    return ((position ^ 1) + first) % n


def third_of(owner: int, partner: int, n: int) -> int | None:
    """Return the rank that decides between two others; None where there is none."""
    return next((rank for rank in range(n) if rank not in (owner, partner)), None)


class Reason(Enum):
    """Why a rank is accused."""

    CHANGED = auto()  # two results of its own differ
    OUTVOTED = auto()  # two others agree, and not with it
    OPEN = auto()  # as many say the one as the other


class Verdict(NamedTuple):
    """Names the ranks that are wrong, or one of which is."""

    ranks: Sequence[int]
    reason: Reason


def judge(first: Mapping[int, Hashable], again: Mapping[int, Hashable]) -> Verdict:
    """Find the ranks at fault, from results of one micro-batch by rank: the ones that differed, and a further try's."""
    changed = [rank for rank in first if again.get(rank, first[rank]) != first[rank]]
    if changed:
        return Verdict(changed, Reason.CHANGED)
    (result, votes), *_ = Counter(again.values()).most_common(1)
    outvoted = [rank for rank in again if again[rank] != result]
    if outvoted and votes > len(again) / 2:
        return Verdict(outvoted, Reason.OUTVOTED)
    return Verdict(sorted(first), Reason.OPEN)
