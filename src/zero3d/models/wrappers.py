"""The model inside its wrappers, so that names are those of the original module in checkpoints and exports.

    DistributedDataParallel(model)   its parameters are named module.*; its hooks rest while it is not called itself
    torch.compile(block)             its parameters are named _orig_mod.*
    block.compile()                  no wrapper: compiles the call, with the hooks that an engine adds later
    block.forward = Compiled(...)    no wrapper: compiles the forward, inside the hooks

`unwrap` takes the first two off; what the second has compiled becomes the last.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from zero3d.errors import ConfigError, short
from zero3d.models.blocks import find_blocks

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]  # such as torch.compile


class Compiled:
    """Calls a module's own forward, compiled."""

    def __init__(self, module: nn.Module, compile: Compile) -> None:
        self._module, self._compile = module, compile
        self._forward = compile(module.forward)

    def __deepcopy__(self, memo: dict[int, Any]) -> Compiled:
        """Compile the copied module's forward: the compiled function would go on calling the original."""
        return Compiled(copy.deepcopy(self._module, memo), self._compile)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)


def unwrap(model: nn.Module) -> nn.Module:
    """Take wrappers off a model and return it. A module that torch.compile has wrapped has a compiled forward then.

    Of a model that is compiled as a whole each block is compiled by itself: one graph would hold an engine's hooks.
    Raises ConfigError for what is no module.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"the model is {short(type(model).__name__)}, no torch.nn.Module: an Engine takes modules. (torch.compile "
            "of a compiled module is a function: pass the module that it was made of.)"
        )
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrap(model.module)
    compiled = _compile_of(model)
    if compiled is not None:
        model = unwrap(model._modules["_orig_mod"])  # type: ignore[arg-type]
        if not _compile_blocks(model, compiled):
            warnings.warn(
                f"torch.compile({type(model).__name__}) without effect: the model has no list of blocks to compile one "
                "by one. Compile parts of it: model.part = torch.compile(model.part).",
                stacklevel=2,
            )
        return model
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and (compiled := _compile_of(child)) is not None:
                original = child._modules["_orig_mod"]
                assert original is not None
                module._modules[name] = original
                _compile_forward(original, compiled)
    return model


def compile_by_block(model: nn.Module) -> None:
    """Have `model.compile()` compile each block's forward: compiled as one, its graph would hold an engine's hooks."""

    def compile_blocks(*args: Any, **options: Any) -> None:
        _compile_blocks(model, partial(torch.compile, *args, **options))

    model.compile = compile_blocks  # type: ignore[method-assign]


def _compile_blocks(model: nn.Module, compile: Compile) -> bool:
    """Compile each block's forward; return whether there are blocks."""
    blocks = find_blocks(model)
    for block in blocks.values():
        _compile_forward(block, compile)
    return bool(blocks)


def _compile_of(module: nn.Module) -> Compile | None:
    """Return what has compiled a module that is a wrapper of torch.compile. Only who has imported dynamo has one."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return module.dynamo_ctx if dynamo is not None and isinstance(module, dynamo.OptimizedModule) else None


def _compile_forward(module: nn.Module, compile: Compile) -> None:
    if "forward" not in vars(module):  # compiled or recomputed already
        module.forward = Compiled(module, compile)
