"""A model's forward in torch's autocast: `Engine(autocast=True)`, and whole parameters that show their masters.

    inputs    fp32 as it is; fp64, which autocast does not take, in fp32 (zero/hooks.py)
    forward   products in the compute dtype, of weights that are in it already; in fp32 what torch's autocast has there
    norms     torch wants weights as wide as the input: those of a wider input are cast, on CPUs by us
    batch norm  weights in fp32 beside its statistics, without autocast, too: torch takes no narrow ones there
    outputs   16-bit ones in fp32; what a pipeline's chunk hands on to the next stays in the compute dtype

A recomputation runs in the autocast of its forward (activations/segments.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _NormBase

from zero3d.errors import ConfigError
from zero3d.nested import map_tensors, tensors_out
from zero3d.zero.hooks import without_fp64

BEFORE = "_zero3d_before_autocast"  # the attribute with a module's forward before
NORMALISES: Mapping[type[nn.Module], Callable[[Any, Tensor, Tensor, Tensor | None], Tensor]] = {
    nn.LayerNorm: lambda norm, x, weight, bias: F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps),
    nn.GroupNorm: lambda norm, x, weight, bias: F.group_norm(x, norm.num_groups, weight, bias, norm.eps),
}
AS_NARROW = (nn.Bilinear,)  # an autocast of fp32 weights gives them 16-bit inputs, too


def compute_in_autocast(chunks: Mapping[int, nn.Module], last: int, kind: str, dtype: torch.dtype) -> None:
    """Run the forwards of a model's chunks in autocast, in place.

    last  the number of the pipeline's last chunk, whose outputs are the model's
    """
    for number, chunk in chunks.items():
        for module in chunk.modules():
            _fit_weights(module)
        finish = _in_fp32 if number == last else _handing_on(number, dtype)
        in_autocast(chunk, kind, dtype, finish, cached=False)  # weights are not cast


def in_autocast(
    module: nn.Module,
    kind: str,
    dtype: torch.dtype,
    finish: Callable[[Any], Any] = lambda output: output,
    cached: bool = True,
) -> None:
    """Run a module's forward in autocast until `out_of_autocast`, then `finish` with its output.

    cached  keep casts of fp32 parameters until the forward ends
    """
    forward, own = module.forward, vars(module).get("forward")

    @wraps(forward)
    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(kind, dtype=dtype, cache_enabled=cached):
            output = forward(*args, **kwargs)
        return finish(output)

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


def given_in(autocast: bool, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Return the cast of a model's floating inputs."""
    return without_fp64 if autocast else lambda t: t.to(dtype)


def _in_fp32(output: Any) -> Any:
    return map_tensors(output, lambda t: t.float() if t.is_floating_point() and t.itemsize == 2 else t)


def _handing_on(number: int, dtype: torch.dtype) -> Callable[[Any], Any]:
    def checked(output: Any) -> Any:
        for t in tensors_out(output):
            if t.is_floating_point() and t.dtype != dtype and t.requires_grad:
                raise ConfigError(
                    f"autocast=True: model chunk {number} of the pipeline hands on {t.dtype} where stages send "
                    f"{dtype}: pass autocast=False (autocast: false), or pp=1."
                )
        return output

    return checked


def keep_statistics_in_fp32(chunks: Mapping[int, nn.Module], dtype: torch.dtype) -> None:
    """Have norms with statistics of a batch compute with weights in the dtype of these, in place.

    Statistics stay in fp32, and torch takes no weights in 16 bits beside them.
    """
    for chunk in chunks.values() if dtype.itemsize == 2 else ():
        for module in chunk.modules():
            if isinstance(module, _NormBase) and module._parameters.get("weight") is not None:
                module.forward = _with_wide_weights(module)


def _with_wide_weights(module: nn.Module) -> Callable[..., Any]:
    forward = module.forward

    @wraps(forward)
    def wide(*given: Any, **named: Any) -> Any:
        own, mean = module._parameters, module._buffers.get("running_mean")
        dtype = torch.float32 if mean is None else mean.dtype  # of statistics that came in 16 bits, these
        vars(module)["_parameters"] = {name: None if p is None else p.to(dtype) for name, p in _read(module, own)}
        try:
            return forward(*given, **named)
        finally:
            vars(module)["_parameters"] = own

    return wide


def _read(module: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield a module's parameters as its forward reads them, which gathers what is not there."""
    return ((name, getattr(module, name)) for name in names)


def _fit_weights(module: nn.Module) -> None:
    """Let a norm take inputs that are wider than its weights, in place."""
    normalise, forward = NORMALISES.get(type(module)), module.forward
    weight: Tensor | None = module._parameters.get("weight")
    if weight is None or not (normalise or isinstance(module, AS_NARROW)):
        return

    @wraps(forward)
    def fitted(*given: Any, **named: Any) -> Any:
        weight: Any = module.weight
        x = given[0] if given else named["input"]
        if weight is None or x.dtype == weight.dtype:
            return forward(*given, **named)
        if normalise is None:
            given, named = map_tensors((given, named), lambda t: t.to(weight.dtype))
            return forward(*given, **named)
        bias: Any = module.bias
        return normalise(module, x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    module.forward = fitted
