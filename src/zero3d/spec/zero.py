"""Declares the section `zero`: what data-parallel ranks shard, when and how gradients are reduced. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from zero3d.spec.bits import FACTS
from zero3d.spec.declaring import Advice, key

SAME = "same"
KEPT, CAST = "kept", "cast"  # of weights
NODE = "node"  # of second_shard: the ranks of a host
ROUNDS = Advice(rounds=True)
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class Zero:
    """What the data-parallel ranks shard."""

    stage: int = key(
        3,
        "what is sharded: 0 nothing, 1 optimizer states, 2 also gradients, 3 also parameters",
        bits=FACTS["stage"],
        least=0,
        most=3,
    )
    reduce_dtype: str = key(
        "fp32",
        "dtype in which gradients are reduced",
        bits=FACTS["wire"],
        choices=PRECISIONS,
        keyword="in which gradients are reduced, none narrower than they are; they travel in a narrower one where "
        "nothing is rounded by that",
        said="reductions in {}",
        advice=ROUNDS,
    )
    release: str = key(
        "auto", "when gathered parameters are released", bits=None, choices=("auto", "every_use", "every_step")
    )
    reduce: str = key(
        "auto",
        "when gradients are reduced",
        bits=FACTS["reduce"],
        choices=("auto", "every_micro_batch", "every_step"),
        keyword="when gradients are reduced; stages that reduce at the same moments give the same bits (auto: stages "
        "0, 1 every step, 2, 3 every micro-batch)",
    )
    reduce_scatter: str = key(
        "auto",
        "how gradients are summed: all-to-all sends the 16-bit terms and adds them in rank order, native leaves it to "
        "the backend; auto: all-to-all if it sends no more bytes between hosts",
        bits=FACTS["algorithm"],
        choices=("auto", "native", "all-to-all"),
        keyword="how they are summed over dp. native: by the backend, in `reduce_dtype`; all-to-all: those in 16 bits, "
        "as gradients of one micro-batch may be, are sent as terms and added in rank order, others are the backend's. "
        "auto: on NCCL all-to-all where dp is on one host, or has at most two ranks on each, else native; on gloo in "
        "rank order up to 8 ranks",
        advice=ROUNDS,
    )
    master: str = key(
        "fp32",
        "how masters of bf16 weights are stored: fp32, or split, as a 16-bit remainder beside the weight: 2 bytes "
        "less per parameter, the same bits",
        bits=None,
        choices=("fp32", "split"),
    )
    weights: str = key(
        KEPT,
        "16-bit weights beside their masters between uses (stage 3): kept, a shard of them, or cast from the masters "
        "in each gather, which takes 2 bytes less per parameter of the shard; auto: cast where the further casts take "
        "less than a hundredth of a step's matrix products by the plan's rates, as zero3d train and plan explain "
        "print, else kept",
        bits=None,
        choices=(KEPT, CAST, "auto"),
        said="{} weights",
        keyword="what stays of weights between their uses at stage 3, where masters are wider. kept: a shard; cast: "
        "nothing, a gather casts the masters: 2 bytes less per parameter over the ranks that share states, the same "
        "bits; auto: kept, as an engine alone knows no plan of its steps",
        advice=Advice(CAST, lambda plan: plan.zero.stage == 3 and plan.shard > 1),
    )
    gather_budget: int | str | None = key(
        None,
        "bytes, or a text such as 64MB (decimal units): linear layers and embeddings whose weights take more are "
        "gathered and multiplied in tiles; by default none",
        bits=FACTS["gather_budget"],
        in_plan=False,
        keyword="bytes, or a text such as 64MB: a linear layer or embedding whose weight takes more is gathered and "
        "multiplied in tiles of its rows, none of them larger. `named_parameters()` then has tiles",
    )
    gather_wire: str = key(
        "same",
        "how weights travel in gathers (stage 3): same, unchanged, or int8, in blocks of 256 with a scale each, 0.51 "
        "of bf16's bytes; the model then computes with the decoded weights, and masters stay exact",
        bits="weights are rounded differently on their way",
        choices=("same", "int8"),
        said="{} gathers",
        keyword="how weights travel when they are gathered at stage 3. int8: in blocks of 256 with a scale each, 0.51 "
        "of bf16's bytes; forwards, evaluations and generation compute with what is decoded, the same on all ranks. "
        "Masters, checkpoints, exports and `full_params()` have the weights themselves",
        advice=Advice(
            "int8", lambda plan: plan.dp > 1 and plan.zero.stage == 3 and plan.zero.release != "every_step", rounds=True
        ),
    )
    second_shard: int | str | None = key(
        None,
        "neighbours on dp that together keep a second shard of gathered weights (stage 3): a number of ranks, or "
        "node, the ranks of a host; only the first gather after an update then leaves the group",
        bits=None,
        said="second shard on {}",
    )
    slow_wire: str = key(
        SAME,
        "how sums of gradients travel between copies of shards (mesh.shard), which are on different hosts: same, in "
        "zero.reduce_dtype, or each rank's term encoded once, as bf16 or in blocks of 256 with a scale each (int8, "
        "int4); sums are computed in fp32, and are equal on all ranks",
        bits="sums of gradients are rounded differently between copies of shards",
        choices=(SAME, "bf16", "int8", "int4"),
        advice=Advice(
            "int8",
            lambda plan: plan.shard < plan.dp and not plan.zero.exact,
            rounds=True,
            reset={"zero.slow_rounding": "nearest"},
        ),
    )
    slow_rounding: str = key(
        "nearest",
        "rounding of int8 and int4 sums: to the nearest code, or up or down by chance, so that the mean of many is "
        "right (stochastic)",
        bits="sums of gradients are rounded differently between copies of shards",
        choices=("nearest", "stochastic"),
    )
    communicators: int | None = key(
        None,
        "process groups of an axis over which states are cut: 2, one for gathers and one for reductions, which then "
        "overlap; or 1 for both, "
        "which takes less device memory and gives them one order on all ranks; by default 2, and 1 on ROCm and where "
        "the environment has CUDA_DEVICE_MAX_CONNECTIONS=1",
        bits=None,
        keyword="process groups of an axis over which states are cut. 2: one for gathers, one for reductions, which "
        "then overlap; 1: one for "
        "both, in one order on all ranks, and with less device memory: a unit is then reduced when backward has left "
        "its modules, or at its end. None: 2, and 1 on ROCm and where the environment has "
        "CUDA_DEVICE_MAX_CONNECTIONS=1, alike on all ranks. The same bits",
        least=1,
        most=2,
    )
    exact: bool = key(
        False,
        "the same bits at every dp that is a power of two up to 64; needs train.batch and train.micro_batch",
        bits=FACTS["leaves"],
        keyword="the same bits at every dp (a power of two), stage and `reduce`, of one global list of micro-batches, "
        "numbered as `exact.Summands` says; on a GPU after `zero3d.make_deterministic()`",
    )

    @property
    def sums_in_blocks(self) -> bool:
        """Return whether sums of gradients travel in blocks between copies of shards."""
        return self.slow_wire not in (SAME, "bf16")

    @property
    def gathers_by_use(self) -> bool:
        """Return whether release `auto` is every_use everywhere, in pipelines, too: a setting is about each gather."""
        about_gathers = self.gather_wire != SAME or self.second_shard is not None or self.weights == CAST
        return self.stage == 3 and about_gathers

    def release_of(self, asked: str) -> str:
        """Return when gathered parameters are given back, where `asked` may still be auto."""
        return "every_use" if asked == "auto" and self.gathers_by_use else asked
