"""A causal convolution over time by channels, which reaches back no further than a document's first token.

    y[t] = sum of w[k - 1 - j] x[t - j]   over taps j < k with place[t] >= j

x, y [B, C, T]; w [C, k]; place [B, T] is each token's in its document. Autograd keeps x, w and places, not a product
for each tap. No call depends on where documents end: it compiles, and nothing is read from the device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def causal_convolution(x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
    """Return the convolution of `x` [B, C, T] with `weight` [C, k] inside of documents."""
    made: Tensor = _Convolution.apply(x, weight, places)  # type: ignore[no-untyped-call]
    return made


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, places)
        taps = weight.shape[1]
        made = x * weight[:, taps - 1 :]
        for back in range(1, min(taps, x.shape[-1])):
            made[..., back:] += x[..., :-back] * weight[:, taps - 1 - back, None] * _reached(places, back, x.dtype)
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight, places), (grad,) = ctx.saved_tensors, grads
        needs_x, needs_weight, _ = ctx.needs_input_grad
        taps, by_tap = weight.shape[1], []
        dx = grad * weight[:, taps - 1 :] if needs_x else None
        for back in range(taps):
            if back >= x.shape[-1]:
                by_tap.append(torch.zeros_like(weight[:, 0]))
                continue
            come = grad if not back else grad[..., back:] * _reached(places, back, grad.dtype)
            before = x[..., : x.shape[-1] - back]
            if needs_weight:
                by_tap.append((come * before).sum((0, 2)))
            if dx is not None and back:
                dx[..., :-back] += come * weight[:, taps - 1 - back, None]
        dw = torch.stack(by_tap[::-1], 1) if needs_weight else None
        return dx, dw, None


def _reached(places: Tensor, back: int, dtype: torch.dtype) -> Tensor:
    """Return 1 for tokens from `back` on in whose document a token so far before is, else 0: [B, 1, T - back]."""
    return (places[:, None, back:] >= back).to(dtype)
