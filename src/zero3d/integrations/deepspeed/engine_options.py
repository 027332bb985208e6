"""What a JSON of DeepSpeed's says about an engine, for loops that are not ours."""

from __future__ import annotations

from typing import Any

from zero3d.config import Config, offload_of
from zero3d.setup.build import precision_of


def engine_options(settings: Config) -> dict[str, Any]:
    """Return stage, precision, dtype of reductions, gathers, tiers and compilation as options of `zero3d.Engine`."""
    return {
        "stage": settings.zero.stage,
        "precision": precision_of(settings),
        "reduce_dtype": settings.zero.reduce_dtype,
        "gather_wire": settings.zero.gather_wire,
        "second_shard": settings.zero.second_shard,
        "slow_wire": settings.zero.slow_wire,
        "offload": offload_of(settings),
    } | ({"compile": True} if settings.train.compile else {})
