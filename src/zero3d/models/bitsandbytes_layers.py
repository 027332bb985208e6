"""Layers of bitsandbytes in a model that somebody has loaded (`from_pretrained` with a BitsAndBytesConfig): taken over.

    Linear4bit      weight [n/2, 1] uint8, its state an attribute of it    becomes QuantisedLinear of nf4, nf4-double
    Linear8bitLt    weight [out, in] int8, SCB [out]                       becomes QuantisedLinear of int8

A state that is an attribute is sharded by nobody: every rank would keep all maxima. So Trainer, TRL, Axolotl and
Accelerate, which load a model in their own way, train what `model.quantize` makes, of the same codes and scales. What
Linear8bitLt does to activations is not done. The new layers stay when an engine is closed: the library's are let go of,
since their bytes are whole on every rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.quantised import WEIGHT, QuantisedLinear
from zero3d.models.quantised_folders import Stored, find_bitsandbytes
from zero3d.shards.boxes import Box, slices, whole

LIBRARY, FOUR, EIGHT = "bitsandbytes.", "Linear4bit", "Linear8bitLt"
NAMES = {
    torch.uint8: "U8", torch.int8: "I8", torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32",
}  # fmt: skip


def take_over(model: nn.Module, dtype: torch.dtype) -> int:
    """Replace a model's layers of bitsandbytes, in place; return how many there were.

    dtype  that the model computes in
    Raises ConfigError for layers whose weights are not quantised yet, or in another layout than nf4's.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_theirs(module)]
    for name, module in found:
        stored = _stored(name, module)
        packed = stored.read(whole(stored.codec.format.packed_shape(stored.shape)))
        parent, _, local = name.rpartition(".")
        model.get_submodule(parent)._modules[local] = QuantisedLinear(module, stored.codec, dtype, packed)
    return len(found)


def _is_theirs(module: nn.Module) -> bool:
    kind = type(module)
    return kind.__module__.startswith(LIBRARY) and kind.__name__ in (FOUR, EIGHT)


def _stored(name: str, module: Any) -> Stored:
    """Return a layer's matrix in its groups."""
    weight = module.weight
    state = getattr(weight, "quant_state", None)
    key = f"{name}.{WEIGHT}"
    tensors: dict[str, Tensor] = {key: weight.data}
    if state is not None:
        tensors |= {f"{key}.{beside}": value for beside, value in state.as_dict(packed=True).items()}
    elif (maxima := getattr(weight, "SCB", None)) is not None:
        tensors[f"{name}.SCB"] = maxima
    matrices, _ = find_bitsandbytes(_OfLayer(tensors))
    found = matrices.get(key)
    if not isinstance(found, Stored):
        raise ConfigError(
            f"{name} is a {type(module).__name__} of bitsandbytes whose weight is {weight.dtype}, not quantised yet: "
            "load the model with from_pretrained(..., quantization_config=BitsAndBytesConfig(...)), or move it to its "
            "device first."
        )
    return found


class _OfLayer:
    """A layer's tensors by key, as a folder would have them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Collection[str]:
        """Return the keys of all tensors."""
        return self._tensors.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._tensors[key].shape)

    def dtype(self, key: str) -> str:
        """Return the dtype of a tensor, as safetensors calls it."""
        return NAMES[self._tensors[key].dtype]

    def box(self, key: str, box: Box) -> Tensor:
        """Return the values in a box of a tensor."""
        return self._tensors[key].detach()[slices(box)]

    def tensor(self, key: str) -> Tensor:
        """Return a tensor."""
        return self._tensors[key].detach()
