"""One optimizer step: whether it is due, the update, and what follows from its outcome.

due?  no   nothing changes
      yes  weight of the micro-batches, reductions that are left, update; then gradients are forgotten, and
           loss scale, count of steps, schedule and the count of non-finite steps follow
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.agreement import name_ranks
from zero3d.distributed.collectives import Comm, broadcast_ints
from zero3d.engine.averages import Averages
from zero3d.engine.health import Health
from zero3d.engine.statistics import RunningStatistics
from zero3d.engine.summation import SumOrder
from zero3d.errors import ConfigError
from zero3d.expert_parallel.load import ExpertLoad
from zero3d.precision import LossScale
from zero3d.zero.accumulation import Accumulation
from zero3d.zero.gathers import Gathers
from zero3d.zero.hooks import SAVE, Hooks
from zero3d.zero.optimizer import APPLIED, NAN_LOSS, NOT_DUE, OVERFLOW, ShardedOptimizer, StepResult
from zero3d.zero.reductions import Reductions


class StepFigures(NamedTuple):
    """A step's result as plain numbers, from the one read of the device that it needs anyway.

    loss_scale, lr, applied, grad_norm  as in `StepResult`
    besides                             what the caller of the step wanted to know with them
    """

    applied: bool
    grad_norm: float
    loss_scale: float
    lr: float
    besides: list[float]


@dataclass
class Stepper:
    """Applies a step when it is due, and forgets one that died.

    count    applied steps so far
    figures  of the last boundary
    """

    dp: Comm
    world: Comm
    order: SumOrder
    accumulation: Accumulation
    gathers: Gathers
    reductions: Reductions
    hooks: Sequence[Hooks]
    optimizer: ShardedOptimizer
    scheduler: Any
    loss_scale: LossScale
    health: Health
    master: torch.dtype
    expert_load: ExpertLoad
    statistics: RunningStatistics
    averages: Averages | None = None
    count: int = 0
    figures: StepFigures | None = None
    _known: dict[str, tuple[float, Tensor]] = field(default_factory=dict)

    def step(self, besides: Tensor | None = None) -> StepResult:
        """Apply the step if it is due; `besides` [k] float64 is read on the host with it.

        Raises ConfigError, OrderError, NonFiniteError.
        """
        lr = float(self.optimizer.torch.param_groups[0]["lr"])
        if not self.accumulation.reached:
            if self.accumulation.count == 0 and self.reductions.pending:
                raise ConfigError(
                    "there are gradients, but no backward went through the model's own forward (only through "
                    "submodules), so no micro-batch was counted: call the model, or engine.backward(loss, last=True)."
                )
            return self._result(NOT_DUE, self._constant("no norm", math.nan, self.master), lr)
        nan = self.accumulation.nan
        try:
            weight = self.accumulation.poison(self.order.end(self.accumulation))
        except ConfigError:
            self.abandon()
            raise
        self.reductions.catch_up()
        if not self.reductions.adopted and self.dp.size > 1:
            self.reductions.adopt(broadcast_ints(self.dp, self.reductions.observed()))
        try:
            outcome = self.optimizer.step(weight, self.loss_scale.value, besides)
            self.expert_load.close(trained=outcome.reason == APPLIED)
        finally:
            self.reset()  # whatever is still gathered holds the weights of before
        self.statistics.share()
        self.health.count(outcome.reason)
        self.loss_scale.update(outcome.reason == OVERFLOW)
        if outcome.reason == APPLIED:
            self.count += 1
            self.expert_load.level(self.optimizer.tallied)
            if self.averages is not None:
                self.averages.update()
            if self.scheduler is not None:
                self.scheduler.step()
        applied = outcome.reason == APPLIED
        self.figures = StepFigures(applied, outcome.host_norm, self.loss_scale.value, lr, outcome.besides)
        reason = self._why(nan) if outcome.reason == OVERFLOW else outcome.reason
        for of_chunk in self.hooks:
            of_chunk.without_weights.clear()
        return self._result(reason, outcome.norm, lr)

    def _why(self, nan: Tensor | None) -> str:
        """Return the reason of a step whose norm is not finite, with the ranks whose loss was NaN.

        All ranks call it; 8 bytes to each other rank.
        """
        mine = torch.zeros((), dtype=torch.float64, device=self.dp.device) if nan is None else nan.double()
        told = self.world.read(self.world.exchange(mine.view(1)).view(-1), [0.0] * self.world.size)
        ranks = [rank for rank, flag in enumerate(told) if flag]
        if not ranks:
            unseen = sorted(name for of_chunk in self.hooks for name in of_chunk.without_weights)
            return f"{OVERFLOW}, after a backward of {unseen[0]!r} without its weights. {SAVE}" if unseen else OVERFLOW
        released = any(of_chunk.saved is not None for of_chunk in self.hooks)
        return (
            f"{NAN_LOSS} on {name_ranks(ranks)}: all labels there may be -100, and a mean over no targets is NaN (pass "
            "the number of targets: engine.backward(loss, weight=n), with loss 0 where n is 0, or call train_batch)"
            + "; or, at stage 3, a forward goes through parameters() of a module that it does not call"
            * released
        )

    def reset(self) -> None:
        """Forget the gradients and micro-batches of this step, and release all units."""
        self.reductions.reset()
        self.accumulation.reset()
        self.order.reset()
        self.gathers.drop(lambda token: True)

    def abandon(self) -> None:
        """Forget a step whose forward or backward died."""
        for of_chunk in self.hooks:
            of_chunk.abandon()
        self.expert_load.close(trained=False)
        self.order.reset()

    def _result(self, reason: str, norm: Tensor, lr: float) -> StepResult:
        applied = self._constant(f"applied {reason == APPLIED}", reason == APPLIED, torch.bool)
        scale = self._constant("loss scale", self.loss_scale.value, torch.float32)
        return StepResult(applied, norm, scale, self._constant("lr", lr, torch.float64), reason)

    def _constant(self, name: str, value: float, dtype: torch.dtype) -> Tensor:
        """Return a number on the device: filled in there, which waits for nothing, and only where it has changed."""
        known = self._known.get(name)
        if known is None or (known[0] != value and not (math.isnan(known[0]) and math.isnan(value))):
            known = self._known[name] = value, torch.full((), value, dtype=dtype, device=self.dp.device)
        return known[1]
