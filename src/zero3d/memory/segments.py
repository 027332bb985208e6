"""Segments of a GPU's memory that grow, so that less is reserved into which nothing fits. No torch.

torch reads the variable before it first allocates on a GPU. So whoever starts ranks, or joins them, asks for it before
torch is imported, unless somebody has configured the allocator; an engine in a program of one's own tells what to set.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")  # older names last
GROWING = "expandable_segments:True"


def ask_for_growing_segments(environment: MutableMapping[str, str]) -> None:
    """Set the variable, unless one of its names is there."""
    if not _is_configured(environment):
        environment[ALLOCATOR[0]] = GROWING


def segments_note(device: str) -> str | None:
    """Return what to set, for an engine on a GPU whose allocator nobody has configured. device: its type."""
    if device != "cuda" or _is_configured(os.environ):
        return None
    return (
        f"{ALLOCATOR[0]} is not set: with {ALLOCATOR[0]}={GROWING} in the environment of all ranks less GPU memory is "
        "reserved that nothing fits into"
    )


def _is_configured(environment: Mapping[str, str]) -> bool:
    return any(name in environment for name in ALLOCATOR)
