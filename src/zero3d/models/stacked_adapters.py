"""LoRA on a parameter, such as stacked experts: a layer reads the frozen one plus the adapters' product, in a forward.

PEFT does the same by a parametrization, which writes the parameter in place and changes the order of parameters; here
it keeps its place and its memory, so that the weights may be a shard's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import nn


class StackedAdapter(ParamWrapper):  # type: ignore[misc]
    """PEFT's adapter of a parameter [experts, ., .] or [out, in], which leaves that parameter as it is.

    part  the experts that this rank has, of which alone it computes the product
    """

    part: slice = slice(None)

    @contextmanager
    def _activate_lora(self, active_adapters: Sequence[str]) -> Iterator[None]:
        """Let the layer read W + alpha / rank x B A, computed once, where the parameter W is."""
        weights, name = self.get_base_layer()._parameters, self.parameter_name
        frozen = value = weights[name]
        for adapter in active_adapters:
            if value.dim() == 2:
                a, b = self.lora_A[adapter].weight, self.lora_B[adapter].weight
                value = torch.addmm(value, b.to(value.dtype), a.to(value.dtype), alpha=self.scaling[adapter])
                continue
            left, right, scale = self.get_delta_factors(adapter)
            value = torch.baddbmm(value, left[self.part], right[self.part], alpha=scale)
        weights[name] = value
        try:
            yield
        finally:
            weights[name] = frozen


def take_part(model: nn.Module, experts: nn.Module, part: slice) -> None:
    """Let the adapters around a layer's experts add to some of them alone."""
    for module in model.modules():
        if isinstance(module, StackedAdapter) and module.get_base_layer() is experts:
            module.part = part


def keep_parameters(model: nn.Module) -> None:
    """Make every adapter of a parameter one that leaves it in place."""
    for module in model.modules():
        if type(module) is ParamWrapper:
            module.__class__ = StackedAdapter
