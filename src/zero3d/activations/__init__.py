"""What is kept of a model's blocks between forward and backward, and how they are compiled.

policy.py         what a policy keeps and costs, as arithmetic (no torch)
targets.py        the modules that are wrapped: blocks, attention
segments.py       recording and replay of the calls of K blocks
kept_inputs.py    their inputs in parts over tp, and on the host
host_slots.py     the host's memory of those, and the ring that they pass
compilation.py    compile_blocks(model)
recomputation.py  recompute(model, policy), prepare_blocks(model, activations, compile): both in the right order

The three functions are loaded when first used: the arithmetic of a policy needs no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zero3d.activations.compilation import compile_blocks
    from zero3d.activations.recomputation import prepare_blocks, recompute

__all__ = ["compile_blocks", "prepare_blocks", "recompute"]


def __getattr__(name: str) -> Any:
    """Load a public function when it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'zero3d.activations' has no attribute {name!r}")
    file = "compilation" if name == "compile_blocks" else "recomputation"
    function = getattr(import_module(f"zero3d.activations.{file}"), name)
    globals()[name] = function
    return function
