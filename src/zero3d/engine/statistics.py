"""Running statistics of normalisation layers, which every rank counts from its own micro-batches.

At the end of every step all dp ranks take the first one's, as DistributedDataParallel's ranks do before every forward:
evaluation, exports and checkpoints then have one model, whichever rank they ask. Other buffers stay each rank's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from zero3d.distributed.collectives import Comm
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.zero.optimizer import Outcome


class RunningStatistics(Feature):
    """Shares those of a model's layers."""

    def __init__(self, layers: Sequence[nn.Module], dp: Comm) -> None:
        self._layers, self._dp = layers, dp

    @classmethod
    def opened(cls, parts: Runtime) -> Self | None:
        dp, roots = parts.axes.dp, parts.partition.chunks.values()
        modules = dict.fromkeys(module for root in roots for module in root.modules())
        layers = [module for module in modules if isinstance(module, _NormBase) and module.track_running_stats]
        return cls(layers, dp) if layers and dp.size > 1 else None

    @torch.no_grad()
    def after_update(self, outcome: Outcome) -> None:
        """Take rank 0's: a broadcast for each dtype, 8 bytes a channel and 8 a layer."""
        by_dtype: defaultdict[torch.dtype, list[Tensor]] = defaultdict(list)
        for layer in self._layers:
            for buffer in layer._buffers.values():
                if buffer is not None:
                    by_dtype[buffer.dtype].append(buffer)
        for buffers in by_dtype.values():
            flat = torch.cat([buffer.reshape(-1) for buffer in buffers])
            self._dp.broadcast(flat, "-")
            start = 0
            for buffer in buffers:
                buffer.copy_(flat[start : start + buffer.numel()].view_as(buffer))
                start += buffer.numel()
