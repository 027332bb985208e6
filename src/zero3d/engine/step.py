"""One optimizer step: whether it is due, the update, and what follows from its outcome.

due?  no   nothing changes
      yes  weight of the micro-batches, reductions that are left, update; then gradients are forgotten, and what follows
           from the outcome has this order:

           count of steps   it is how far the states are, whatever fails behind it
           features         in the order of features.py, before
           loss scale       an overflow makes it fall, and features ask whether it still could
           schedule         the next step's; what came before used this one's

A norm that is asked for before is computed then, and the step takes it: between them no gradient may come, and
`leave_out` forgets the step instead. The arithmetic (norm, clipping, masters) is `measure` and `update` of
`ShardedOptimizer` (zero/optimizer.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.agreement import name_ranks
from zero3d.distributed.collectives import broadcast_ints
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError, Zero3dError
from zero3d.precision import torch_dtype
from zero3d.zero.hooks import SAVE
from zero3d.zero.optimizer import APPLIED, NAN_LOSS, NOT_DUE, OVERFLOW, Measured, Outcome, StepResult

MOST_UNDER_WAY = 3  # of a unit: a gather, a reduction, the gather of its sum
_WITHOUT_WEIGHT, _LOST, _NO_WEIGHT = 1.0, 2.0, 3.0  # a rank's NaN loss of weight 0, of another weight; a bad weight


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

    scheduler  is stepped after applied steps; None where there is none
    count      applied steps so far
    figures    of the last boundary
    """

    parts: Runtime
    scheduler: Any
    features: Sequence[Feature] = ()
    count: int = 0
    figures: StepFigures | None = None
    _measured: Measured | None = None  # of the step that is due, where its norm was asked for before it
    _known: dict[str, tuple[float, Tensor]] = field(default_factory=dict)

    def step(self, besides: Tensor | None = None) -> StepResult:
        """Apply the step if it is due; `besides` [k] float64 is read on the host with it.

        Raises ConfigError, OrderError, NonFiniteError.
        """
        optimizer, loss_scale = self.parts.optimizer, self.parts.loss_scale
        lr = float(optimizer.torch.param_groups[0]["lr"])
        if not self._is_due():
            return self._result(NOT_DUE, self._no_norm, lr)
        known, accumulation = self._measured, self.parts.accumulation
        measured = known or self._measure()
        nan, nans, weights = accumulation.nan, accumulation.nans, accumulation.weights
        try:
            if known is not None and self.parts.reductions.pending:
                raise ConfigError(
                    "gradients of a submodule have come after the gradient norm of their step was computed: call "
                    "backward before clip_grad_norm_ or engine.grad_norm()."
                )
            outcome = optimizer.update(measured, besides)
        finally:
            self.reset()  # whatever is still gathered holds the weights of before
        applied = outcome.reason == APPLIED
        self.count += applied
        for feature in self.features:
            feature.after_update(outcome)
        loss_scale.update(outcome.reason == OVERFLOW)
        if applied and self.scheduler is not None:
            self.scheduler.step()
        self.figures = StepFigures(applied, outcome.host_norm, loss_scale.value, lr, outcome.besides)
        reason = self._why(nan, nans, weights) if outcome.reason == OVERFLOW else outcome.reason
        for of_chunk in self.parts.hooks:
            of_chunk.without_weights.clear()
        return self._result(reason, outcome.norm, lr)

    def norm(self) -> Tensor:
        """Return the norm of the gradients of the step that is due, which `step` then takes; NaN where none is."""
        if not self._is_due():
            return self._no_norm
        if self._measured is None:
            self._measured = self._measure()
            self.parts.accumulation.closed = True
        return self._measured.norm

    def _is_due(self) -> bool:
        """Return whether the boundary is reached. Raises ConfigError where gradients are of no micro-batch."""
        accumulation = self.parts.accumulation
        if not accumulation.reached and accumulation.count == 0 and self.parts.reductions.pending:
            raise ConfigError(
                "there are gradients, but no backward went through the model's own forward (only through "
                "submodules), so no micro-batch was counted: call the model, or engine.backward(loss, last=True)."
            )
        return accumulation.reached

    def _measure(self) -> Measured:
        """Reduce what is left of the step's gradients, and compute their norm; a failure forgets the step."""
        dp, accumulation, reductions = self.parts.axes.dp, self.parts.accumulation, self.parts.reductions
        try:
            weight = self.parts.order.end(accumulation)
            reductions.catch_up()
            if not reductions.adopted and dp.size > 1:
                reductions.adopt(broadcast_ints(dp, reductions.observed()))
            return self.parts.optimizer.measure(weight, self.parts.loss_scale.value, accumulation.nan)
        except BaseException:
            self.abandon()
            raise

    def _why(self, nan: Tensor | None, nans: Sequence[Tensor], weights: Sequence[float | Tensor]) -> str:
        """Return the reason of a step whose norm is not finite, with the ranks whose loss or weight was not.

        All ranks call it; 8 bytes to each other rank.
        """
        axes, hooks = self.parts.axes, self.parts.hooks
        lost = torch.stack([each.double() for each in nans]).amax() if nans else 0.0
        mine = torch.zeros((), dtype=torch.float64, device=axes.dp.device)
        mine += _WITHOUT_WEIGHT * lost if nan is None else torch.where(nan, _LOST, _WITHOUT_WEIGHT * lost)
        if of_device := [weight.to(mine) for weight in weights if isinstance(weight, Tensor)]:  # others were checked
            values = torch.stack(of_device)
            mine = torch.where((values.isfinite() & (values >= 0)).all(), mine, _NO_WEIGHT)
        told = axes.world.read(axes.world.exchange(mine.view(1)).view(-1), [0.0] * axes.world.size)
        worst = max(told)
        if not worst:
            unseen = sorted(name for of_chunk in hooks for name in of_chunk.without_weights)
            return f"{OVERFLOW}, after a backward of {unseen[0]!r} without its weights. {SAVE}" if unseen else OVERFLOW
        ranks = name_ranks([rank for rank, flag in enumerate(told) if flag == worst])
        if worst == _NO_WEIGHT:
            return (
                f"{OVERFLOW}, with a weight on {ranks} that is NaN, infinite or negative: pass the number of targets."
            )
        if worst == _WITHOUT_WEIGHT:
            return (
                f"{NAN_LOSS} on {ranks}, of weight 0, and gradients may be NaN with it: where there is no target pass "
                "a loss of 0, such as output.sum() * 0, or sums: engine.backward_sum(total, weight=n)"
            )
        released = any(of_chunk.saved is not None for of_chunk in hooks)
        return (
            f"{NAN_LOSS} on {ranks}: all labels there may be -100, and a mean over no targets is NaN (pass "
            "the number of targets: engine.backward(loss, weight=n), with loss 0 where n is 0, or call train_batch)"
            + "; or, at stage 3, a forward goes through parameters() of a module that it does not call"
            * released
        )

    def leave_out(self) -> None:
        """Forget this step; one whose norm was computed, and is not finite, counts as skipped: the loss scale falls."""
        measured = self._measured
        self.parts.axes.dp.note_steps(left_out=int(measured is not None or self.parts.accumulation.count > 0))
        self.abandon()
        if measured is None or isfinite(norm := self.parts.optimizer.leave_out(measured)):
            return
        outcome = Outcome(OVERFLOW, measured.norm, norm, [])
        for feature in self.features:
            feature.after_update(outcome)
        self.parts.loss_scale.update(overflow=True)

    def reset(self) -> None:
        """Forget the gradients and micro-batches of this step, and release all units."""
        self._measured = None
        self.parts.reductions.reset()
        self.parts.accumulation.reset()
        self.parts.order.reset()
        self.parts.gathers.drop(lambda token: True)

    def abandon(self) -> None:
        """Forget a step whose forward or backward died.

        Where a peer is lost, whatever was under way with it raises once when it is waited for: that is no news.
        """
        self._measured = None
        for of_chunk in self.parts.hooks:
            for _ in range(MOST_UNDER_WAY * len(self.parts.units) + 1):
                try:
                    of_chunk.abandon()
                except (Zero3dError, RuntimeError):
                    continue  # what it has waited for is over now
                break
        for feature in self.features:
            feature.abandoned()
        self.parts.order.reset()

    def _result(self, reason: str, norm: Tensor, lr: float) -> StepResult:
        applied = self._constant(f"applied {reason == APPLIED}", reason == APPLIED, torch.bool)
        scale = self._constant("loss scale", self.parts.loss_scale.value, torch.float32)
        return StepResult(applied, norm, scale, self._constant("lr", lr, torch.float64), reason)

    @property
    def _no_norm(self) -> Tensor:
        return self._constant("no norm", math.nan, torch_dtype(self.parts.policy.master))

    def _constant(self, name: str, value: float, dtype: torch.dtype) -> Tensor:
        """Return a number on the device: filled in there, which waits for nothing, and only where it has changed."""
        known = self._known.get(name)
        if known is None or (known[0] != value and not (math.isnan(known[0]) and math.isnan(value))):
            known = self._known[name] = value, torch.full((), value, dtype=dtype, device=self.parts.axes.dp.device)
        return known[1]
