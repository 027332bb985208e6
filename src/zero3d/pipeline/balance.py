"""Where to cut a chain of blocks into model chunks: balanced by bytes and FLOPs. No torch.

    before | block 0 ... | block k ... | ... block L-1 | after
    the first chunk has `before` (embedding), the last has `after` (norm, head, logits)

                FLOPs of a step              bytes at the peak
    ----------  ---------------------------  ----------------------------------------------
    embedding   0 (a look-up)                16 parameters
    tower       6 x parameters x patches     16 parameters
    block       6 x active x tokens          16 parameters + 34 x tokens x hidden
    head        6 x hidden x vocab x tokens  16 parameters + 10 x tokens x vocab

`active`: parameters a token meets, fewer than all with experts. The tower of a vision-language model is before the
blocks, and is counted with one image. The cost of a chunk is its share of
all FLOPs plus its share of all bytes, in whole numbers:

    cost = FLOPs x (all bytes) + bytes x (all FLOPs)

The cuts then depend on no device. Attention scores are left out: they are alike in all
blocks. ZeRO divides the 16 of every stage by the same degree, and is left out too.

Sources: Chowdhery et al., "PaLM" (2022), appendix B, for 6; Rajbhandari et al., "ZeRO" (2020),
section 3.1, for 16; Korthikanti et al. (2022), section 4.1, for 34.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from zero3d.errors import ConfigError

TOKENS = 2048  # of a micro-batch, where the split must not depend on the one that comes first
TRAINING_FLOPS = 6  # per parameter and token: 2 forward, 4 backward
STATE_BYTES = 16  # per parameter: weight 2, gradient 2, master, m and v 4 each
BLOCK_BYTES = 34  # per token and hidden element, kept for the backward
LOGIT_BYTES = 10  # per token and word: logits in bf16, their fp32 copy, its log-softmax


@dataclass(frozen=True)
class Weights:
    """Parameters of a block. active: parameters that one token meets, all if None."""

    parameters: int
    active: int | None = None

    @property
    def met(self) -> int:
        """Parameters that one token meets."""
        return self.parameters if self.active is None else self.active


class ChainCosts(NamedTuple):
    """Comparable costs of each block, of all modules before the first one, and of all after the last one."""

    before: int
    blocks: list[int]
    after: int


@dataclass(frozen=True)
class Tower:
    """What turns images into tokens: its parameters, and the patches that each of them meets in a micro-batch."""

    parameters: int = 0
    patches: int = 0


BLIND = Tower()  # of a model of text


def chain_costs(
    embedding: int, blocks: Sequence[Weights], head: int, tokens: int, hidden: int, vocab: int, tower: Tower = BLIND
) -> ChainCosts:
    """Return the costs of the table above for a micro-batch of `tokens`. embedding, head: parameters, a tower's too.

    A tied head counts all the same: the last pipeline stage holds a copy of its weight.
    """
    seeing = TRAINING_FLOPS * tower.parameters * tower.patches
    flops = [seeing, *(TRAINING_FLOPS * b.met * tokens for b in blocks), TRAINING_FLOPS * hidden * vocab * tokens]
    states = [STATE_BYTES * n for n in (embedding, *(b.parameters for b in blocks), head)]
    activations = [0, *(BLOCK_BYTES * tokens * hidden for _ in blocks), LOGIT_BYTES * tokens * vocab]
    memory = [s + a for s, a in zip(states, activations, strict=True)]
    costs = [f * sum(memory) + m * sum(flops) for f, m in zip(flops, memory, strict=True)]
    return ChainCosts(costs[0], costs[1:-1], costs[-1])


def cut(costs: Sequence[int], chunks: int, before: int = 0, after: int = 0) -> list[int]:
    """Return how many consecutive blocks each of `chunks` groups gets, so that the dearest group costs least.

    costs          of each block, in order; none is below 0
    before, after  added to the first and to the last group
    Exact. Among equals the sum of squares is least, and then earlier groups have more blocks.
    Time: chunks x blocks x the blocks of a group. Errors: fewer blocks than chunks, chunks below 1 (ConfigError).
    """
    if not 1 <= chunks <= len(costs):
        raise ConfigError(f"{len(costs)} blocks cannot make {chunks} chunks: pass chunks=1 to {len(costs)}.")
    groups = _Groups(list(accumulate(costs, initial=0)), chunks, before, after)
    limit = _solve(groups, squares=False, limit=groups.dearest_if_even())[0]
    bounds = _solve(groups, squares=True, limit=limit)[1]
    return [stop - start for start, stop in pairwise(bounds)]


class _Groups(NamedTuple):
    """A chain of blocks to be dealt out to `chunks` groups. sums[i]: cost of the first i blocks."""

    sums: list[int]
    chunks: int
    before: int
    after: int

    def cost(self, chunk: int, start: int, stop: int) -> int:
        """Return the cost of a group of the blocks from `start` to before `stop`."""
        return self.sums[stop] - self.sums[start] + self.ends(chunk)

    def ends(self, chunk: int) -> int:
        """Return what a group has beside its blocks."""
        return self.before * (chunk == 0) + self.after * (chunk == self.chunks - 1)

    def dearest_if_even(self) -> int:
        """Return the cost of the dearest group of an even deal: no group of the best deal costs more."""
        bounds = [(len(self.sums) - 1) * chunk // self.chunks for chunk in range(self.chunks + 1)]
        return max(self.cost(chunk, start, stop) for chunk, (start, stop) in enumerate(pairwise(bounds)))


def _solve(groups: _Groups, squares: bool, limit: int) -> tuple[int, list[int]]:
    """Return the least value of all groupings and its bounds: of the dearest group, or the sum of squares.

    limit   no group may cost more
    """
    total = len(groups.sums) - 1
    # best[start]: value and bounds of blocks start ... L-1 in the groups from `chunk` on
    best: dict[int, tuple[int, list[int]]] = {total: (0, [total])}
    for chunk in reversed(range(groups.chunks)):
        starts = [0] if chunk == 0 else range(chunk, total)
        best = {start: first for start in starts if (first := _best_group(groups, chunk, start, best, squares, limit))}
    return best[0]


def _best_group(
    groups: _Groups, chunk: int, start: int, best: dict[int, tuple[int, list[int]]], squares: bool, limit: int
) -> tuple[int, list[int]] | None:
    """Return the best first group of the blocks from `start` on, the longest among equals; None if none is allowed."""
    first = None
    beside = groups.ends(chunk) - groups.sums[start]
    for stop in range(bisect_right(groups.sums, limit - beside) - 1, start, -1):
        if stop in best:
            cost = groups.sums[stop] + beside
            value = best[stop][0] + cost * cost if squares else max(best[stop][0], cost)
            if first is None or value < first[0]:
                first = value, [start, *best[stop][1]]
    return first
