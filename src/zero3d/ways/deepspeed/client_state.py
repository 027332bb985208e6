"""What a program gives to save_checkpoint(client_state=...) as JSON, and back as it was.

    None, bool, int, str, finite float, list, dict with text as keys     themselves
    inf and nan, tuple, dict with other keys, tensor                     {KIND: name, VALUE: what it is made of}

A tensor comes back on the CPU, and has at most MOST elements: the manifest holds it, as text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zero3d.errors import ConfigError, short
from zero3d.precision import dtype_name

KIND, VALUE = "__kind__", "value"
MOST = 100_000  # elements; the state of a random generator has 5,056


def encode(value: Any, name: str = "client_state") -> Any:
    """Return a value as JSON can hold it. Raises ConfigError, which calls it `name`, for what would not come back."""
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else _tagged("float", str(float(value)))
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Tensor) and value.numel() <= MOST and not value.is_complex() and not value.is_quantized:
        flat = [encode(item) for item in value.detach().flatten().tolist()]
        return _tagged("tensor", [dtype_name(value.dtype), list(value.shape), flat])
    if isinstance(value, Tensor):
        raise ConfigError(
            f"{name} is a tensor of {value.dtype} and {value.numel():,} elements, and one of real numbers up to "
            f"{MOST:,} is saved: save it in a file of its own."
        )
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else _tagged("tuple", items)
    if isinstance(value, Mapping):
        items = [[encode(key, f"a key of {name}"), encode(item, f"{name}[{key!r}]")] for key, item in value.items()]
        plain = all(isinstance(key, str) for key in value) and KIND not in value
        return dict(items) if plain else _tagged("dict", items)
    raise ConfigError(
        f"{short(name)} is a {type(value).__name__}, which would not come back as it is: pass numbers, texts, lists, "
        "tuples, dicts and tensors."
    )


def decode(value: Any) -> Any:
    """Return the value that was encoded."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if KIND not in value:
        return {key: decode(item) for key, item in value.items()}
    kind, inner = value[KIND], value[VALUE]
    if kind == "tensor":
        dtype, shape, flat = inner
        return torch.tensor(decode(flat), dtype=getattr(torch, dtype)).reshape(shape)
    decoded = decode(inner)
    return {"float": float, "tuple": tuple, "dict": dict}[kind](decoded)


def _tagged(kind: str, value: Any) -> dict[str, Any]:
    return {KIND: kind, VALUE: value}
