"""The planner: what a plan needs and how long its step takes, by arithmetic.

    evaluate(model, cluster, plan, system="zero3d") -> Estimate
    ModelSpec, ClusterSpec, ParallelPlan                               its inputs, as data

It stands in `zero3d.tools.plan`, with all that is not public. Names are loaded when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zero3d.tools import plan as _plan

if TYPE_CHECKING:
    from zero3d.tools.plan import (
        ClusterSpec as ClusterSpec,
        Estimate as Estimate,
        ModelSpec as ModelSpec,
        ParallelPlan as ParallelPlan,
        evaluate as evaluate,
    )

__all__ = ["ClusterSpec", "Estimate", "ModelSpec", "ParallelPlan", "evaluate"]


def __getattr__(name: str) -> Any:
    """Load a public name when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.plan' has no attribute {name!r}")
    return getattr(_plan, name)
