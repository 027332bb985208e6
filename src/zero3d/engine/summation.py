"""The order in which the gradients, losses and weights of a step's micro-batches are summed.

RankOrder    micro-batches as each rank runs them, then (or, reduced after each, before) dp ranks by number
ExactOrder   one binary tree over the global list of micro-batches, whatever the number of ranks (zero/exact/)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero3d.blueprint.policy import Policy
from zero3d.distributed.collectives import Comm, broadcast_ints
from zero3d.distributed.mesh import Mesh
from zero3d.pipeline.chunks import SumAndWeight
from zero3d.zero.accumulation import Accumulation
from zero3d.zero.exact.gradients import ExactGradients
from zero3d.zero.exact.optimizer import ExactOptimizer
from zero3d.zero.exact.summands import Summands
from zero3d.zero.gradients import Gradients
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.reductions import Closes, Reductions
from zero3d.zero.unit import MakeGradients, Unit, units_of


class SumOrder(Protocol):
    """Interface of an order of summation, for an engine.

    summands   numbers of micro-batches in the global list, where the order follows them
    gradients  makes the owner of a unit's gradients
    optimizer  makes the optimizer, from the arguments of `ShardedOptimizer`
    closes     the event after which `Reductions` takes local gradients as one summand
    draw       called before a forward with the number of this rank's micro-batch, in a pipeline that of the model
               chunk, too; None where nothing depends on them
    """

    @property
    def summands(self) -> Summands | None: ...

    @property
    def gradients(self) -> MakeGradients: ...

    @property
    def optimizer(self) -> Callable[..., ShardedOptimizer]: ...

    @property
    def closes(self) -> Closes: ...

    @property
    def draw(self) -> Callable[..., None] | None: ...

    def begin(self, micro_batches: Sequence[Any]) -> None:
        """Expect a step of these micro-batches. Raises ConfigError."""

    def reset(self) -> None:
        """Forget the step under way: the next one may have as many micro-batches as `accumulate` says."""

    def close(self, reductions: Reductions, units: Sequence[Unit], chunk: nn.Module) -> None:
        """Take a micro-batch's gradients of a model chunk as complete."""

    def end(self, accumulation: Accumulation) -> float | Tensor:
        """Return the weight of this rank's micro-batches as the optimizer takes it. Raises ConfigError."""

    def sum_of(self, sums: Sequence[SumAndWeight], micro_batches: int, trained: bool) -> Tensor:
        """Return [2] sum and weight over the dp axis; `sums` are of all this rank's micro-batches, or of none."""


class RankOrder:
    """Sums what ranks have in the order of their numbers."""

    summands = None
    gradients = Gradients
    optimizer = ShardedOptimizer
    closes = Closes.NOTHING
    draw = None

    def __init__(self, dp: Comm) -> None:
        self._dp = dp

    def begin(self, micro_batches: Sequence[Any]) -> None: ...

    def reset(self) -> None: ...

    def close(self, reductions: Reductions, units: Sequence[Unit], chunk: nn.Module) -> None: ...

    def end(self, accumulation: Accumulation) -> float | Tensor:
        return accumulation.weight

    def sum_of(self, sums: Sequence[SumAndWeight], micro_batches: int, trained: bool) -> Tensor:
        both = torch.zeros(2, dtype=torch.float64, device=self._dp.device)
        for total, weight in sums:
            both[0] += total.detach().double()
            both[1] += weight
        return self._dp.exchange(both).sum(0)


class ExactOrder:
    """Sums in the tree over the global list; every micro-batch's gradients are closed before the next one's come."""

    def __init__(self, summands: Summands, pipelined: bool, ep: int | None) -> None:
        self.summands = summands
        self.gradients = partial(ExactGradients, summands)
        self.optimizer = partial(ExactOptimizer, summands, ep)
        self.closes = Closes.CHUNK if pipelined else Closes.BACKWARD
        self.draw = summands.draw

    def begin(self, micro_batches: Sequence[Any]) -> None:
        self.summands.begin(len(micro_batches))
        self.summands.see(micro_batches[:1])

    def reset(self) -> None:
        self.summands.begin()

    def close(self, reductions: Reductions, units: Sequence[Unit], chunk: nn.Module) -> None:
        reductions.close([unit for unit in units_of(chunk, units) if unit.grads is not None])

    def end(self, accumulation: Accumulation) -> float | Tensor:
        """Return [M], the weight of each micro-batch."""
        self.summands.end(accumulation.count)
        device = self.summands.comm.device
        weights = [
            weight.to(device, torch.float64)
            if isinstance(weight, Tensor)
            else torch.full((), weight, dtype=torch.float64, device=device)
            for weight in accumulation.weights
        ]
        return torch.stack(weights)

    def sum_of(self, sums: Sequence[SumAndWeight], micro_batches: int, trained: bool) -> Tensor:
        """What is only evaluated is dealt out to ranks one by one, however gradients are reduced."""
        return self.summands.sum_of(sums, micro_batches, None if trained else False)


def choose_order(mesh: Mesh, policy: Policy, accumulate: int, dp: Comm, world: Comm, has_experts: bool) -> SumOrder:
    """Return the order of an engine; the exact one draws from rank 0's seed on all ranks."""
    if not policy.exact:
        return RankOrder(dp)
    seed = broadcast_ints(world, [torch.initial_seed() % (1 << 52)])[0]
    per_step = not policy.often
    return ExactOrder(Summands(dp, per_step, accumulate, seed, mesh.sp), mesh.pp > 1, mesh.ep if has_experts else None)
