"""What transformers' mixtures of experts have in common: a grouped product, which has no fp64, and routers' biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

HAVE_FP64 = ("eager", "batched_mm")
ROUTER_BIAS = "e_score_correction_bias"  # a buffer [experts] of a router, which only chooses


def compute_in_fp64(model: nn.Module) -> None:
    """Let mixtures of experts compute expert by expert, unless they are set to what has fp64 already."""
    modules: Iterable[Any] = model.modules()
    for module in modules:
        how = getattr(getattr(module, "config", None), "_experts_implementation", None)
        if how is not None and how not in HAVE_FP64 and hasattr(module, "set_experts_implementation"):
            module.set_experts_implementation("eager")
