"""Exchanges of an sp group's rows: what ranks have of sequences, for what they compute of whole ones; and back.

    to_heads, to_rows   rows of all heads for all rows of some heads, and back
    to_parts            rows of all heads of several tensors for all rows of the heads that a rank needs, at once
    gather_rows         the rows of all ranks; gradients of a rank's are added in rank order
    passed              rows for every rank, by rank; gradients go the same way back

All are `Comm.pass_rows`, each with a name in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm


def to_heads(rows_of_all: Tensor, rows: Sequence[range], heads: Sequence[range], comm: Comm, name: str) -> Tensor:
    """Exchange this rank's rows of all heads, [B, H, rows, D], for all rows of its heads, [B, heads, S, D]."""
    return _swapped(rows_of_all, heads, rows, comm, name)


def to_rows(heads_of_all: Tensor, rows: Sequence[range], heads: Sequence[range], comm: Comm, name: str) -> Tensor:
    """Exchange all rows of this rank's heads, [B, S, heads, D], for its rows of all heads, [B, rows, H, D]."""
    return _swapped(heads_of_all, rows, heads, comm, name)


def gather_rows(rows_of_one: Tensor, rows: Sequence[range], comm: Comm, name: str) -> Tensor:
    """Gather the rows of all ranks, [B, K, rows, D] -> [B, K, S, D]; gradients of a rank's are added in rank order."""
    batch, keys, here, width = rows_of_one.shape
    sent = torch.cat([rows_of_one.reshape(-1, width)] * comm.size)
    receives = [batch * keys * len(part) for part in rows]
    came = torch.split(passed(sent, [batch * keys * here] * comm.size, receives, comm, name), receives)
    return torch.cat([t.view(batch, keys, len(part), width) for t, part in zip(came, rows, strict=True)], 2)


def to_parts(
    tensors: Sequence[Tensor], cuts: Sequence[Sequence[range]], rows: Sequence[range], comm: Comm, name: str
) -> list[Tensor]:
    """Exchange this rank's rows of all heads, [B, rows, H, D], for all rows of those it needs, [B, S, heads, D].

    cuts  of each tensor: the heads that each rank needs, which several may; their gradients are added in rank order

    Tensors of one dtype go together.
    """
    made: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(t.dtype for t in tensors):
        alike = [number for number, t in enumerate(tensors) if t.dtype == dtype]
        cut = [cuts[number] for number in alike]
        came = _ToParts.apply(cut, rows, comm, name, *(tensors[n] for n in alike))  # type: ignore[no-untyped-call]
        made |= dict(zip(alike, came, strict=True))
    return [made[number] for number in range(len(tensors))]


