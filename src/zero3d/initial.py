"""Where weights come from when an Engine is built: this rank's slice of each unit.

from_module   the parameters of the module itself; rank 0's win (one broadcast of the unit)
from_source   a Source, asked only for the ranges that this rank owns; nothing is sent, and the
              peak is the slice plus what the source itself holds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from zero3d.zero.collectives import Comm
from zero3d.zero.layout import UnitLayout


class Source(Protocol):
    """Values of parameters that are too large to hold, such as those of files."""

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name`, as a 1-D tensor of any dtype."""


def from_module(layout: UnitLayout, params: Mapping[str, nn.Parameter], comm: Comm, dtype: torch.dtype) -> Tensor:
    """[total/N] of `dtype`; broadcasts [total] from rank 0."""
    whole = torch.zeros(layout.total, dtype=dtype, device=comm.device)
    for slot in layout.slots:
        whole[slot.start : slot.start + slot.numel].copy_(params[slot.name].detach().reshape(-1))
    comm.broadcast(whole, "-")
    return whole.view(comm.size, -1)[comm.rank]


def from_source(source: Source, layout: UnitLayout, comm: Comm, dtype: torch.dtype) -> Tensor:
    """[total/N] of `dtype`; sends nothing."""
    shard = torch.zeros(layout.shard, dtype=dtype, device=comm.device)
    for piece in layout.pieces(comm.rank):
        values = source(layout.slots[piece.slot].name, piece.start, piece.stop)
        shard[piece.offset : piece.offset + piece.stop - piece.start].copy_(values)
    return shard


def hollow(model: nn.Module) -> None:
    """Replace parameters on the meta device by one element in their shape, which can be pointed at real data.

    Tied parameters stay tied; requires_grad stays.
    """
    known: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and p.is_meta:
                if p not in known:
                    one = torch.zeros((), dtype=p.dtype).expand(p.shape)
                    known[p] = nn.Parameter(one, requires_grad=p.requires_grad)
                module._parameters[name] = known[p]
