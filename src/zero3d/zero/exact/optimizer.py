"""The step in exact mode: weights summed in the tree, the norm over a fixed grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zero3d.blueprint.layout import CANONICAL
from zero3d.zero.exact.summands import Summands
from zero3d.zero.model_group import Norms
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.updates import MasterPiece


class ExactOptimizer(ShardedOptimizer):
    """Sums weights and the norm in an order that N does not change. `step` takes all micro-batches' weights [M].

    ep  neighbours on dp that share experts out; None for a model without, whose norm has no cells of experts
    """

    def __init__(self, summands: Summands, ep: int | None, *given: Any) -> None:
        self._summands, self._ep = summands, ep
        super().__init__(*given)

    def _exchange(self, weight: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        assert isinstance(weight, Tensor)
        return self._sum_weights(weight)

    def _total(self, weights: Tensor) -> Tensor:
        return self._summands.total(weights)

    def _norms(self, factor: float | Tensor) -> Norms:
        """Unscale all gradients, and return the norms of this rank's cells of the grid, 64/N of them for N shards.

        Each is the norm of the cell's pieces in model order. Behind them are as many norms of experts' cells, which are
        on other ranks where experts are shared out.
        """
        norms = self._unscaled_norms(list(self._in_cells()), factor)
        pieces = sorted(norms, key=lambda piece: (piece.cell, piece.place))
        return self._model_group.norms(pieces, self._cells * (1 if self._ep is None else 2), self._wide)

    @property
    def _cells(self) -> int:
        return CANONICAL // self._shards

    def _in_order(self, norms: Tensor) -> Tensor:
        """Return the norms of all cells by their numbers: neighbours on dp have experts far apart."""
        if self._ep is None:
            return super()._in_order(norms)
        of_experts = norms[:, self._cells :].reshape(-1, self._ep, self._cells).transpose(0, 1)
        return torch.cat([norms[:, : self._cells].flatten(), of_experts.flatten()])

    def _in_cells(self) -> Iterator[tuple[int, MasterPiece, Tensor]]:
        """Yield this rank's reduced gradients, cut at the grid's lines, each part with its cell."""
        for owned, grad in self.shard_grads():
            if owned.unit in self._model_group.copies:
                continue
            layout, shard = owned.unit.layout, owned.unit.gradients.shard
            begin = int(grad.storage_offset() - shard.storage_offset())
            first = self._cells if layout.of_experts else 0
            for cell, low, high in layout.grid_cells(begin, grad.numel()):
                yield first + cell, owned, grad[low:high]
