"""Models that torch.compile has wrapped before they are prepared: the engine compiles their blocks instead.

A graph of the whole model would have the engine's hooks, gathers among them, inside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import OptimizedModule, innermost_backend


def is_compiled(model: Any) -> bool:
    """Return whether this is what torch.compile(model) returns."""
    return isinstance(model, OptimizedModule)


def uncompiled(model: nn.Module) -> tuple[nn.Module, Mapping[str, Any]]:
    """Return the module inside of a compiled one, and keywords that compile its blocks alike."""
    wrapped: Any = model
    keywords: dict[str, Any] = {}
    backend = innermost_backend(wrapped.dynamo_ctx.callback)
    if isinstance(name := getattr(backend, "compiler_name", None), str):
        keywords["backend"] = name
    if name == "inductor" and (options := getattr(backend, "config", None)):
        keywords["options"] = dict(options)
    return wrapped._orig_mod, keywords
