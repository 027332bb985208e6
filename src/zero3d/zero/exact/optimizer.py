"""The step in exact mode: weights summed in the tree, the norm over a fixed grid."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from zero3d.zero.exact.summands import Summands
from zero3d.zero.layout import CANONICAL
from zero3d.zero.optimizer import MasterPiece, ShardedOptimizer


class ExactOptimizer(ShardedOptimizer):
    """Weights and the norm in an order that N does not change. `step` takes all micro-batches' weights [M]."""

    def __init__(self, summands: Summands, *given: Any) -> None:
        self._summands = summands
        super().__init__(*given)

    def _exchange(self, weight: float | Tensor) -> tuple[float | Tensor, Tensor]:
        assert isinstance(weight, Tensor)
        orders = torch.tensor(self._comm.order_values(), dtype=torch.float64, device=weight.device)
        seen = self._comm.exchange(torch.cat([weight, orders]))
        hashes = seen[:, len(weight) :]
        total = self._summands.total(seen[:, : len(weight)])
        rows = self._model_group.exchange(torch.stack([total, (hashes != hashes[0]).any().double()]))
        return self._model_group.count_once(rows)[:, 0].sum(), (rows[:, 1].sum() == 0).double()

    def _norm(self) -> Tensor:
        """Of the norms of 64 segments, each one the norm of its parts in model order; 64/N numbers per rank."""
        own = CANONICAL // self._comm.size
        parts = sorted(self._segment_grads(), key=lambda part: part[:2])
        norms = [(segment, o.order, o.name, torch.linalg.vector_norm(grad)) for segment, _, o, grad in parts]
        wide = self._units[0].weights.master.dtype if self._units else torch.float32
        partials = self._comm.exchange(self._model_group.norms(norms, own, wide).double()).flatten().to(wide)
        norm: Tensor = torch.linalg.vector_norm(partials)
        return torch.where(partials.amin() < 0, partials.amin(), norm)

    def _segment_grads(self) -> Iterator[tuple[int, int, MasterPiece, Tensor]]:
        """This rank's reduced gradients cut at segments: (segment, place in the model, whose, values)."""
        for owned, grad in self.shard_grads():
            if owned.unit in self._model_group.copies:
                continue
            layout, shard = owned.unit.layout, owned.unit.gradients.shard
            begin = int(grad.storage_offset() - shard.storage_offset())
            for segment, low, high in layout.grid_cells(begin, grad.numel()):
                yield segment, owned.order, owned, grad[low:high]
