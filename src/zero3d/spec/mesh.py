"""Declares the section `mesh`: degrees, and how pipeline, tensor and expert parallelism divide a model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zero3d.spec.bits import FACTS, PLAIN, Bits
from zero3d.spec.declaring import Advice, key

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
SPLIT_BACKWARDS = ("zero-bubble", "zbv")  # schedules that compute gradients of inputs and of weights apart
EXPERTS = EXACT, FAST = ("exact", "fast")
SP_KINDS = ("auto", "heads", "gather")
SP_MIXERS = AUTO, HEADS, PREFIX = ("auto", "heads", "prefix")


@dataclass(frozen=True)
class Mesh:
    """Degrees; their product is the number of ranks."""

    dp: int | None = key(None, "data-parallel degree; computed if left out", bits=FACTS["dp"], least=1)
    tp: int | None = key(None, "tensor-parallel degree", bits=FACTS["tp"], least=1)
    pp: int | None = key(None, "pipeline-parallel degree", bits=FACTS["pp"], least=1)
    ep: int | None = key(
        None, "neighbours on dp over which a mixture's experts are distributed; divides dp", bits=FACTS["fold"], least=1
    )
    sp: int | None = key(
        None,
        "neighbours on dp that share each sequence, for contexts too long for one rank; divides dp (not "
        "mesh.sequence_parallel, which is Megatron's method over tp)",
        bits=FACTS["fold"],
        least=1,
    )
    shard: int | None = key(
        None,
        "neighbours on dp over which states are sharded, with a copy of all shards on every such group: if these are "
        "the ranks of a host, parameters are gathered inside it, and only sums of gradients pass between hosts; "
        "divides dp; by default all of dp",
        bits=FACTS["fold"],
        least=1,
    )
    sp_kind: str = key(
        "auto",
        "how sp divides attention: by heads of whole sequences, or by rows, for which keys and values are gathered "
        "(gather); auto: heads if that gives the bits of one rank, else what sends less",
        bits=FACTS["sp_kind"],
        choices=SP_KINDS,
        axis="sp",
        said="attention by {}",
    )
    sp_mixers: str = key(
        AUTO,
        "how sp divides recurrences of hybrids: by heads of whole sequences, or by rows between which states pass, "
        "whose bytes do not grow with the sequence, at more scans (prefix; Mamba of the first kind stays by heads); "
        "auto: what takes less for the model and data.length, bytes and scans together; heads in an Engine, which is "
        "told no length",
        bits=FACTS["sp_mixers"],
        choices=SP_MIXERS,
        axis="sp",
        said="recurrences by {}",
    )
    sp_mask_budget: int | str = key(
        "4GB",
        "bytes, or a text such as 4GB, that one mask of whole sequences may take on a rank under sp, if padding, "
        "packing or a window need one; above it, flash attention computes without a mask if it is installed and "
        "nothing is padded, else flex attention with masks in blocks on devices that have it, and elsewhere the "
        "micro-batch is refused",
        bits=FACTS["sp_masks"],
        axis="sp",
        in_plan=False,
    )
    experts: str = key(
        "exact",
        "how a rank computes its experts under ep: exact, the tokens of each source rank in a product of their own, "
        "with the bits of ep 1; fast, all in one product",
        bits=Bits("one product of all sources sums in another order", PLAIN, usual=EXACT),
        choices=EXPERTS,
        said="sources in one product",
        advice=Advice(FAST, lambda plan: plan.ep > 1 and not plan.zero.exact),
    )
    ep_plan: Mapping[str, str] | None = key(
        None,
        "which modules and parameters are experts, as names and styles that override the model's own plan",
        bits="other modules are experts",
        axis="ep",
        in_plan=False,
        keyword="{pattern: style} over the model's own plan of experts (mesh.ep > 1; `expert_parallel.plan`)",
    )
    schedule: str | None = key(
        None,
        "order of a pipeline's forwards and backwards, by default 1f1b (the learning rate has the section schedule)",
        bits=FACTS["chunks"],
        choices=SCHEDULES,
        axis="pp",
        keyword="of a pipeline (mesh.pp > 1), by default 1f1b; for `train_batch`",
    )
    tp_plan: Mapping[str, str] | None = key(
        None,
        "tensor-parallel styles by module name pattern, which override the model's own plan",
        bits="matrix products have other shapes",
        axis="tp",
        in_plan=False,
        keyword="{pattern: style} over the model's own tensor-parallel plan (mesh.tp > 1; `tensor_parallel.plan`)",
    )
    sequence_parallel: bool = key(
        False,
        "cut activations between blocks along the sequence over tp, too (mesh.sp cuts them everywhere, over dp)",
        bits="matrix products have other shapes",
        axis="tp",
        said="sequence parallel",
    )
    partition_activations: bool = key(
        False,
        "keep the inputs of recomputed blocks in parts over tp, and gather them before recomputation",
        bits=None,
        said="inputs over tp",
    )
    blocks: str | None = key(
        None,
        "the list of blocks that a pipeline cuts, such as model.layers; by default it is found",
        bits="each rank adds other terms",
        axis="pp",
        in_plan=False,
    )

    def options(self, axis: str) -> dict[str, Any]:
        """Return the settings that have no effect without this axis."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["axis"] == axis}
