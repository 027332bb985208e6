"""What is kept of a model's blocks between forward and backward: recomputation, and compilation of blocks.

    recompute(model, policy), compile_blocks(model), prepare_blocks(model, activations, compile)

Names are loaded when first used: the arithmetic of a policy needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d.activations.recomputation import compile_blocks, prepare_blocks, recompute

__all__ = ["compile_blocks", "prepare_blocks", "recompute"]


def __getattr__(name: str) -> Any:
    """Load what is asked for, once."""
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.activations' has no attribute {name!r}")
    found = getattr(import_module("zero3d.activations.recomputation"), name)
    globals()[name] = found
    return found
