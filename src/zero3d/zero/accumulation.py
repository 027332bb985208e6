"""When a step is due: counts micro-batches and their weights.

A backward counts one micro-batch when it is the first through at least one root forward; a
further backward of the same forward adds gradients only. The boundary is reached after
`accumulate` micro-batches, or where the caller says `last=True`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zero3d.errors import ConfigError


@dataclass(frozen=True)
class Contribution:
    """What a backward counts for in its step. One that is not announced, a plain `loss.backward()`, has weight 1."""

    weight: float | Tensor = 1.0
    last: bool | None = None


class Accumulation:
    """Owns the progress of the current step on this rank.

    count    micro-batches so far
    usual    micro-batches of the last step; `accumulate` before there was one
    weight   sum of their weights, which are in `weights`
    nan      whether a loss of the step that has a weight is NaN, on its device; None where none was seen
    nans     whether each loss is NaN, one without a weight, too
    reached  the boundary: `step()` will apply
    closed   the norm of the step's gradients is known, so no more may come
    draw     in exact mode: called with the number of a micro-batch before its forward. It has one backward then
    """

    def __init__(
        self, accumulate: int, every_micro_batch: bool, scales_loss: bool, draw: Callable[[int], None] | None = None
    ) -> None:
        self._accumulate = accumulate
        self._every_micro_batch = every_micro_batch
        self._scales_loss = scales_loss
        self._draw = draw
        self._announced: Contribution | None = None
        self._counted = False
        self._of_task: tuple[int, Contribution | None] = -1, None  # of a loss that its caller has scaled
        self.usual = accumulate
        self.count = 0
        self.reached = False
        self.reset()

    def reset(self) -> None:
        """Begin a new step."""
        if self.reached:
            self.usual = self.count
        self.count = 0
        self.nan: Tensor | None = None
        self.nans: list[Tensor] = []
        self.weight: float | Tensor = 0.0
        self.weights: list[float | Tensor] = []
        self._drawn = -1  # the last micro-batch whose forward began
        self.reached = False
        self.closed = False
        self._by_default = False  # the last micro-batch was counted by a plain backward

    @property
    def is_announced(self) -> bool:
        """Whether the backward under way is one whose weight the caller gave."""
        return self._given is not None

    @property
    def _given(self) -> Contribution | None:
        task, contribution = self._of_task
        under_way = task == torch._C._current_graph_task_id()
        return contribution if self._announced is None and under_way else self._announced

    @contextmanager
    def counting(self, announced: Contribution) -> Iterator[None]:
        """Run a backward inside, whose weight and place in the step the caller gives."""
        self._announced, self._counted = announced, False
        try:
            yield
            if announced.last is not None:
                self.reached = announced.last
            if self.reached and self.count == 0:
                self._count(announced)
        finally:
            self._announced = None

    def note_loss(self, loss: Tensor, weight: float | Tensor) -> Tensor:
        """Note whether a loss that has a weight is NaN before its backward, and return it; no device is read."""
        nan = loss.detach().isnan().any()
        self.nans.append(nan)
        if not isinstance(weight, Tensor) and weight == 0:
            return nan
        if isinstance(weight, Tensor):
            nan = nan & weight.to(nan.device, non_blocking=True).bool().any()
        self.nan = nan if self.nan is None else self.nan | nan
        return nan

    def finish(self, micro_batches: int, weights: Sequence[float | Tensor]) -> None:
        """Count a whole step's micro-batches, run by a pipeline; `weights`: of those with their loss on this rank."""
        self.count = micro_batches
        self.weight = sum(weights, 0.0)
        self.reached = True
        self.weights = list(weights) or [0.0] * micro_batches

    def give_in_backward(self, contribution: Contribution) -> None:
        """Set what the backward under way counts for; a hook of its loss, the loss times the loss scale, calls it."""
        self._of_task = torch._C._current_graph_task_id(), contribution

    def forward_begins(self) -> None:
        """Note that a root forward in training begins: of the next micro-batch, or one more of the same."""
        if self._draw is not None and self._drawn != self.count:
            self._drawn = self.count
            self._draw(self.count)

    def backward_begins(self) -> None:
        """Note that a backward reaches an output of a root forward.

        Raises ConfigError for an unscaled one in fp16, and for one after the norm of its step was computed.
        """
        if self.closed:
            raise ConfigError(
                "a backward after the gradient norm of its step was computed (clip_grad_norm_, engine.grad_norm()), "
                "which would not be the norm any more: take the step, optimizer.step(), or forget its gradients, "
                "optimizer.zero_grad(), before the next backward."
            )
        if self._scales_loss and not self.is_announced:
            raise ConfigError(
                "precision='fp16' needs a scaled loss, and a plain loss.backward() has none: small gradients would "
                "become zero. Call engine.backward(loss), or pass precision='bf16'. Where another engine's loss goes "
                "through this model, freeze this model meanwhile, with model.requires_grad_(False)."
            )
        self._counted = False

    def through_root(self, fresh: bool) -> bool:
        """Note that the backward goes through one more root forward, and return whether it ends in a reduction."""
        given = self._given
        contribution = given or Contribution()
        if fresh and not self._counted:
            self._count(contribution)
            self._by_default = given is None
        elif given is not None and self._by_default:
            self.weights[-1] = self.weights[-1] + contribution.weight - 1.0
            self.weight = self.weight + contribution.weight - 1.0  # a partial backward came first and counted 1
            self._by_default = False
        elif self._draw is not None and not self._counted:
            raise ConfigError(
                "exact=True sums one backward per micro-batch, and this one goes through a forward for the second "
                "time: add its losses up and call backward once."
            )
        if contribution.last is not None:
            self.reached = contribution.last
        return self._every_micro_batch or self.reached

    def _count(self, contribution: Contribution) -> None:
        self._counted = True
        self.count += 1
        self.weights.append(contribution.weight)
        self.weight = self.weight + contribution.weight
        if contribution.last is None:
            self.reached = self.count >= self._accumulate


def poisoned(value: float | Tensor, nan: Tensor | None) -> float | Tensor:
    """Return a value, NaN where a loss is: its gradients may be zeros, and would count for the mean.

    nan  a flag on the losses' device, never read from an accelerator; None: there was no loss
    """
    if nan is None or isinstance(nan, FakeTensor):
        return value
    if nan.device.type == "cpu":  # there it is known already
        return value * math.nan if nan.tolist() else value
    if not isinstance(value, Tensor):
        value = torch.full((), value, dtype=torch.float64, device=nan.device)
    return torch.where(nan, math.nan, value.to(nan.device))
