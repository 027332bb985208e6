"""The sections of who holds what, and where: zero, offload, mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from zero3d.config.declaring import key
from zero3d.memory.offload import CHOICES

PRECISIONS = ("fp32", "bf16", "fp16", "fp64")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
EXPERTS = ("exact", "fast")


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
    )
    exact: bool = key(
        False, "the same bits at every dp that is a power of two up to 64; give train.batch and train.micro_batch"
    )


@dataclass(frozen=True)
class Offload:
    """What leaves the device while it is not in use: ZeRO-Offload and ZeRO-Infinity, with the same bits."""

    optimizer: str = key(
        "none",
        "where masters and optimizer states are; auto: on the device as much as fits, the rest on the host, or else "
        "on a disk, as a run says with the arithmetic",
        choices=CHOICES["optimizer"],
    )
    params: str = key("none", "where weights are that nothing needs now (zero.stage 3)", choices=CHOICES["params"])
    gradients: str = key(
        "auto", "where reduced gradients wait for the update: host at stages 2 and 3", choices=CHOICES["gradients"]
    )
    activations: str = key("none", "where inputs of recomputed blocks are", choices=CHOICES["activations"])
    fraction: float = key(
        1.0, "share of the optimizer's bytes that leaves the device: whole records, last-needed first", above=0, most=1
    )
    directory: str | None = key(None, "a folder on a local disk for what is on one; by default OUTPUT/offload")
    moments: str = key(
        "fp32",
        "in which Adam's are kept off the device; bf16 ones are rounded at random, and the training is not bitwise "
        "the same",
        choices=CHOICES["moments"],
    )
    executor: str = key(
        "auto", "updates states on the device, through which they pass, or on the host", choices=CHOICES["executor"]
    )
    host_budget: int | str | None = key(
        None,
        "bytes that all ranks of a host may take together, or a text such as 64GB (decimal units); by default what is "
        "available",
    )


@dataclass(frozen=True)
class Mesh:
    """Degrees; their product is the number of ranks."""

    dp: int | None = key(None, "data-parallel degree; computed where left out", least=1)
    tp: int | None = key(None, "tensor-parallel degree", least=1)
    pp: int | None = key(None, "pipeline-parallel degree", least=1)
    ep: int | None = key(None, "neighbours on dp that share the experts of a mixture out; divides dp", least=1)
    experts: str = key(
        "exact",
        "how a rank computes its experts over ep: exact, a product for each rank whose tokens came, with the bits of "
        "ep 1; fast, one product of all",
        choices=EXPERTS,
    )
    ep_plan: Mapping[str, str] | None = key(
        None, "which modules and parameters are experts, as names and styles that win over the model's own plan"
    )
    schedule: str | None = key(
        None,
        "order of a pipeline's forwards and backwards, 1f1b by default (the learning rate's is the section schedule)",
        choices=SCHEDULES,
    )
    tp_plan: Mapping[str, str] | None = key(
        None, "tensor-parallel styles by module name pattern, which win over the model's own plan"
    )
    sequence_parallel: bool = key(False, "cut activations between blocks over tp, too, along the sequence")
    partition_activations: bool = key(
        False, "keep inputs of recomputed blocks in parts over tp, and gather them before they are recomputed"
    )
    blocks: str | None = key(None, "the list of blocks that a pipeline cuts, such as model.layers; by default found")
