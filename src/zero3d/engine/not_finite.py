"""Why a step's norm is not finite: which ranks had a loss or a weight that was not, in words."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zero3d.distributed.agreement import name_ranks
from zero3d.engine.runtime import Runtime
from zero3d.zero.hooks import SAVE
from zero3d.zero.optimizer import NAN_LOSS, OVERFLOW

_WITHOUT_WEIGHT, _LOST, _NO_WEIGHT = 1.0, 2.0, 3.0  # a rank's NaN loss of weight 0, of another weight; a bad weight


def why_not_finite(
    parts: Runtime, nan: Tensor | None, nans: Sequence[Tensor], weights: Sequence[float | Tensor]
) -> str:
    """Return the reason of a step whose norm is not finite, with the ranks whose loss or weight was not.

    All ranks call it; 8 bytes to each other rank, which the ledger leaves out: no formula knows what is skipped.
    """
    axes, hooks = parts.axes, parts.hooks
    lost = torch.stack([each.double() for each in nans]).amax() if nans else 0.0
    mine = torch.zeros((), dtype=torch.float64, device=axes.dp.device)
    mine += _WITHOUT_WEIGHT * lost if nan is None else torch.where(nan, _LOST, _WITHOUT_WEIGHT * lost)
    if of_device := [weight.to(mine) for weight in weights if isinstance(weight, Tensor)]:  # others were checked
        values = torch.stack(of_device)
        mine = torch.where((values.isfinite() & (values >= 0)).all(), mine, _NO_WEIGHT)
    told = axes.world.read(axes.world.exchange(mine.view(1), recorded=False).view(-1), [0.0] * axes.world.size)
    worst = max(told)
    if not worst:
        unseen = sorted(name for of_chunk in hooks for name in of_chunk.without_weights)
        return f"{OVERFLOW}, after a backward of {unseen[0]!r} without its weights. {SAVE}" if unseen else OVERFLOW
    ranks = name_ranks([rank for rank, flag in enumerate(told) if flag == worst])
    if worst == _NO_WEIGHT:
        return f"{OVERFLOW}, with a weight on {ranks} that is NaN, infinite or negative: pass the number of targets."
    if worst == _WITHOUT_WEIGHT:
        return (
            f"{NAN_LOSS} on {ranks}, of weight 0, and gradients may be NaN with it: where there is no target pass "
            "a loss of 0, such as output.sum() * 0, or sums: engine.backward_sum(total, weight=n)"
        )
    released = any(of_chunk.saved is not None for of_chunk in hooks)
    return (
        f"{NAN_LOSS} on {ranks}: all labels there may be -100, and a mean over no targets is NaN (pass "
        "the number of targets: engine.backward(loss, weight=n), with loss 0 where n is 0, or call train_batch)"
        + "; or, at stage 3, a forward goes through parameters() of a module that it does not call"
        * released
    )
