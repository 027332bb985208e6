"""The learning rate over a run, also over one that goes on from a checkpoint with other settings."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from zero3d.config import Schedule


def rate(choice: Schedule, steps: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate at step 0, 1, ... of `steps`: a linear warm-up, then the named shape.

    The last step has exactly `final`.
    """
    warm = round(choice.warmup * steps) if choice.warmup < 1 else int(choice.warmup)

    def shape(done: float) -> float:
        if choice.name == "constant":
            return 1.0
        left = 1.0 - done if choice.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return choice.final + (1.0 - choice.final) * left

    def factor(step: int) -> float:
        if step < warm:
            return (step + 1) / warm
        return shape(min((step - warm + 1) / max(steps - warm, 1), 1.0))

    return factor


def scheduler(choice: Schedule, steps: int) -> Callable[[torch.optim.Optimizer], LambdaLR]:
    """Return a builder of torch's scheduler with these rates."""
    return lambda optimizer: LambdaLR(optimizer, rate(choice, steps))


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
