"""The optimizer that a configuration names, and its parameter groups."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from zero3d.config import Optimizer
from zero3d.config.problems import optimizer_arguments
from zero3d.models.names import check_patterns, matches
from zero3d.spec.optimizer import OPTIMIZERS


def optimizer_of(choice: Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Return the builder of the optimizer that a configuration names."""
    make: Callable[..., Callable[[Any], torch.optim.Optimizer]] = resolve_name(OPTIMIZERS[choice.name].call)
    return make(**optimizer_arguments(choice))


def adamw(
    lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a builder of torch's fused AdamW (Loshchilov and Hutter 2019)."""
    return partial(torch.optim.AdamW, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)


def parameter_groups(model: nn.Module, choice: Optimizer) -> list[dict[str, Any]]:
    """Name the parameters that differ from the rest: those without weight decay, and those of `optimizer.groups`.

    Without weight decay are those of `no_decay`, by default all of one dimension (norms and biases), in every group.
    The rest, with the section's own numbers, needs no name where there are no groups. Raises ConfigError for a group
    that names nothing.
    """
    own = choice.groups or ()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_patterns("optimizer.groups", [str(group["match"]) for group in own], list(trained))
    names: dict[tuple[int, bool], list[str]] = {}  # by place of the group in the file (0: in none) and weight decay
    for name, p in trained.items():
        place = next((i for i, group in enumerate(own, 1) if matches(name, str(group["match"]))), 0)
        names.setdefault((place, _decays(name, p, choice.no_decay)), []).append(name)
    if not own:
        names.pop((0, True), None)
    left_out = {"match"} if len(OPTIMIZERS[choice.name].group_names) > 1 else {"match", "name"}
    settings: list[dict[str, Any]] = [{}, *({key: of[key] for key in of if key not in left_out} for of in own)]
    return [
        {"match": "|".join(map(glob.escape, names[place, decays])), **settings[place]}
        | ({} if decays else {"weight_decay": 0.0})
        for place, decays in sorted(names)  # the first group's learning rate is what metrics show
    ]


def _decays(name: str, p: nn.Parameter, without: str | None) -> bool:
    if without is None:
        return p.dim() >= 2
    return not any(fnmatch.fnmatchcase(name, pattern.strip()) for pattern in without.split("|"))
