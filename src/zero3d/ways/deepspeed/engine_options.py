"""What a JSON of DeepSpeed's says about an engine, for loops that are not ours."""

from __future__ import annotations

from typing import Any

from zero3d.config import Config, offload_of
from zero3d.spec.declaring import keyword_of
from zero3d.train.setup.build import precision_of


def engine_options(settings: Config) -> dict[str, Any]:
    """Return section `zero`, precision and autocast, tiers and compilation as options of `zero3d.Engine`."""
    compiled = {"compile": True} if settings.train.compile else {}
    zero = {keyword_of("zero", name): value for name, value in vars(settings.zero).items()}
    computes = {"precision": precision_of(settings), "autocast": settings.autocast}
    return {**zero, **computes, "offload": offload_of(settings)} | compiled
