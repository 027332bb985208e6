"""Shapes and dtypes of each model chunk's outputs: torch's schedules must know them before the first step.

    hidden state     [batch, length, width]                       of every chunk but the last
    router logits    [layers so far, batch x length, experts]     behind it, for the loss of mixtures of experts
    what else later chunks are given (entry.py)                   behind these, of whole sequences: ranks that share
                                                                  these out take their rows where a decoder begins

How many layers have routers is known where a forward has passed: `router_logits`, which `ForwardOnly` fills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class RouterLogits(NamedTuple):
    """Router logits of all layers so far: how many layers and experts, and their dtype."""

    layers: int
    experts: int
    dtype: torch.dtype


class ChunkOutputs:
    """The outputs of each chunk of a pipeline. Width and dtype are those of `modules`, this rank's chunks.

    own_shape       shape of token ids -> shape of this rank's token ids, a part where ranks share sequences out
    router_logits   by number of a chunk, its outgoing router logits; None where there are none yet
    """

    def __init__(self, modules: Iterable[Any], own_shape: Callable[[Sequence[int]], Sequence[int]] = tuple) -> None:
        modules = list(modules)
        self._own_shape = own_shape
        weight = next(p for module in modules for p in module.parameters() if p.is_floating_point())
        self._dtype = weight.dtype
        self.device = weight.device
        self._width = modules[0].width
        self._crossing = getattr(modules[0], "crossing", None)
        self.loss_dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
        self.router_logits: dict[int, RouterLogits | None] = {}

    def hidden(self, ids_shape: Sequence[int]) -> Tensor:
        """Return an empty hidden state for token ids of this shape."""
        return torch.empty((*self._own_shape(ids_shape), self._width), dtype=self._dtype, device=self.device)

    def leaving(self, chunk: int, ids_shape: Sequence[int]) -> tuple[Tensor, ...]:
        """Return what a chunk hands on for token ids of this shape, on the meta device."""
        shape = *self._own_shape(ids_shape), self._width
        hidden = torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True)
        routed, beside = self.router_logits.get(chunk), self.beside(chunk, ids_shape)
        if routed is None:
            return hidden, *beside
        logits = routed.layers, hidden.shape[:-1].numel(), routed.experts
        return hidden, torch.empty(logits, dtype=routed.dtype, device="meta", requires_grad=True), *beside

    def beside(self, chunk: int, ids_shape: Sequence[int]) -> list[Tensor]:
        """Return what a chunk hands on behind hidden state and router logits, on the meta device, but for integers."""
        if self._crossing is None:
            return []
        shapes = [leaf.shape(ids_shape) for leaf in self._crossing.enters(chunk + 1)]
        return [torch.empty(shape, dtype=self._dtype, device="meta", requires_grad=True) for shape in shapes]

    def facts(self, ids_shape: Sequence[int]) -> int:
        """Return how many integers come behind all of this; they have no gradients."""
        return 0 if self._crossing is None else self._crossing.entry.facts(ids_shape)

    def sizes(self, chunk: int, ids_shape: Sequence[int]) -> list[tuple[int, int]]:
        """Return (elements, bytes of each) of every tensor with a gradient that a chunk hands on."""
        return [(tensor.numel(), tensor.itemsize) for tensor in self.leaving(chunk, ids_shape)]
