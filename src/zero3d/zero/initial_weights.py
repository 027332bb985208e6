"""Where weights come from when an Engine is built: this rank's slice of each unit.

from_module   the parameters of the module itself; rank 0's win (one broadcast of the unit)
from_source   a Source, asked only for the boxes that this rank owns; nothing is sent, and the peak is the slice plus
              the source's own memory

Under tensor parallelism units and modules hold local tensors, and a source has whole ones: `cuts` says by
name which parameters are cut, and how. `tiles` says which are parts of a parameter of the source's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch
from torch import Tensor, nn

from zero3d.blueprint.layout import UnitLayout
from zero3d.distributed.collectives import Comm
from zero3d.precision import to_compute
from zero3d.shards.boxes import Box
from zero3d.shards.cuts import Cut, Tile, cover
from zero3d.zero.unit_parts import parameter_views

Fill = Callable[[Tensor], None]  # writes this rank's slice [total/N], padding apart, in the tensor's dtype


class Source(Protocol):
    """Gives values of parameters too large to hold, such as parameters in files."""

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the whole parameter `name`, in the box's shape, of any dtype."""


def from_module(
    layout: UnitLayout, params: Mapping[str, nn.Parameter], everyone: Comm, wide: torch.dtype, rank: int
) -> Fill:
    """Return what fills slices from the module's own parameters: a broadcast of [total] of `wide` from rank 0.

    everyone  has the same parameters
    rank      this one's among those that the unit is cut over
    """

    def fill(out: Tensor) -> None:
        whole = torch.zeros(layout.total, dtype=wide, device=everyone.device)
        for slot, view in zip(layout.slots, parameter_views(whole, layout), strict=True):
            view.copy_(params[slot.name].detach())
        everyone.broadcast(whole, "-")
        to_compute(whole.view(layout.n, -1)[rank], out.dtype, out=out)

    return fill


def from_source(
    source: Source,
    layout: UnitLayout,
    comm: Comm,
    wide: torch.dtype,
    cuts: Mapping[str, Cut],
    tiles: Mapping[str, Tile],
) -> Fill:
    """Return what fills slices from a source: it sends nothing and holds one box at a time."""

    def fill(out: Tensor) -> None:
        for piece in layout.pieces(comm.rank):
            slot = layout.slots[piece.slot]
            part = out[piece.offset : piece.offset + piece.stop - piece.start]
            tile = tiles.get(slot.name, Tile(slot.name, slot.shape, 0))
            for box, target in cover(tile.shape, tile.start + piece.start, part, cuts.get(slot.name)):
                values = source(slot.name, box)
                if out.dtype not in (wide, values.dtype):
                    values = to_compute(values.to(comm.device, wide), out.dtype)
                target.copy_(values)

    return fill


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
