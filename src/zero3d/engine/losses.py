"""From a micro-batch to its loss: what of it the model is given, and what its output weighs.

    micro-batch --forward--> output --sum_and_weight--> (sum of losses, weight)

Sums over all ranks' micro-batches, in the order that the engine sums in, make the global mean (summation.py).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.packing import forward_options
from zero3d.pipeline.chunks import SumAndWeight
from zero3d.precision import at_least_fp32

Loss = Callable[[Any, Any], SumAndWeight]  # (output, batch) -> what the output weighs

IGNORED = -100  # transformers' label of a position that is no target


class Losses:
    """Calls a model with micro-batches, and makes sums of losses and weights of its outputs.

    loss   (output, batch) -> (sum, weight), the caller's own; None for what the output itself says
    takes  keywords of the model's forward, None for any; other entries of a mapping are left for `loss`
    """

    def __init__(self, model: nn.Module, loss: Loss | None) -> None:
        self._loss = loss
        self.takes = _keywords(model)
        self._options = forward_options(model)

    def forward(self, module: nn.Module, batch: Any) -> Any:
        """Call the module: a mapping by name, a list or tuple by position, anything else as the one argument."""
        if isinstance(batch, Mapping):
            taken = {name: value for name, value in batch.items() if self.takes is None or name in self.takes}
            return module(**self._options | taken)
        return module(*batch) if isinstance(batch, (list, tuple)) else module(batch)

    def sum_and_weight(self, output: Any, batch: Any) -> SumAndWeight:
        """Return the sum of a micro-batch's losses and its weight. Raises ConfigError where neither says it."""
        if self._loss is not None:
            return self._loss(output, batch)
        if isinstance(output, Tensor) and output.dim() == 0:
            return at_least_fp32(output), 1.0
        loss = getattr(output, "loss", None)
        labels = batch.get("labels") if isinstance(batch, Mapping) else None
        if loss is None or labels is None:
            raise ConfigError(
                "train_batch and evaluate need a loss: pass Engine(loss=lambda output, batch: (sum, weight)), or "
                "batches with 'labels' for a model whose output has .loss, or a model that returns its mean loss."
            )
        weight = (labels[..., 1:] != IGNORED).sum()
        total = at_least_fp32(loss) * weight
        return torch.where(weight > 0, total, 0.0), weight  # a mean over no target is NaN, its sum is nothing


def _keywords(model: nn.Module) -> frozenset[str] | None:
    """Return the keywords that forward() takes; None when it takes any."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters)
