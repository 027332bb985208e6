"""The learning rate over a run, also over one that goes on from a checkpoint with other settings.

    cosine, linear   from the peak to `final` over all steps after warm-up
    constant         the peak
    wsd              the peak (stable), then 1 - sqrt to `final` over the last `decay` steps
    inverse_sqrt     the peak times the root of warm-up steps over steps, for as long as it is trained
    WarmupLR, ...    DeepSpeed's (deepspeed_schedules.py)

Until the decay begins, wsd does not depend on how many steps a run has: one that is resumed from there with more
steps has the rates of one that was begun with them. The same holds for inverse_sqrt and constant throughout, where
warm-up is given in steps.

wsd: Hu et al., "MiniCPM" (2024), section 4, where a tenth of the steps is enough for the decay; its shape is the
1 - sqrt of Haegele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training Durations" (2024).
inverse_sqrt: Vaswani et al., "Attention Is All You Need" (2017), section 5.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from zero3d.config import Schedule
from zero3d.config.deepspeed_schedules import OPTIONS
from zero3d.train.setup.deepspeed_schedules import CycleOfBetas, deepspeed_betas, deepspeed_rate


def rate(choice: Schedule, steps: int, peak: float) -> Callable[[int], float]:
    """Return the factor on the `peak` learning rate at step 0, 1, ... of `steps`: linear warm-up, then the named shape.

    The last step of cosine, linear and wsd has exactly `final`.
    """
    warm = steps_of_share(choice.warmup, steps)
    if choice.name in OPTIONS:
        absolute = deepspeed_rate(choice.name, choice.options or {}, peak, steps, warm)
        return lambda step: absolute(step) / peak
    decay = steps - warm
    if choice.name == "wsd":
        decay = min(decay, max(steps_of_share(choice.decay, steps), 1))
    falls = max(steps - decay, warm)  # the first step of the decay

    def shape(done: float) -> float:
        if choice.name == "wsd":
            left = 1.0 - math.sqrt(done)
        else:
            left = 1.0 - done if choice.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return choice.final + (1.0 - choice.final) * left

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        if choice.name == "inverse_sqrt":
            return math.sqrt(max(warm, 1) / (step + 1))
        if choice.name == "constant" or step < falls:
            return 1.0
        return shape(min((step - falls + 1) / max(decay, 1), 1.0))

    return factor


def steps_of_share(share: float, steps: int) -> int:
    """Return a number of steps that is given as such, or below 1 as a fraction of all steps."""
    return round(share * steps) if share < 1 else int(share)


def scheduler(choice: Schedule, steps: int, peak: float) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return a builder of torch's scheduler with these rates, of which `peak` is the highest."""
    betas = deepspeed_betas(choice.name, choice.options or {})
    if betas is None:
        return lambda optimizer: LambdaLR(optimizer, rate(choice, steps, peak))
    return lambda optimizer: CycledBetas(optimizer, rate(choice, steps, peak), betas)


class CycledBetas(LambdaLR):
    """Moves the betas of every group, too."""

    def __init__(self, optimizer: torch.optim.Optimizer, factor: Callable[[int], float], betas: CycleOfBetas) -> None:
        self._betas = betas
        super().__init__(optimizer, factor)

    def step(self, epoch: int | None = None) -> None:
        """Go on by one step."""
        super().step(epoch)
        self.move_betas()

    def move_betas(self) -> None:
        """Give every group the betas of the current step."""
        for group in self.optimizer.param_groups:
            group["betas"] = self._betas.at(self.last_epoch) if self.last_epoch else self._betas.first

    def get_mom(self) -> list[tuple[float, float]]:
        """Return the cycle's betas for every group, as DeepSpeed's OneCycle does: at step 0 groups have others yet."""
        return [self._betas.at(self.last_epoch) for _ in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return its place."""
        return {key: value for key, value in super().state_dict().items() if key != "_betas"}


def group_settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the settings of each parameter group: peak learning rate, betas, eps, weight decay."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def reset_settings(
    optimizer: torch.optim.Optimizer, schedule: LambdaLR, settings: list[dict[str, Any]], factor: Callable[[int], float]
) -> None:
    """Give an optimizer other settings after a checkpoint was loaded; its moments and place in the schedule stay."""
    schedule.lr_lambdas = [factor] * len(settings)
    schedule.base_lrs = [group["initial_lr"] for group in settings]
    schedule._last_lr = [peak * factor(schedule.last_epoch) for peak in schedule.base_lrs]
    for group, setting, lr in zip(optimizer.param_groups, settings, schedule._last_lr, strict=True):
        group.update(setting | {"lr": lr})
    if isinstance(schedule, CycledBetas):
        schedule.move_betas()
