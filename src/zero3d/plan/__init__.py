"""The planner: pure arithmetic about memory, traffic and time. Imports no torch.

    evaluate(model, cluster, plan, system="zero3d") -> Estimate        what a plan needs and how long its step takes
    ModelSpec, ClusterSpec, ParallelPlan                               its inputs, as data (spec.py)

Names are loaded when first used: `zero3d plan --theory` needs none of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d.plan.estimate import evaluate
    from zero3d.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan

__all__ = ["ClusterSpec", "Estimate", "ModelSpec", "ParallelPlan", "evaluate"]


def __getattr__(name: str) -> Any:
    """Load what is asked for, once."""
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.plan' has no attribute {name!r}")
    found = getattr(import_module("zero3d.plan.estimate"), name)
    globals()[name] = found
    return found
