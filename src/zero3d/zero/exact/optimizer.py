"""The step in exact mode: weights summed in the tree, the norm over a fixed grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from zero3d.zero.exact.summands import Summands
from zero3d.zero.layout import CANONICAL
from zero3d.zero.model_group import Norms
from zero3d.zero.optimizer import ShardedOptimizer, piece_norms
from zero3d.zero.updates import MasterPiece


class ExactOptimizer(ShardedOptimizer):
    """Sums weights and the norm in an order that N does not change. `step` takes all micro-batches' weights [M]."""

    def __init__(self, summands: Summands, *given: Any) -> None:
        self._summands = summands
        super().__init__(*given)

    def _exchange(self, weight: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        assert isinstance(weight, Tensor)
        return self._sum_weights(weight)

    def _total(self, weights: Tensor) -> Tensor:
        return self._summands.total(weights)

    def _norms(self) -> Norms:
        """Return the norms of this rank's cells of the grid, 64/N of them, each that of its pieces in model order."""
        pieces = sorted(piece_norms(list(self._in_cells())), key=lambda piece: (piece.cell, piece.place))
        return self._model_group.norms(pieces, CANONICAL // self._comm.size, self._wide)

    def _in_cells(self) -> Iterator[tuple[int, MasterPiece, Tensor]]:
        """Yield this rank's reduced gradients, cut at the grid's lines, each part with its cell."""
        for owned, grad in self.shard_grads():
            if owned.unit in self._model_group.copies:
                continue
            layout, shard = owned.unit.layout, owned.unit.gradients.shard
            begin = int(grad.storage_offset() - shard.storage_offset())
            for cell, low, high in layout.grid_cells(begin, grad.numel()):
                yield cell, owned, grad[low:high]
