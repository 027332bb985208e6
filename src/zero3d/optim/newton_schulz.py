"""Make matrices orthogonal: the Newton-Schulz iteration of Muon, one matrix or a batch of one shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPS = 1e-7


def orthogonalize(matrices: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Return what is nearly U V^T of each matrix U S V^T, in bf16, as torch.optim.Muon computes it.

    matrices  [A, B] or a batch [K, A, B], of any dtype: they are rounded to bf16 first. They stay as they are.

    One matrix has torch's bits; those of a batch are the same on CPUs, and may not be on accelerators, whose kernels
    depend on K. It takes `matrices.operations`. Source: Jordan et al., "Muon" (2024).
    """
    a, b, c = coefficients
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(torch.bfloat16, copy=True)
    x = x.mT if tall else x
    product: Any = torch.addmm if x.dim() == 2 else torch.baddbmm
    if x.dim() == 2:
        x.div_(x.norm().clamp(min=eps))
    else:
        x.div_(torch.stack([one.norm() for one in x]).clamp(min=eps)[:, None, None])
    for _ in range(steps):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    made: Tensor = x.mT if tall else x
    return made
