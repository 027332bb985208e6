"""torch.compile of a model's blocks: each one's own forward, inside the module's hooks and inside recomputation.

    block.__call__:  engine's hooks [ recomputation [ torch.compile [ the block's own forward ]]]

So compiled code holds no hook.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from zero3d.activations.segments import Recomputed
from zero3d.activations.targets import Blocks, blocks_of
from zero3d.errors import ConfigError
from zero3d.models.wrappers import Compiled, Wrapped


def compile_blocks(model: nn.Module, blocks: Blocks | None = None, **options: Any) -> None:
    """Compile each block's own forward with torch.compile: blocks of one kind share one graph. Before `recompute`.

    options   of torch.compile, such as backend
    """
    for name, block in blocks_of(model, blocks, "compile").items():
        if isinstance(block.forward, Recomputed):
            raise ConfigError(f"{name} is recomputed already: call compile_blocks() first, or prepare_blocks().")
        compile = partial(torch.compile, **options)
        if isinstance(block.forward, Wrapped):
            block.forward.compile(compile)
        else:
            block.forward = Compiled(block, compile)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module's own forward is compiled, inside recomputation perhaps."""
    forward: Any = module.forward
    while isinstance(forward, (Recomputed, Wrapped)):
        forward = forward.inner
    return isinstance(forward, Compiled)
