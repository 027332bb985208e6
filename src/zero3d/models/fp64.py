"""Arithmetic that stays in fp64 where a model's code asks for fp32, as recurrences, norms and routers do.

    with StaysInFp64(): model.double()(...)

Mixing can be told from rounding then: the one shows in the eighth digit, the other in the fifteenth.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

CAST = (torch.float64, torch.bool, torch.int64, torch.int32)
CASTS = (Tensor.float, Tensor.to, Tensor.type, torch.softmax, F.softmax, Tensor.softmax)


class StaysInFp64(TorchFunctionMode):
    """Leaves fp64 as it is where a model's code asks for fp32, and makes such of numbers without fractions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in CASTS or not args or args[0].dtype not in CAST:
            return func(*args, **kwargs)
        if func is Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs = {**kwargs, "dtype": torch.float64}
        return func(*args, **kwargs)
