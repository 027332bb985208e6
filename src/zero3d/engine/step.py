"""A training step on one page: `train_batch`, then `step`, which own loops call behind their backwards.

What is gathered and reduced on the way is called by hooks, unit by unit (zero/hooks.py):

    forward      Weights.gather before a unit's use, Weights.release behind it
    backward     Weights.gather again; Gradients.hold, and Gradients.reduce when all of a unit's have come

A step that is due and decided has this order behind it:

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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.collectives import broadcast_ints
from zero3d.engine.execution import Execution, Pipelined
from zero3d.engine.feature import Feature
from zero3d.engine.features import having
from zero3d.engine.not_finite import why_not_finite
from zero3d.engine.replay.recordings import InStep
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError, Zero3dError
from zero3d.pipeline.chunks import SumAndWeight
from zero3d.precision import torch_dtype
from zero3d.zero.optimizer import APPLIED, NOT_DUE, OVERFLOW, Measured, Outcome, StepResult
from zero3d.zero.step_parts import BACKWARD, BUBBLE, FORWARD, GATHERS, UPDATE

MOST_UNDER_WAY = 3  # of a unit: a gather, a reduction, the gather of its sum


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
    """Runs steps, applies those that are due, and forgets one that died.

    scheduler  is stepped after applied steps; None where there is none
    features   what there is beside training itself, and `execution`, the way through the model: set by `open`
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

    def open(self, execution: Execution) -> None:
        """Be told how micro-batches go through the model."""
        self._execution = execution
        self._features_around = having(self.features, "around")

    def train_batch(
        self,
        batches: Sequence[Any],
        check: Callable[[], None],
        besides: Callable[[], Tensor] | None = None,
        wait: bool = True,
    ) -> tuple[Tensor, StepResult]:
        """Train a step over micro-batches; the mean loss of all ranks and the step's result.

        check    is called before weights change; raises where they may not
        besides  [k] float64 for the host, computed when all gradients have been; `figures` has it
        wait     return with new weights in place
        """
        parts, execution, clocks = self.parts, self._execution, self.parts.clocks
        parts.order.begin(batches)
        with execution.together():  # where one rank fails, none goes on
            with self._forgotten_where_it_fails():
                for feature in self.features:
                    feature.begin(self.count + 1, len(batches))
                if isinstance(execution, Pipelined):  # the same in the order of its schedule
                    sums = execution.run(batches, self._recording)
                else:
                    sums = []
                    for number, batch in enumerate(batches):
                        with self._around(number, batch):
                            with clocks.of(FORWARD):
                                total, weight = execution.loss(execution.forward(batch), batch)  # logits go at once
                            with clocks.of(BACKWARD):
                                execution.backward_sum(total, weight, last=number == len(batches) - 1)
                            sums.append((total.detach(), weight))
                            del total  # and its graph with it, before the update
                for feature in self.features:
                    feature.before_update(execution.apart)
                with clocks.of(UPDATE):  # ranks wait for each other here
                    mean = self.mean(sums, len(batches), trained=True)
                    read = [mean.view(1)] if besides is None else [mean.view(1), besides()]
            check()
            return mean, self.step(torch.cat(read), wait)

    def step(self, besides: Tensor | None = None, wait: bool = True) -> StepResult:
        """Apply the step if it is due; `besides` [k] float64 is read on the host with it.

        Raises ConfigError, OrderError, NonFiniteError.
        """
        optimizer, lr = self.parts.optimizer, float(self.parts.optimizer.torch.param_groups[0]["lr"])
        if not self._is_due():
            return self._nothing_due(lr, wait)
        with self.parts.clocks.of(UPDATE):
            measured = self._measured or self._norm(self._reduce())
            why = self._why_not_finite()
            try:
                self._refuse_late_gradients()
                outcome = optimizer.update(measured, besides)  # clip, the torch optimizer, masters to weights
            finally:
                self.reset()  # whatever is still gathered holds the weights of before
            reason = self._follow(outcome, lr, why)
            if wait:
                with self.parts.clocks.of(GATHERS):
                    optimizer.wait()  # new weights are in place
        self.parts.clocks.end_step()
        return self._result(reason, outcome.norm, lr)

    def norm(self) -> Tensor:
        """Return the norm of the gradients of the step that is due, which `step` then takes; NaN where none is."""
        if not self._is_due():
            return self._no_norm
        if self._measured is None:
            with self.parts.clocks.of(UPDATE):
                self._measured = self._norm(self._reduce())
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

    def _reduce(self) -> float | Tensor:
        """Reduce what is left of the step's gradients; return this rank's sum of weights."""
        dp, accumulation, reductions = self.parts.axes.dp, self.parts.accumulation, self.parts.reductions
        with self._forgotten_where_it_fails():
            weight = self.parts.order.end(accumulation)
            reductions.catch_up()
            if not reductions.adopted and dp.size > 1:
                reductions.adopt(broadcast_ints(dp, reductions.observed()))
            return weight

    def _norm(self, weight: float | Tensor) -> Measured:
        """Compute the norm of what has been reduced."""
        with self._forgotten_where_it_fails():
            return self.parts.optimizer.measure(weight, self.parts.loss_scale.value, self.parts.accumulation.nan)

    def _nothing_due(self, lr: float, wait: bool) -> StepResult:
        if wait:
            self.parts.optimizer.wait()
        return self._result(NOT_DUE, self._no_norm, lr)

    def _follow(self, outcome: Outcome, lr: float, why: Callable[[], str]) -> str:
        """Go on from a step that was applied or skipped; return the reason. why: a norm is not finite."""
        applied, loss_scale = outcome.reason == APPLIED, self.parts.loss_scale
        self.count += applied
        for feature in self.features:
            feature.after_update(outcome)
        loss_scale.update(outcome.reason == OVERFLOW)
        if applied and self.scheduler is not None:
            self.scheduler.step()
        self.figures = StepFigures(applied, outcome.host_norm, loss_scale.value, lr, outcome.besides)
        reason = why() if outcome.reason == OVERFLOW else outcome.reason
        for of_chunk in self.parts.hooks:
            of_chunk.without_weights.clear()
        return reason

    def _why_not_finite(self) -> Callable[[], str]:
        """Return what says why the norm is not finite: after the step's losses and weights are forgotten."""
        accumulation = self.parts.accumulation
        return partial(why_not_finite, self.parts, accumulation.nan, accumulation.nans, accumulation.weights)

    def _refuse_late_gradients(self) -> None:
        if self._measured is not None and self.parts.reductions.pending:
            raise ConfigError(
                "gradients of a submodule have come after the gradient norm of their step was computed: call "
                "backward before clip_grad_norm_ or engine.grad_norm()."
            )

    def mean(self, sums: Sequence[SumAndWeight], micro_batches: int, trained: bool) -> Tensor:
        """Return the mean loss of all ranks, of each micro-batch's sum and weight on this one."""
        waits = BUBBLE if isinstance(self._execution, Pipelined) else UPDATE  # who is through first waits for all here
        with self.parts.clocks.of(waits):
            everywhere = self.parts.model_group.sum(self.parts.order.sum_of(sums, micro_batches, trained))
        return everywhere[0] / everywhere[1]

    # --- features -------------------------------------------------------------------------------

    @contextmanager
    def _around(self, number: int, batch: Any) -> Iterator[None]:
        with ExitStack() as around:
            for feature in self._features_around:
                around.enter_context(feature.around(number, batch, self._execution.apart))
            yield

    @property
    def _recording(self) -> InStep | None:
        return next((feature.recording for feature in self.features if feature.recording is not None), None)

    # --- forgetting -----------------------------------------------------------------------------

    @contextmanager
    def _forgotten_where_it_fails(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.abandon()
            raise

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
