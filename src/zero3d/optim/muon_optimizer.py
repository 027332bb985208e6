"""Muon for matrices, AdamW for all else, as one torch optimizer over pieces of parameters.

    m = lerp(m, gradient, 1 - momentum)                 average    on every piece of a matrix
    d = lerp(gradient, m, momentum), or m               average    nesterov, or not
    o = Newton-Schulz(d), of the whole matrix in bf16   orthogonal.py: pieces go to its owner and come back
    p = p (1 - lr weight_decay) - lr adjusted o         step

These are torch.optim.Muon's operations, and so its bits. Source: Jordan et al., "Muon" (2024); Liu et al. 2025.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from zero3d.errors import ConfigError
from zero3d.optim.matrices import STEPS, adjusted
from zero3d.optim.newton_schulz import COEFFICIENTS, EPS, orthogonalize
from zero3d.spec.optimizer import ADJUSTMENTS, OPTIMIZERS, OptimizerRow

MATRICES = "matrices"  # option of a group: whether Muon updates it
MOMENTUM = "momentum_buffer"


class MuonWithAdamW(Optimizer):
    """Updates pieces of matrices by their orthogonalised momentum, and pieces of all else by fused AdamW.

    Groups whose option `matrices` is true are Muon's. Their gradients must have been through `average` and made
    orthogonal before `step`. `ranges` has the parts of a piece: start, stop and the factor of the learning rate there.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], muon: Mapping[str, Any], adamw: Mapping[str, Any]) -> None:
        self.table: list[str] = []  # which parameters get which rule
        self.ranges: dict[Tensor, list[tuple[int, int, float]]] = {}
        own = [group | {MATRICES: bool(group.get(MATRICES))} for group in groups]
        super().__init__([{**(muon if group[MATRICES] else adamw), **group} for group in own], {})
        rest = [group for group in self.param_groups if not group[MATRICES]]
        self._adamw = AdamW(rest, fused=True) if rest else None
        if self._adamw is not None:
            self._adamw.state = self.state

    def state_names(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the states of a group's pieces that are as long as these."""
        return (MOMENTUM,) if group[MATRICES] else ("exp_avg", "exp_avg_sq")

    @property
    def ours(self) -> list[dict[str, Any]]:
        """The groups of matrices."""
        return [group for group in self.param_groups if group[MATRICES]]

    @torch.no_grad()
    def average(self, group: Mapping[str, Any], gradients: Sequence[Tensor], momenta: Sequence[Tensor]) -> None:
        """Take gradients of pieces of a group into their momenta, and make them what is to be orthogonal."""
        if gradients:
            torch._foreach_lerp_(list(momenta), list(gradients), 1 - group["momentum"])
            if group["nesterov"]:
                torch._foreach_lerp_(list(gradients), list(momenta), group["momentum"])
            else:
                torch._foreach_copy_(list(gradients), list(momenta))

    def orthogonal(self, matrices: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Return matrices [A, B] or [K, A, B] of a group made orthogonal."""
        return orthogonalize(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update all pieces that have a gradient."""
        loss = None if closure is None else closure()
        for group in self.ours:
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            pieces = [p for p in group["params"] if p.grad is not None]
            for p in pieces:
                state = self.state[p]
                if MOMENTUM not in state:
                    state.update(step=torch.zeros(()), **{MOMENTUM: torch.zeros_like(p.grad)})
                state["step"].add_(1)
            if pieces:
                torch._foreach_mul_(pieces, 1 - lr * decay)
            for p in pieces:
                for start, stop, factor in self.ranges.get(p, [(0, p.numel(), 1.0)]):
                    p[start:stop].add_(p.grad[start:stop], alpha=-lr * factor)
        if self._adamw is not None:
            self._adamw.step()
        return loss


@dataclass(frozen=True)
class MuonRule:
    """What `muon` returns: builds the optimizer of groups of pieces, and says which parameters are its matrices.

    match  patterns of parameters that get Muon; None: the matrices of blocks
    split  styles of fused ones, by pattern (`optim.matrices`), before those that the model's own plan gives
    """

    options: Mapping[str, Any]
    adamw: Mapping[str, Any]
    match: str | None
    split: Mapping[str, str]
    row: ClassVar[OptimizerRow] = OPTIMIZERS["muon"]

    def __call__(self, groups: Sequence[dict[str, Any]]) -> MuonWithAdamW:
        """Return the optimizer of groups of pieces."""
        return MuonWithAdamW(groups, self.options, self.adamw)

    def factor(self, shape: tuple[int, int]) -> float:
        """Return the factor of the learning rate for a matrix of this shape."""
        return adjusted(*shape, self.options["adjust_lr"])


def muon(
    lr: float = 1e-3,
    *,
    weight_decay: float = 0.1,
    momentum: float = 0.95,
    nesterov: bool = True,
    ns_steps: int = STEPS,
    ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
    eps: float = EPS,
    adjust_lr: str = "match_rms_adamw",
    adamw_lr: float | None = None,
    betas: tuple[float, float] = (0.9, 0.95),
    adamw_eps: float = 1e-8,
    match: str | None = None,
    split: Mapping[str, str] | None = None,
) -> MuonRule:
    """Return what `Engine(optimizer=...)` takes for Muon on the matrices of blocks and AdamW on the rest.

    lr, weight_decay  of both; `param_groups` may give parameters others, or another rule: {"match": ..., "name":
                      "adamw"}
    momentum, nesterov, ns_steps, ns_coefficients, eps   as of torch.optim.Muon
    adjust_lr         match_rms_adamw: AdamW's learning rates carry over; original: torch's default
    adamw_lr          AdamW's learning rate, where it is another
    betas, adamw_eps  of AdamW
    match             parameters that get Muon instead of the matrices of blocks, as name patterns: "*.weight|*.proj"
    split             {pattern: style} of fused matrices: none, equal:2, sizes:256,64,64, in_turn:64,64,64

    States take 8 bytes per parameter (fp32 master and momentum) for matrices, 12 for the rest. A step sends about 2/N
    of a reduce-scatter's elements a rank in bf16 (orthogonal.py). Raises ConfigError.
    """
    if adjust_lr not in ADJUSTMENTS:
        raise ConfigError(f"muon: adjust_lr={adjust_lr!r} is none of {', '.join(ADJUSTMENTS)}.")
    rate = lr if adamw_lr is None else adamw_lr
    if not (lr >= 0 and rate >= 0 and weight_decay >= 0 and 0 <= momentum <= 1 and 1 <= ns_steps < 100):
        raise ConfigError(
            f"muon: lr={lr}, weight_decay={weight_decay}, momentum={momentum}, ns_steps={ns_steps}: pass a learning "
            "rate and a weight decay from 0, a momentum from 0 to 1, and 1 to 99 steps."
        )
    own = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": tuple(ns_coefficients),
        "eps": eps,
        "ns_steps": ns_steps,
        "adjust_lr": adjust_lr,
    }
    adamw = {"lr": rate, "weight_decay": weight_decay, "betas": tuple(betas), "eps": adamw_eps}
    return MuonRule(own, adamw, match, dict(split or {}))
