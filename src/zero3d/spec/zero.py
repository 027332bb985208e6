"""Declares the section `zero`: what data-parallel ranks shard, when and how gradients are reduced. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from zero3d.spec.declaring import key

SAME = "same"
NODE = "node"  # of second_shard: the ranks of a host
PRECISIONS = ("fp32", "bf16", "fp16", "fp64")


@dataclass(frozen=True)
class Zero:
    """What the data-parallel ranks shard."""

    stage: int = key(3, "0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters", least=0, most=3)
    reduce_dtype: str = key("fp32", "in which gradients are reduced", choices=PRECISIONS)
    release: str = key("auto", "when gathered parameters are given back", choices=("auto", "every_use", "every_step"))
    reduce: str = key("auto", "when gradients are reduced", choices=("auto", "every_micro_batch", "every_step"))
    reduce_scatter: str = key(
        "auto",
        "how gradients are summed: their 16-bit terms sent and added in rank order (all-to-all), or by the backend "
        "(native); auto: the first where it sends no more bytes between hosts",
        choices=("auto", "native", "all-to-all"),
    )
    master: str = key(
        "fp32",
        "how masters of bf16 weights are kept: in fp32, or as a 16-bit remainder beside the weight, 2 bytes less per "
        "parameter with the same bits (split)",
        choices=("fp32", "split"),
    )
    gather_budget: int | str | None = key(
        None,
        "bytes, or a text such as 64MB (decimal units): linear layers and embeddings whose weights take more are "
        "gathered and multiplied in tiles; by default none are",
        in_plan=False,
    )
    gather_wire: str = key(
        "same",
        "how weights travel when they are gathered (stage 3): as they are, or in blocks of 256 with a scale each "
        "(int8), 0.51 of bf16's bytes; the model then computes with what is decoded, masters stay as they are",
        choices=("same", "int8"),
        said="{} gathers",
    )
    second_shard: int | str | None = key(
        None,
        "neighbours on dp that keep a second shard of gathered weights together (stage 3): a number of ranks, or node, "
        "those of a host; only the first gather after an update leaves them",
        said="second shard on {}",
    )
    slow_wire: str = key(
        SAME,
        "how sums of gradients travel between copies of shards (mesh.shard), which are on other hosts: as "
        "zero.reduce_dtype says, or each rank's term coded once, in bf16 or in blocks of 256 with a scale each (int8, "
        "int4); sums are taken in fp32, and are equal on all ranks",
        choices=(SAME, "bf16", "int8", "int4"),
    )
    slow_rounding: str = key(
        "nearest",
        "how those blocks round: to the nearest code, or up or down by chance, so that the mean of many is right "
        "(stochastic)",
        choices=("nearest", "stochastic"),
    )
    exact: bool = key(
        False, "the same bits at every dp that is a power of two up to 64; give train.batch and train.micro_batch"
    )

    @property
    def sums_in_blocks(self) -> bool:
        """Return whether sums of gradients travel in blocks between copies of shards."""
        return self.slow_wire not in (SAME, "bf16")

    @property
    def gathers_by_use(self) -> bool:
        """Return whether release `auto` is every_use everywhere, in pipelines, too: a setting is about each gather."""
        return self.stage == 3 and (self.gather_wire != "same" or self.second_shard is not None)

    def release_of(self, asked: str) -> str:
        """Return when gathered parameters are given back, where `asked` may still be auto."""
        return "every_use" if asked == "auto" and self.gathers_by_use else asked
