"""Autocast with a card's lists of operations, for tensors of the CPU: torch has other lists for it.

    wide      their 16-bit inputs are cast to fp32: norms, exponentials, powers
    in fp32   they are told to compute and return fp32: softmax, sums
    promoted  inputs of several dtypes are cast to the widest
    others    as the CPU has them: products in 16 bits, losses in fp32

The names are of torch's `autocast_mode.h`. An implementation is registered for the CPU's key of autocast while the
context is open, so that what a forward keeps is what it would keep on a card.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet, _ExcludeDispatchKeyGuard

from zero3d.nested import map_tensors, tensors_in

WIDE = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "logsumexp", "reciprocal"),
    *("rsqrt", "sinh", "softplus", "tan", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "layer_norm"),
    *("native_layer_norm", "group_norm", "rms_norm", "cosine_similarity", "dist", "pdist", "renorm"),
)
IN_FP32 = ("softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList", "linalg_vector_norm")
PROMOTED = ("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "index_put", "scatter_add", "tensordot", "vdot")
CPU = DispatchKeySet(DispatchKey.AutocastCPU)


@contextmanager
def lists_of_cards() -> Iterator[None]:
    """Have autocast on CPUs cast what it casts on cards, inside."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for names, casts in ((WIDE, _widened), (IN_FP32, _told), (PROMOTED, _promoted)):
            for name in names:
                library.impl(name, _outside(_operation(name), casts), "AutocastCPU")
        yield
    finally:
        library._destroy()


def _operation(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _outside(operation: Any, casts: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = casts(args, kwargs)
        with _ExcludeDispatchKeyGuard(CPU):
            return operation(*args, **kwargs)

    return run


def _is_narrow(t: Tensor) -> bool:
    return t.is_floating_point() and t.itemsize == 2


def _widened(args: Any, kwargs: Any) -> Any:
    return map_tensors((args, kwargs), lambda t: t.float() if _is_narrow(t) else t)


def _told(args: Any, kwargs: Any) -> Any:
    if not _is_narrow(args[0]) or kwargs.get("dtype") is not None:
        return args, kwargs
    return args, {**kwargs, "dtype": torch.float32}


def _promoted(args: Any, kwargs: Any) -> Any:
    dtypes = {t.dtype for t in tensors_in((args, kwargs)) if t.is_floating_point()}
    if len(dtypes) < 2:
        return args, kwargs
    return map_tensors((args, kwargs), lambda t: t.float() if _is_narrow(t) else t)
