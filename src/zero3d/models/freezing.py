"""Which parameters are trained, chosen by names. A frozen one has weights in the compute dtype and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from zero3d.errors import ConfigError, short
from zero3d.models.names import check_patterns, is_named


def train_only(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze all parameters that no pattern names; a tied one is trained where any of its names is."""
    chosen = {p for name, p in model.named_parameters(remove_duplicate=False) if is_named(name, patterns)}
    for p in model.parameters():
        p.requires_grad_(p in chosen)


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze what `patterns` name. Raises ConfigError for one that names nothing, or where nothing is left to train."""
    named = list(model.named_parameters(remove_duplicate=False))
    check_patterns("freeze", patterns, [name for name, _ in named])
    for name, p in named:
        if is_named(name, patterns):
            p.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise ConfigError(f"freeze: with {short(', '.join(patterns))} frozen, nothing is left to train: freeze less.")
