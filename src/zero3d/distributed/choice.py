"""Chooses an axis' algorithm by rule alone: a timing probe could choose otherwise when a run is resumed.

    pairwise    messages between every two ranks, summed in rank order: on gloo up to 8 ranks. Gloo's own reduce-scatter
                is a clone and an all-reduce
    all-to-all  native, except that terms of 16-bit gradients are sent to their owner and summed there in rank order: on
                NCCL and its like, over the axis that reduces gradients, where no more bytes go between hosts
    native      torch.distributed's collectives: elsewhere
    fake        native ones without peers: in a dry run

All-to-all or native can be asked for by name for gradients (zero.reduce_scatter).

Between hosts, of N ranks that have n elements each to own, L of them on each of several hosts, a host sends

    16-bit terms                 2 bytes x L x (N - L) n        nothing is added up on the way
    fp32 sums, a ring            4 bytes x (N - 1) n            one term per element leaves it

so terms are at most as many bytes with one or two ranks of the axis on a host, and about L/2 times as many with more.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

NATIVE, PAIRWISE, ALL_TO_ALL, FAKE = "native", "pairwise", "all-to-all", "fake"
REDUCTIONS = ("auto", NATIVE, ALL_TO_ALL)
PAIRWISE_MAX_RANKS = 8
FP32 = 4  # bytes of a sum
FEW = 2  # ranks of an axis on a host whose terms are no more bytes than fp32 sums


def choose_algorithm(backend: str, size: int, reduce_scatter: str = "", on_host: int | None = None) -> str:
    """Return the name of an axis' algorithm, by backend, number of ranks, reduction of gradients and hosts.

    reduce_scatter  one of REDUCTIONS; empty for an axis over which no gradients are reduced
    on_host         the most ranks of the axis on a host; None if unknown, which counts as one host
    """
    if backend == "fake":
        return FAKE
    if reduce_scatter in (NATIVE, ALL_TO_ALL) and size > 1:
        return reduce_scatter
    if backend == "gloo":
        return PAIRWISE if size <= PAIRWISE_MAX_RANKS else NATIVE
    few = on_host is None or on_host >= size or on_host <= FEW
    return ALL_TO_ALL if reduce_scatter == "auto" and size > 1 and few else NATIVE


class Width(Protocol):
    """Has the bytes of an element, as dtypes have."""

    @property
    def itemsize(self) -> int: ...


Kind = TypeVar("Kind", bound=Width)


def travels(algorithm: str, kept: Kind, made: Kind, wire: Kind) -> Kind:
    """Return the dtype in which values that are to be reduced in `wire` reach their owner.

    kept  dtype of the buffer that they are in
    made  dtype that holds each of them without rounding

    Native sums are rounded on the way, to `wire`. Terms are not: they travel in the narrower dtype; pairwise ones as
    they are kept, others as they were made, however wide they are kept.
    """
    if algorithm in (NATIVE, FAKE):
        return wire
    asked = kept if algorithm == PAIRWISE else made
    return asked if asked.itemsize < wire.itemsize else wire


def sends_terms(algorithm: str, itemsize: int) -> bool:
    """Return whether values of so many bytes arrive as every rank's terms, which their owner adds up."""
    return algorithm == PAIRWISE or (algorithm == ALL_TO_ALL and itemsize < FP32)
