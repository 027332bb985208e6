"""Lion (Chen et al. 2023, "Symbolic Discovery of Optimization Algorithms"), which torch has not: element by element.

    u = sign(beta1 m + (1 - beta1) g)
    p = p (1 - lr weight_decay) - lr u
    m = beta2 m + (1 - beta2) g

The defaults are those of DeepSpeed's FusedLion.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Steps by the sign of a mean of gradients; its state is one momentum, `exp_avg`."""

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                momentum = state["exp_avg"]
                sign = torch.lerp(p.grad, momentum, first).sign_()
                p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(sign, alpha=-group["lr"])
                momentum.lerp_(p.grad, 1.0 - second)
        return loss
