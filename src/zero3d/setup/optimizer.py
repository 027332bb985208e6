"""AdamW and its parameter groups."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero3d.config import Optimizer


def adamw(choice: Optimizer) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a builder of fused AdamW (Loshchilov and Hutter 2019)."""

    def build(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(
            params, lr=choice.lr, betas=choice.betas, eps=choice.eps, weight_decay=choice.weight_decay, fused=True
        )

    return build


def decay_groups(model: nn.Module, choice: Optimizer) -> list[dict[str, Any]]:
    """Name parameters without weight decay: those of `no_decay`, by default all of one dimension (norms and biases)."""
    match = choice.no_decay
    if match is None:
        match = "|".join(name for name, p in model.named_parameters() if p.dim() < 2)
    return [{"match": match, "weight_decay": 0.0}] if match else []
