"""Price a step by how long a run's sequences are once padded, and memory by the longest. No torch.

    records      #### ###### ## ########    tokens of a sample of the run's own, cut at data.length
    micro-batch  ####...  ######.           padded to its longest: of b draws the mean of the largest

Without packing a sequence is a record, and the model computes what its micro-batch is padded to. Grouped by length,
records of a micro-batch are as long as each other. The longest micro-batch still decides whether a plan fits.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, ModelSpec, Operations, ParallelPlan, Part

OF_100 = 99
BY_TOKEN = (  # of a part whose work is a sequence's, however long: what is counted for each token
    *("matrices", "scores", "kept_cut", "kept_whole", "attention", "again", "input", "transient", "moved", "trained"),
)


class Lengths(NamedTuple):
    """Tokens of sampled records in ascending order, each cut at `limit`. grouped: batches are of similar lengths."""

    tokens: tuple[int, ...]
    limit: int
    grouped: bool = False

    @property
    def mean(self) -> float:
        """Return the mean tokens of a sequence."""
        return sum(self.tokens) / len(self.tokens)

    @property
    def high(self) -> int:
        """Return what 99 of 100 sequences are at most."""
        return self.tokens[min(len(self.tokens) - 1, len(self.tokens) * OF_100 // 100)]

    def padded(self, micro_batch: int) -> float:
        """Return the mean tokens to which a micro-batch of so many sequences is padded."""
        if self.grouped or micro_batch == 1:
            return self.mean
        n = len(self.tokens)
        shares = (
            ((i + 1) / n) ** micro_batch - (i / n) ** micro_batch for i in range(n)
        )  # that the i-th is the longest
        return sum(each * share for each, share in zip(self.tokens, shares, strict=True))

    def told(self, micro_batch: int) -> str:
        """Say what was found, and by what a plan is priced."""
        return (
            f"{len(self.tokens):,} records of its data: {self.mean:,.0f} tokens on average, {self.high:,} in {OF_100} "
            f"of 100, {self.tokens[-1]:,} at most; micro-batches of {micro_batch:,} are padded to "
            f"{self.padded(micro_batch):,.0f}: a step is priced by these, memory by {self.limit:,}"
        )


def with_lengths(evaluate: Evaluate, lengths: Lengths) -> Evaluate:
    """Return what prices a plan's step by real lengths, and its memory by the longest."""

    def real(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> Estimate:
        whole, padded = evaluate(model, cluster, plan), lengths.padded(plan.micro_batch)
        cut = plan.tp * plan.sp  # ranks that share a sequence need equal parts of it
        length = min(-(-round(padded) // cut) * cut, model.length)
        now = whole if length == model.length else evaluate(at_length(model, length), cluster, plan)
        sequences = plan.rows * plan.accumulate * plan.micro_batch
        flops = now.flops * lengths.mean / length
        return Estimate(whole.memory, now.seconds, now.traffic, round(sequences * lengths.mean), flops, whole.notes)

    return real


@lru_cache(maxsize=64)
def at_length(model: ModelSpec, length: int) -> ModelSpec:
    """Return a model on sequences of another length: attention's work for a token grows with it.

    What a vision tower does for a sequence is as before, so that a token has more of it.
    """
    times = length / model.length
    return replace(model, length=length, parts=tuple(_part(part, times) for part in model.parts))


def _part(part: Part, times: float) -> Part:
    if part.kind == "tower":
        return replace(part, operations=times_as_much(part.operations, 1 / times))
    dispatched = None if part.dispatched is None else _attending(part.dispatched, times)
    return replace(part, operations=_attending(part.operations, times), dispatched=dispatched)


def _attending(operations: Operations, times: float) -> Operations:
    """Return what a token takes where it attends to more or fewer others."""
    more = operations.attention * (times - 1) if operations.eager else 0.0  # scores that are kept
    over_tp, fused = (
        None if inner is None else _attending(inner, times) for inner in (operations.over_tp, operations.fused)
    )
    return replace(
        operations,
        scores=operations.scores * times,
        attention=operations.attention + more,
        kept_cut=operations.kept_cut + more,
        over_tp=over_tp,
        fused=fused,
    )


def times_as_much(operations: Operations, times: float) -> Operations:
    """Return the operations of a part that does so many times as much for each token."""
    more = {name: times * getattr(operations, name) for name in BY_TOKEN}
    forward, backward = operations.passed
    return replace(operations, passed=(times * forward, times * backward), **more)
