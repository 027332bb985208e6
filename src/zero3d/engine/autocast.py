"""A module's forward in torch's autocast and out of it, for parameters that show their masters in fp32."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from torch import nn

BEFORE = "_zero3d_before_autocast"  # the attribute with a module's forward before


def in_autocast(module: nn.Module, kind: str, dtype: torch.dtype) -> None:
    """Run a module's forward in autocast until `out_of_autocast`."""
    forward, own = module.forward, vars(module).get("forward")

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype):
            return forward(*args, **kwargs)

    vars(module)["forward"] = cast
    vars(module)[BEFORE] = cast, own


def out_of_autocast(module: nn.Module) -> None:
    """Undo `in_autocast`, if it was done and nobody has replaced the forward since."""
    cast, own = vars(module).pop(BEFORE, (None, None))
    if cast is None or vars(module).get("forward") is not cast:
        return
    if own is None:
        del vars(module)["forward"]
    else:
        vars(module)["forward"] = own
