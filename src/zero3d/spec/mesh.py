"""Declares the section `mesh`: degrees, and how pipeline, tensor and expert parallelism divide a model. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from zero3d.spec.declaring import key

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")
SPLIT_BACKWARDS = ("zero-bubble", "zbv")  # schedules that compute gradients of inputs and of weights apart
EXPERTS = EXACT, FAST = ("exact", "fast")
SP_KINDS = ("auto", "heads", "gather")


@dataclass(frozen=True)
class Mesh:
    """Degrees; their product is the number of ranks."""

    dp: int | None = key(None, "data-parallel degree; computed where left out", least=1)
    tp: int | None = key(None, "tensor-parallel degree", least=1)
    pp: int | None = key(None, "pipeline-parallel degree", least=1)
    ep: int | None = key(None, "neighbours on dp that share the experts of a mixture out; divides dp", least=1)
    sp: int | None = key(
        None,
        "neighbours on dp that have a part of each sequence, for contexts too long for one of them; divides dp "
        "(mesh.sequence_parallel is another thing, Megatron's over tp)",
        least=1,
    )
    shard: int | None = key(
        None,
        "neighbours on dp over which states are cut, which are repeated over dp / shard: with the ranks of a host, "
        "parameters are gathered inside it, and only sums of gradients pass between hosts; divides dp; left "
        "out, it is all of dp",
        least=1,
    )
    sp_kind: str = key(
        "auto",
        "how attention is shared out over sp: by heads of whole sequences, or by rows, to which keys and values are "
        "gathered; auto: heads where that has the bits of one rank, else what sends less",
        choices=SP_KINDS,
        axis="sp",
        said="attention by {}",
    )
    sp_mask_budget: int | str = key(
        "4GB",
        "bytes, or a text such as 4GB, that one mask of whole sequences may take on a rank under sp, where padding, "
        "packing or a window make attention need one; beyond it flash attention computes without one where it is "
        "installed and nothing is padded, else flex attention in blocks of masks, on devices that have these, and "
        "elsewhere the micro-batch is refused",
        axis="sp",
        in_plan=False,
    )
    experts: str = key(
        "exact",
        "how a rank computes its experts over ep: exact, a product for each rank whose tokens came, with the bits of "
        "ep 1; fast, one product of all",
        choices=EXPERTS,
        said="sources in one product",
    )
    ep_plan: Mapping[str, str] | None = key(
        None,
        "which modules and parameters are experts, as names and styles that win over the model's own plan",
        axis="ep",
        in_plan=False,
    )
    schedule: str | None = key(
        None,
        "order of a pipeline's forwards and backwards, 1f1b by default (the learning rate's is the section schedule)",
        choices=SCHEDULES,
        axis="pp",
    )
    tp_plan: Mapping[str, str] | None = key(
        None,
        "tensor-parallel styles by module name pattern, which win over the model's own plan",
        axis="tp",
        in_plan=False,
    )
    sequence_parallel: bool = key(
        False,
        "cut activations between blocks over tp, too, along the sequence (mesh.sp cuts them everywhere, over dp)",
        axis="tp",
        said="sequence parallel",
    )
    partition_activations: bool = key(
        False,
        "keep inputs of recomputed blocks in parts over tp, and gather them before they are recomputed",
        said="inputs over tp",
    )
    blocks: str | None = key(
        None,
        "the list of blocks that a pipeline cuts, such as model.layers; by default found",
        axis="pp",
        in_plan=False,
    )

    def options(self, axis: str) -> dict[str, Any]:
        """Return the settings that have no effect without this axis."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.metadata["axis"] == axis}