class _ToParts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cuts: Sequence[Sequence[range]], rows: Sequence[range], comm: Comm, name: str, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way, ctx.shapes = (cuts, rows, comm, name), [t.shape for t in tensors]
        batch, own = len(tensors[0]), len(rows[comm.rank])
        sent = [
            torch.cat([_of(t, cut[rank]).reshape(-1) for t, cut in zip(tensors, cuts, strict=True)])
            for rank in range(comm.size)
        ]
        mine = [(len(cut[comm.rank]), t.shape[3]) for t, cut in zip(tensors, cuts, strict=True)]
        each = batch * sum(heads * width for heads, width in mine)
        assert all(t.shape[:2] == (batch, own) for t in tensors)
        came = _pass_parts(sent, [each * len(part) for part in rows], comm, name)
        shapes = [[(batch, len(part), heads, width) for heads, width in mine] for part in rows]
        by_rank = [_split(flat, wanted) for flat, wanted in zip(came, shapes, strict=True)]
        return tuple(torch.cat(parts, 1) for parts in zip(*by_rank, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (cuts, rows, comm, name), shapes = ctx.way, ctx.shapes
        sent = [torch.cat([g[:, part.start : part.stop].reshape(-1) for g in grads]) for part in rows]
        wanted = [
            [(*shape[:2], len(cut[rank]), shape[3]) for shape, cut in zip(shapes, cuts, strict=True)]
            for rank in range(comm.size)
        ]
        receives = [sum(map(prod, each)) for each in wanted]
        made = [grad.new_zeros(shape) for grad, shape in zip(grads, shapes, strict=True)]
        for rank, flat in enumerate(_pass_parts(sent, receives, comm, name)):
            for sum_, cut, part in zip(made, cuts, _split(flat, wanted[rank]), strict=True):
                _of(sum_, cut[rank]).add_(part)
        return None, None, None, None, *made


def _of(t: Tensor, heads: range) -> Tensor:
    """Return some heads of [B, rows, H, D], a view."""
    return t.narrow(2, heads.start, len(heads))


def _pass_parts(sent: Sequence[Tensor], receives: Sequence[int], comm: Comm, name: str) -> Sequence[Tensor]:
    """Send each rank a flat tensor, and return that of each."""
    came = comm.pass_rows(torch.cat(list(sent)), [t.numel() for t in sent], receives, name)
    return torch.split(came, list(receives))


def _split(flat: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return the tensors of these shapes of which a flat one is made."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _swapped(own: Tensor, cut: Sequence[range], joined: Sequence[range], comm: Comm, name: str) -> Tensor:
    came: Tensor = _Swap.apply(own, cut, joined, comm, name)  # type: ignore[no-untyped-call]
    return came


class _Swap(torch.autograd.Function):
    """Cuts dimension 1 into a part for every rank, and joins what comes from each along dimension 2.

    Its gradient cuts dimension 2 and joins along dimension 1. Each way copies what is sent once, and what comes once.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Sequence[range], joined: Sequence[range], comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        ctx.parts = cut, joined
        return _swap(own, (1, cut), (2, joined), comm, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cut, joined = ctx.parts
        return _swap(grads[0], (2, joined), (1, cut), ctx.comm, ctx.name), None, None, None, None


def _swap(
    own: Tensor, cut: tuple[int, Sequence[range]], joined: tuple[int, Sequence[range]], comm: Comm, name: str
) -> Tensor:
    """Send every rank its part [B, ., ., D] of one dimension, and return the parts that come, joined along another.

    cut, joined  a dimension, 1 or 2, and its parts by rank; of the joined one this rank has its own alone
    """
    (across, parts), (along, theirs) = cut, joined
    batch, width, mine = own.shape[0], own.shape[-1], len(parts[comm.rank])
    others = batch * len(theirs[comm.rank])
    sent = torch.cat([own.narrow(across, part.start, len(part)).reshape(-1, width) for part in parts])
    receives = [batch * mine * len(part) for part in theirs]
    came = torch.split(comm.pass_rows(sent, [others * len(part) for part in parts], receives, name), receives)
    sizes = [(mine, len(part)) if along == 2 else (len(part), mine) for part in theirs]
    return torch.cat([t.view(batch, *size, width) for t, size in zip(came, sizes, strict=True)], along)


def passed(sent: Tensor, sends: Sequence[int], receives: Sequence[int], comm: Comm, name: str) -> Tensor:
    came: Tensor = _Exchange.apply(sent, sends, receives, comm, name)  # type: ignore[no-untyped-call]
    return came


class _Exchange(torch.autograd.Function):
    """Rows for every rank, by rank, and those that come from each; gradients go the same way back."""

    @staticmethod
    def forward(ctx: Any, sent: Tensor, sends: Sequence[int], receives: Sequence[int], comm: Comm, name: str) -> Tensor:
        ctx.comm, ctx.name = comm, name
        ctx.ways = sends, receives
        return comm.pass_rows(sent, sends, receives, name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        sends, receives = ctx.ways
        return ctx.comm.pass_rows(grads[0].contiguous(), receives, sends, ctx.name), None, None, None, None
