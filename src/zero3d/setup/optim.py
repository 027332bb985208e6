"""AdamW's groups and the learning rate over a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from zero3d.config import Optimizer, Schedule


def adamw(choice: Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Fused AdamW (Loshchilov and Hutter 2019) over what the engine gives it."""

    def build(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            params, lr=choice.lr, betas=choice.betas, eps=choice.eps, weight_decay=choice.weight_decay, fused=True
        )

    return build


def decay_groups(model: nn.Module, choice: Optimizer) -> list[dict[str, Any]]:
    """Parameters without weight decay: those `no_decay` names, by default all of one dimension (norms and biases)."""
    match = choice.no_decay
    if match is None:
        match = "|".join(name for name, p in model.named_parameters() if p.dim() < 2)
    return [{"match": match, "weight_decay": 0.0}] if match else []


def rate(choice: Schedule, steps: int) -> Callable[[int], float]:
    """The factor on the peak learning rate at step 0, 1, ... of `steps`: a linear warm-up, then the named shape.

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
    """`rate` on the engine's optimizer."""
    return lambda optimizer: LambdaLR(optimizer, rate(choice, steps))


def settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What a configuration says of each group: peak learning rate, betas, eps, weight decay."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def set_again(
    optimizer: torch.optim.Optimizer, schedule: LambdaLR, wanted: list[dict[str, Any]], factor: Callable[[int], float]
) -> None:
    """After a checkpoint was loaded: its moments and its place in the schedule stay, the settings are `wanted`."""
    schedule.lr_lambdas = [factor] * len(wanted)
    schedule.base_lrs = [group["initial_lr"] for group in wanted]
    schedule._last_lr = [peak * factor(schedule.last_epoch) for peak in schedule.base_lrs]
    for group, setting, lr in zip(optimizer.param_groups, wanted, schedule._last_lr, strict=True):
        group.update(setting | {"lr": lr})
