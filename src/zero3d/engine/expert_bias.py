"""The load of experts in an engine's steps: counted, and where routers have a bias levelled by it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from torch import nn

from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.expert_parallel.load import ExpertLoad, check_bias
from zero3d.zero.optimizer import APPLIED, Outcome, ShardedOptimizer

if TYPE_CHECKING:
    from zero3d.distributed.mesh import Mesh
    from zero3d.engine.options import Options


class ExpertBias(Feature):
    """Ends each step's counts of tokens, and moves biases by them; counts of all ranks travel with the norm.

    load  the counts
    """

    def __init__(self, load: ExpertLoad, optimizer: ShardedOptimizer) -> None:
        self.load, self._optimizer = load, optimizer
        optimizer.tally = load.tally if load.values else None

    @classmethod
    def check(cls, model: nn.Module, mesh: Mesh, options: Options) -> None:
        check_bias(model, options.expert_bias_rate, options.replay)

    @classmethod
    def opened(cls, parts: Runtime) -> Self:
        partition, rate = parts.partition, parts.options.expert_bias_rate
        return cls(ExpertLoad(partition.chunks, partition.expert_layers, parts.axes.dp, rate), parts.optimizer)

    def after_update(self, outcome: Outcome) -> None:
        applied = outcome.reason == APPLIED
        self.load.close(trained=applied)
        if applied:
            self.load.level(self._optimizer.tallied)

    def abandoned(self) -> None:
        self.load.close(trained=False)
