"""From what the caller passes as optimizer and param_groups to groups of pieces.

Layout follows the groups: parameters of one group lie together in their unit.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from zero3d.blueprint.layout import GROUP
from zero3d.errors import ConfigError


@dataclass(frozen=True)
class OptimizerChoice:
    """What the caller chose. group_of: parameter name -> group; build: pieces per group -> optimizer over them.

    block  elements of which no shard may have a part
    group  of any parameter by name, also of one that is frozen
    """

    group_of: dict[str, int]
    groups: int
    build: Callable[[list[list[Tensor]]], Optimizer]
    block: int = GROUP
    group: Callable[[str], int] = lambda name: 0


def choose_optimizer(
    model: nn.Module,
    optimizer: Callable[..., Optimizer] | Optimizer | None,
    param_groups: Sequence[Mapping[str, Any]] | None,
) -> OptimizerChoice:
    """Resolve the three ways to give an optimizer. Raises ConfigError."""
    if isinstance(optimizer, Optimizer):
        if param_groups is not None:
            raise ConfigError(
                "param_groups and a ready optimizer both define groups: pass the groups to the optimizer."
            )
        return _existing(model, optimizer)
    make = fused_adamw if optimizer is None else optimizer
    if not callable(make):
        raise ConfigError(
            f"optimizer={optimizer!r}: pass None, a callable (parameters -> optimizer) or a torch optimizer."
        )
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    block: int = getattr(make, "block", GROUP)
    make = _explained(make)
    if param_groups is None:
        return OptimizerChoice(dict.fromkeys(names, 0), 1, lambda pieces: make(pieces[0] or [torch.empty(0)]), block)
    for group in param_groups:
        if "match" not in group:
            raise ConfigError(
                f"param_groups entry {dict(group)!r} has no 'match': add a name pattern such as '*norm*|*.bias'."
            )
    patterns = [str(group["match"]) for group in param_groups]
    options = [{k: v for k, v in group.items() if k != "match"} for group in param_groups] + [{}]

    def index(name: str) -> int:
        hits = (i for i, pattern in enumerate(patterns) if is_matched(name, pattern))
        return next(hits, len(patterns))

    def build(pieces: list[list[Tensor]]) -> Optimizer:
        return make([{"params": part, **extra} for part, extra in zip(pieces, options, strict=True)])

    return OptimizerChoice({name: index(name) for name in names}, len(options), build, block, index)


def is_matched(name: str, pattern: str) -> bool:
    """Return whether a parameter's whole name fits one of the shell patterns in "*norm*|*.bias"."""
    return any(fnmatch.fnmatchcase(name, part.strip()) for part in pattern.split("|"))


def _explained(make: Callable[..., Optimizer]) -> Callable[..., Optimizer]:
    """Return a builder that raises ConfigError, which explains its arguments, for a torch optimizer's ValueError."""

    @functools.wraps(make, updated=())
    def build(params: Any) -> Optimizer:
        try:
            return make(params)
        except ValueError as error:
            raise ConfigError(
                f"the optimizer's builder raised {type(error).__name__}: {error} (It is given pieces of parameters, "
                "1-D tensors, in lists or groups: one that chooses by shape or name cannot. Pass param_groups=[{"
                "'match': '*norm*', ...}], for matrices zero3d.optim.muon(...), or freeze what is not to be trained.)"
            ) from error

    return build


def fused_adamw(params: Any) -> Optimizer:
    """Return the default: torch's fused AdamW with its default learning rate 1e-3."""
    return torch.optim.AdamW(params, fused=True)


def _existing(model: nn.Module, optimizer: Optimizer) -> OptimizerChoice:
    """Return a ready optimizer as a choice: its groups stay; only their params will be replaced, in place."""
    if optimizer.state:
        raise ConfigError("the optimizer has taken steps already: build the Engine before the first step.")
    group_of_param = {p: i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    foreign = set(group_of_param) - set(model.parameters())
    if foreign:
        shapes = ", ".join(str(tuple(p.shape)) for p in list(foreign)[:3])
        raise ConfigError(
            f"{len(foreign)} parameters of the optimizer are not in {type(model).__name__} (shapes {shapes}): "
            "make them parameters of the model, or give them an optimizer of their own."
        )
    missing = [name for name, p in trainable.items() if p not in group_of_param]
    if missing:
        raise ConfigError(
            f"{len(missing)} of {len(trainable)} trainable parameters are not in the optimizer, first {missing[0]!r}: "
            "add them, or freeze them with requires_grad_(False)."
        )

    def build(pieces: list[list[Tensor]]) -> Optimizer:
        for group, part in zip(optimizer.param_groups, pieces, strict=True):
            group["params"] = part
        return optimizer

    known = {name: group_of_param[p] for name, p in model.named_parameters() if p in group_of_param}
    groups = {name: known[name] for name in trainable}

    def group(name: str) -> int:
        return known.get(name, 0)

    return OptimizerChoice(groups, len(optimizer.param_groups), build, getattr(optimizer, "block", GROUP), group)
