"""Chooses how the ranks of an sp group share recurrences: by heads, or by states that pass between them. No torch.

    heads    rows of what is scanned go to the ranks of its heads, and come back    bytes grow with the sequence
    prefix   states pass from rank to rank    bytes do not grow, but a delta rule scans three times, Mamba 2 twice

A rank takes as long for the scans more as its link takes for so many bytes. What comes to fewer bytes then is chosen.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from zero3d.sequence.shares import Scanned
from zero3d.spec.mesh import HEADS, PREFIX
from zero3d.spec.sizes import decimal

# Operations of scans that a rank computes while its link takes one byte: few, as of cores that share a memory, where
# scans more take longest beside what is sent (benchmarks/hybrid_sequence.py). Cards have several times as many inside a
# node, and more between nodes. One number for all machines, for the bits of the two ways differ; plans have their own.
BALANCE = 100.0


class Weighed(NamedTuple):
    """Has what the two ways come to for one sequence, in a layer of each kind, forward and backward.

    heads   bytes that a rank sends by heads; None where there are fewer heads than ranks
    states  bytes that it sends of states
    again   bytes that its link takes in the time of the scans more
    scans   of a layer by states, at most
    """

    heads: int | None
    states: int
    again: float
    scans: int

    @property
    def kind(self) -> str:
        """Return the way that takes less."""
        return PREFIX if self.heads is None or self.states + self.again < self.heads else HEADS

    def __str__(self) -> str:
        by_states = f"states send {decimal(self.states)} and scan {self.scans} times"
        if self.heads is None:
            return f"there are more ranks than heads; {by_states}"
        more = f"scans more take as long as {decimal(round(self.again))} on the link"
        return f"heads send {decimal(self.heads)} of a sequence in one scan; {by_states}, and {more}"


def weigh(scans: Iterable[Scanned], ranks: int, balance: float = BALANCE) -> Weighed | None:
    """Weigh the ways for these scans, one of a layer; None where none has states that could pass.

    balance  operations that a rank computes while its link takes a byte
    """
    found = [scan for scan in scans if scan.passes]
    if not found:
        return None
    by_heads = [scan.sent(0, ranks, backward).bytes for scan in found for backward in (False, True)]
    by_states = [scan.states.sent(0, ranks, backward).bytes for scan in found for backward in (False, True)]
    again = sum((scan.scans - 1) * scan.operations * scan.scanned(ranks) for scan in found) / balance
    heads = None if min(scan.heads for scan in found) < ranks else sum(by_heads)
    return Weighed(heads, sum(by_states), again, max(scan.scans for scan in found))


# --- what a scan computes ---------------------------------------------------------------------------------------------


def delta_products(chunk: int, key: int, value: int, by_channel: bool = False) -> tuple[int, int]:
    """Return the operations of a delta rule for a chunk and head, forward and backward (tools/plan/mixers.py).

    by_channel  gates are of channels, not of heads
    """
    squares = 2 * chunk * chunk
    forward = squares * (3 * key + 2 * value) + 6 * chunk * key * value + chunk**3 // 3
    backward = squares * ((7 if by_channel else 10) * key + 5 * value) + 16 * chunk * key * value + 4 * chunk**3
    return forward, backward


def mamba2_products(chunk: int, width: int, state: int) -> tuple[int, int]:
    """Return the operations of Mamba 2 for a chunk and head, without those of groups, forward and backward."""
    squares = 2 * chunk * chunk
    return squares * width + 4 * chunk * width * state, 3 * squares * width + 10 * chunk * width * state
