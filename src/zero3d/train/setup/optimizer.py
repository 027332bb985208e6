"""The optimizer that a configuration names, and its parameter groups."""

from __future__ import annotations

import fnmatch
import glob
import re
from collections.abc import Callable
from functools import partial
from pkgutil import resolve_name
from typing import Any

import torch
from torch import nn

from zero3d.config import Optimizer
from zero3d.config.problems import optimizer_arguments
from zero3d.models.names import check_patterns, matches
from zero3d.models.recurrences import own_of_recurrences
from zero3d.spec.optimizer import OPTIMIZERS

BY_NAME = "auto"  # of optimizer.no_decay
NORM_OR_BIAS = re.compile(r"bias|layernorm|rmsnorm|(^|\.)norm($|\.)|_norm($|\.)")  # in the name of a parameter
NORM = re.compile(r"Norm(\dd)?$")  # in the name of a class


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
    """Name the parameters that differ from the rest: without weight decay, or in a group of `optimizer.groups`.

    Parameters of `no_decay`, by default `norms_and_biases`, have no weight decay in any group. The rest, with the
    section's own numbers, needs no name where there are no groups. Raises ConfigError for a group that names nothing.
    """
    own = choice.groups or ()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    check_patterns("optimizer.groups", [str(group["match"]) for group in own], list(trained))
    names: dict[tuple[int, bool], list[str]] = {}  # by place of the group in the file (0: in none) and weight decay
    exempt = _exempt(model, choice.no_decay)
    for name in trained:
        place = next((i for i, group in enumerate(own, 1) if matches(name, str(group["match"]))), 0)
        names.setdefault((place, name not in exempt), []).append(name)
    if not own:
        names.pop((0, True), None)
    left_out = {"match"} if len(OPTIMIZERS[choice.name].group_names) > 1 else {"match", "name"}
    settings: list[dict[str, Any]] = [{}, *({key: of[key] for key in of if key not in left_out} for of in own)]
    return [
        {"match": "|".join(map(glob.escape, names[place, decays])), **settings[place]}
        | ({} if decays else {"weight_decay": 0.0})
        for place, decays in sorted(names)  # the first group's learning rate is what metrics show
    ]


def norms_and_biases(model: nn.Module) -> set[str]:
    """Return the parameters without weight decay by default: norms, biases, and all parameters of one dimension.

    Some norms and biases have two: norms per head [heads, width], biases of stacked experts [experts, out]. So names
    decide, as for transformers' Trainer, and the class of the parameter's module: a norm. Trainer decays more: rates of
    recurrences (A_log) and short convolutions (models/recurrences.py), parameters that a model marks with
    `_no_weight_decay`, and those of one dimension that are neither norm nor bias, such as a scale or a learned token.
    The name of the base model is no name of a norm (roberta_prelayernorm, where Trainer decays nothing).
    """
    owners, base = dict(model.named_modules()), getattr(model, "base_model_prefix", "")
    recurrent = own_of_recurrences(model)
    return {
        name
        for name, p in model.named_parameters()
        if p.dim() < 2
        or NORM_OR_BIAS.search((name.replace(f"{base}.", "", 1) if base else name).lower())
        or NORM.search(type(owners[name.rpartition(".")[0]]).__name__)
        or name in recurrent
        or getattr(p, "_no_weight_decay", False)
    }


def of_one_dimension(model: nn.Module) -> set[str]:
    """Return the parameters that had no weight decay by default in older versions."""
    return {name for name, p in model.named_parameters() if p.dim() < 2}


def _exempt(model: nn.Module, patterns: str | None) -> set[str]:
    """Return the parameters without weight decay: by default, by patterns, or of one dimension (None)."""
    if patterns == BY_NAME:
        return norms_and_biases(model)
    if patterns is None:
        return of_one_dimension(model)
    names = [name for name, _ in model.named_parameters()]
    return {name for name in names for each in patterns.split("|") if fnmatch.fnmatchcase(name, each.strip())}
