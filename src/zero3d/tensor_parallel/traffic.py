"""What a tp rank sends in a step, by formula, from the places where activations pass between ranks. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from zero3d.account.traffic import Moved

LOSS, FP32 = 2, 4  # numbers per token and rank; bytes of each, or 8 under fp64


class Region(NamedTuple):
    """Where activations of every micro-batch pass between tp ranks, under a module's name, and by which collectives.

    forward, backward  all_reduce, all_gather, reduce_scatter, or "" where nothing is sent
    width              elements per token of the whole tensor
    least              bytes of an element where those of the compute dtype are fewer
    again              recomputation runs the forward a second time
    fixed              elements that are sent along whatever the number of tokens: weights
    """

    name: str
    forward: str
    backward: str
    width: int
    least: int = 0
    again: bool = False
    fixed: int = 0


def loss_region(name: str, size: int) -> Region:
    """Return what a loss of local logits sends: two numbers per token to each of the other ranks (vocabulary.py)."""
    return Region(name, "all_gather", "", LOSS * size, FP32)


@dataclass(frozen=True)
class SharedGroups:
    """Has what is shared of a Mamba2 mixer where it has fewer groups than there are ranks (mixers.py).

    total    groups
    states   channels of B, and of C, for each
    filters  numbers of the convolution for each channel
    normed   its norm is over groups
    """

    total: int
    states: int
    filters: int
    normed: bool


def group_regions(name: str, groups: SharedGroups, size: int) -> Iterator[Region]:
    """Yield what a Mamba2 mixer sends beside inputs and outputs: nothing where ranks have whole groups."""
    if size > groups.total:
        width = 2 * groups.total * groups.states
        yield Region(f"{name}.in_proj", "all_gather", "reduce_scatter", width, fixed=width * groups.filters)
        if groups.normed:
            yield Region(f"{name}.norm", "all_reduce", "all_reduce", groups.total, FP32)


def partial_traffic(elements: int, n: int, width: int) -> Moved:
    """Return what an exchange of so many partial gradients, of `width` bytes each, sends to each of n - 1 tp ranks."""
    return Moved(1, elements * (n - 1), elements * (n - 1) * width)


def tensor_traffic(
    regions: Iterable[Region], tokens: int, micro_batches: int, n: int, width: int
) -> dict[tuple[str, str], Moved]:
    """Return what one of n tp ranks sends in so many micro-batches of `tokens` tokens in all, by (operation, module).

    width  bytes of the compute dtype
    Of Psi elements an all-gather or a reduce-scatter sends Psi (N-1)/N, an all-reduce twice that. A Llama's layer
    has four regions: q, k, v and gate, up all-reduce backward, o and down forward (Shoeybi et al. 2019, section 3).
    """
    moved: dict[tuple[str, str], Moved] = {}
    for region in regions:
        for op, times in ((region.forward, 1 + region.again), (region.backward, 1)):
            if op:
                hops = (2 if op == "all_reduce" else 1) * (n - 1)
                elements = times * (tokens * region.width + micro_batches * region.fixed) * hops // n
                size = max(width, region.least)
                calls, total, nbytes = moved.get((op, region.name), (0, 0, 0))
                moved[op, region.name] = Moved(
                    calls + times * micro_batches, total + elements, nbytes + elements * size
                )
    return moved
