"""Linear layers in tiles: rows of a weight as parameters of their own, each gathered when its rows are multiplied.

    nn.Linear                         the same module, in tiles
    weight  [out, in]                 tiles.0.weight  [rows, in]    a RowTile, and so a unit of its own (blocks.py)
    bias    [out]                     tiles.1.weight  [rows, in]
                                      ...
                                      bias            [out]

    forward    y = [ x W0^T | x W1^T | ... ] (+ bias)     one tile after the other
    backward   each tile gives its rows of the weight's gradient, and its term of the input's

Each tile is given a view of the input of its own. Hooks on a call's inputs tell when its backward is over, and the
gradient of one shared input would be there when the last tile's is: all tiles would stay gathered until then.

The source is memory-centric tiling: Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.1.3. A state_dict() has the
whole weight under its own name, and load_state_dict() takes it; named_parameters() shows tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3d.shards.cuts import Tile

ALIGN = 64  # rows: products of other numbers of them are slower on accelerators


class RowTile(nn.Module):
    """Owns some rows of a linear layer's weight, and lends them to whoever calls it."""

    def __init__(self, rows: Tensor, trainable: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(rows, requires_grad=trainable)

    def forward(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
        """Return what `multiply` makes of x and the rows; what else it needs is its own, and no hook's business."""
        return multiply(x, self.weight)


class TiledForward:
    """The forward of a linear layer whose weight is in tiles. adds_bias: whether that is its own to add."""

    def __init__(self, tiles: Sequence[RowTile], linear: nn.Linear, adds_bias: bool) -> None:
        self._tiles, self._linear, self._adds_bias = tiles, linear, adds_bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([tile(x.view_as(x)) for tile in self._tiles], -1)
        return y + self._linear.bias if self._adds_bias and self._linear.bias is not None else y


def tile_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Return the rows of a tile: as few tiles as fit the budget, of one size but the last. 0 where no row fits it."""
    most = budget // row_bytes
    if most == 0:
        return 0
    count = -(-rows // most)
    even = -(-rows // count)
    aligned = -(-even // ALIGN) * ALIGN
    return aligned if aligned <= most else even


def tile_linear(name: str, linear: nn.Linear, rows: int, adds_bias: bool = True) -> dict[str, Tile]:
    """Cut a linear layer's weight into tiles of `rows` rows, in place; return what each is of it, by name.

    The module keeps its hooks, its bias and its other attributes.
    """
    weight = linear.weight
    shape = tuple(weight.shape)
    parts = torch.split(weight.detach(), rows)
    tiles = [RowTile(part, weight.requires_grad) for part in parts]
    del linear.weight
    linear.tiles = nn.ModuleList(tiles)
    linear.forward = TiledForward(tiles, linear, adds_bias)  # type: ignore[method-assign, assignment]
    linear.register_state_dict_post_hook(_join_tiles)  # type: ignore[no-untyped-call]
    linear.register_load_state_dict_pre_hook(partial(_split_tiles, rows=rows))  # type: ignore[no-untyped-call]
    dotted = f"{name}." if name else ""
    return {f"{dotted}tiles.{i}.weight": Tile(f"{dotted}weight", shape, i * rows * shape[1]) for i in range(len(parts))}


def tiles_of(linear: nn.Module) -> Sequence[RowTile]:
    """Return the tiles of a linear layer, none where it is whole."""
    return list(getattr(linear, "tiles", ()))


def rows_of(linear: nn.Linear) -> int:
    """Return the rows of a linear layer's weight that this rank has."""
    return sum(tile.weight.shape[0] for tile in tiles_of(linear)) or linear.weight.shape[0]


def _join_tiles(linear: nn.Linear, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the whole weight into a state dict in the place of its tiles."""
    keys = [f"{prefix}tiles.{i}.weight" for i in range(len(tiles_of(linear)))]
    state[f"{prefix}weight"] = torch.cat([state.pop(key) for key in keys])


def _split_tiles(linear: nn.Linear, state: dict[str, Any], prefix: str, *_: Any, rows: int) -> None:
    """Take a whole weight of a state dict apart, for its tiles to load."""
    if (weight := state.pop(f"{prefix}weight", None)) is not None:
        state |= {f"{prefix}tiles.{i}.weight": part for i, part in enumerate(torch.split(weight, rows))}
