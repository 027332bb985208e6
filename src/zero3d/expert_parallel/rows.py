"""Rows of tokens pass between the ranks of the ep axis, and their gradients the same way back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm


class Splits(NamedTuple):
    """Counts the rows that this rank sends to every rank of the axis, and those that it receives from each."""

    sends: Sequence[int]
    receives: Sequence[int]

    @property
    def back(self) -> Splits:
        """Return the way back of what was sent."""
        return Splits(self.receives, self.sends)


def pass_rows(rows: Tensor, splits: Splits, ep: Comm, name: str, trained: bool) -> Tensor:
    """Return the rows [received, H] that all ranks have for this one, by rank; `rows` [sent, H] are for them, by rank.

    Moves H elements for each row that is for another rank, and as many backward. Backward, all ranks take part if any
    does: `trained` is alike on all, and says that gradients flow even where none of this rank's rows has one.
    """
    if ep.size == 1:
        return rows
    anchor = torch.empty(0, requires_grad=trained and torch.is_grad_enabled(), device=rows.device)
    received: Tensor = _Pass.apply(rows, anchor, splits, ep, name)  # type: ignore[no-untyped-call]
    return received


class _Pass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, anchor: Tensor, splits: Splits, ep: Comm, name: str) -> Tensor:
        ctx.splits = splits
        ctx.ep = ep
        ctx.name = name
        return ep.pass_rows(rows, splits.sends, splits.receives, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        back = ctx.splits.back
        rows = ctx.ep.pass_rows(grads[0].contiguous(), back.sends, back.receives, ctx.name)
        return (rows if ctx.needs_input_grad[0] else None), None, None, None, None
