"""Copies of modules, with other modules and tensors in their place."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def copy_with(model: nn.Module, replaced: Mapping[nn.Module | Tensor, object]) -> Any:
    """Copy the modules of a model, but for those `replaced` by something else; tensors are shared."""
    memo: dict[int, object] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    memo |= {id(old): new for old, new in replaced.items()}
    return copy.deepcopy(model, memo)


def on_meta(model: nn.Module) -> Any:
    """Copy a model without the data of its tensors. What is tied stays so, which `Module.to` does not see to."""
    return copy_with(model, {t: _on_meta(t) for t in (*model.parameters(), *model.buffers())})


def without_weights(model: nn.Module) -> dict[nn.Module | Tensor, object]:
    """Return what stands in the place of a model's tensors in a copy that takes no memory, by the tensor."""
    return {t: _weightless(t) for t in (*model.parameters(), *model.buffers())}


def _on_meta(t: Tensor) -> Tensor:
    made = t.detach().to("meta")
    return nn.Parameter(made, requires_grad=t.requires_grad) if isinstance(t, nn.Parameter) else made


def _weightless(t: Tensor) -> Tensor:
    """Return zeros of this shape and dtype on the CPU, for a parameter in the memory of one element.

    Buffers have memory of their own, since forwards write to them; those of numbers are ones, since rotary
    frequencies of zero would make all positions alike.
    """
    if not isinstance(t, nn.Parameter):
        return torch.full(t.shape, float(t.is_floating_point())).to(t.dtype)
    return torch.zeros((), dtype=t.dtype).expand(t.shape).requires_grad_(t.is_floating_point())
