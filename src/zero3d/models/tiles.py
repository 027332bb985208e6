"""Matrices in tiles: rows of a weight as parameters of their own, each gathered when its rows are used.

    nn.Linear or nn.Embedding         the same module, in tiles
    weight  [out, in]                 tiles.0.weight  [rows, in]    a RowTile or LookupTile, and so a unit (blocks.py)
    bias    [out]                     tiles.1.weight  [rows, in]
                                      ...
                                      bias            [out]

    linear     y = [ x W0^T | x W1^T | ... ] (+ bias)     one tile after the other; in the backward each gives its
                                                          rows of the weight's gradient, and its term of the input's
    embedding  y = rows of tile 0, else 0 + ...           the sum has one term that is not 0; the backward needs no tile

Tied matrices have the same tiles: their parameters are tied, too.

Each tile is given a view of the input of its own. Hooks on a call's inputs tell when its backward is over, and the
gradient of one shared input would be there when the last tile's is: all tiles would stay gathered until then.

The source is memory-centric tiling: Rajbhandari et al., "ZeRO-Infinity" (2021), section 5.1.3. A state_dict() has the
whole weight under its own name, and load_state_dict() takes it; named_parameters() shows tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from zero3d.errors import TokenError
from zero3d.shards.boxes import Shape
from zero3d.shards.cuts import Tile

ALIGN = 64  # rows: products of other numbers of them are slower on accelerators


class RowTile(nn.Module):
    """Owns some rows of a linear layer's weight, and lends them to whoever calls it."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor, multiply: Callable[[Tensor, Tensor], Tensor] = F.linear) -> Tensor:
        """Return what `multiply` makes of x and the rows; what else it needs is its own, and no hook's business."""
        return multiply(x, self.weight)


class LookupTile(nn.Embedding):
    """Owns some rows of an embedding. Its forward is nn.Embedding's: hooks tell by it that backward needs no rows."""

    def __init__(self, weight: nn.Parameter, padding_idx: int | None) -> None:
        super().__init__(weight.shape[0], weight.shape[1], padding_idx, _weight=weight.detach())
        self.weight = weight


class TiledForward:
    """The forward of a linear layer whose weight is in tiles. adds_bias: whether that is its own to add."""

    def __init__(self, tiles: Sequence[RowTile], linear: nn.Linear, adds_bias: bool) -> None:
        self._tiles = tiles
        self._linear = linear
        self._adds_bias = adds_bias

    def __call__(self, x: Tensor) -> Tensor:
        y = torch.cat([tile(x.view_as(x)) for tile in self._tiles], -1)
        return y + self._linear.bias if self._adds_bias and self._linear.bias is not None else y


class TiledLookup:
    """The forward of an embedding whose weight is in tiles. Raises TokenError for ids of no row, on the CPU."""

    def __init__(self, tiles: Sequence[LookupTile], rows: int) -> None:
        self._tiles, self._rows = tiles, rows

    def __call__(self, ids: Tensor) -> Tensor:
        check_ids(ids, self._rows)  # tiles would pass over them
        found: Tensor | None = None
        start = 0
        for tile in self._tiles:
            own = ids - start
            absent = (own < 0) | (own >= tile.num_embeddings)
            part = tile(own.masked_fill(absent, 0)).masked_fill(absent[..., None], 0)
            found = part if found is None else found + part
            start += tile.num_embeddings
        assert found is not None
        return found


def check_ids(ids: Tensor, rows: int, kind: str = "token id") -> None:
    """Look every id up among so many rows, which fails where one is of none. Nothing waits for it.

    An accelerator stops there, as it does in torch's own lookups. Raises TokenError on the CPU.
    """
    try:
        ids.new_zeros(()).expand(rows).index_select(0, ids.reshape(-1))
    except (IndexError, RuntimeError) as error:
        found = ids[(ids < 0) | (ids >= rows)]
        if not len(found):
            raise
        free = ", and -100 where there is no target" if kind == "label" else ""
        raise TokenError(
            f"{kind} {int(found[0])} is not a token of a vocabulary of {rows}: {kind}s are 0 to {rows - 1}{free}. "
            "After adding tokens to a tokenizer, call model.resize_token_embeddings(len(tokenizer))."
        ) from error


def tile_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Return the rows of a tile: as few tiles as fit the budget, of one size but the last. 0 where no row fits it."""
    most = budget // row_bytes
    if most == 0:
        return 0
    count = -(-rows // most)
    even = -(-rows // count)
    aligned = -(-even // ALIGN) * ALIGN
    return aligned if aligned <= most else even


def cut_rows(weight: nn.Parameter, rows: int) -> list[nn.Parameter]:
    """Return a weight's rows, `rows` at a time, as parameters that share its memory."""
    return [nn.Parameter(part, requires_grad=weight.requires_grad) for part in torch.split(weight.detach(), rows)]


def describe_tiles(name: str, shape: Shape, rows: int) -> dict[str, Tile]:
    """Return, by its name, what each tile is of the weight of the module `name`."""
    dotted = f"{name}." if name else ""
    starts = range(0, shape[0], rows)
    return {f"{dotted}tiles.{i}.weight": Tile(f"{dotted}weight", shape, s * shape[1]) for i, s in enumerate(starts)}


def tile_linear(linear: nn.Linear, parts: Sequence[nn.Parameter], adds_bias: bool = True) -> None:
    """Put tiles in the place of a linear layer's weight. It keeps its hooks, its bias and its other attributes."""
    tiles = [RowTile(part) for part in parts]
    _replace_weight(linear, tiles)
    linear.forward = TiledForward(tiles, linear, adds_bias)  # type: ignore[method-assign, assignment]


def tile_embedding(embedding: nn.Embedding, parts: Sequence[nn.Parameter]) -> TiledLookup:
    """Put tiles in the place of an embedding's weight; return the lookup in them, which is to be its forward."""
    tiles, start = [], 0
    for part in parts:
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - start
        tiles.append(LookupTile(part, padding if 0 <= padding < part.shape[0] else None))
        start += part.shape[0]
    _replace_weight(embedding, tiles)
    return TiledLookup(tiles, start)


def _replace_weight(module: nn.Module, tiles: Sequence[nn.Module]) -> None:
    del module.weight
    module.tiles = nn.ModuleList(tiles)
    module.register_state_dict_post_hook(_join_tiles)  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(_split_tiles)  # type: ignore[no-untyped-call]


def tiles_of(module: nn.Module) -> Sequence[Any]:
    """Return the tiles of a linear layer or embedding, none where it is whole."""
    return list(getattr(module, "tiles", ()))


def rows_of(linear: nn.Linear) -> int:
    """Return the rows of a linear layer's weight that this rank has."""
    return sum(tile.weight.shape[0] for tile in tiles_of(linear)) or linear.weight.shape[0]


def _join_tiles(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put the whole weight into a state dict in the place of its tiles."""
    keys = [f"{prefix}tiles.{i}.weight" for i in range(len(tiles_of(module)))]
    state[f"{prefix}weight"] = torch.cat([state.pop(key) for key in keys])


def _split_tiles(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take a whole weight of a state dict apart, for its tiles to load."""
    weight = state.pop(f"{prefix}weight", None)
    if weight is not None:
        parts = torch.split(weight, [tile.weight.shape[0] for tile in tiles_of(module)])
        state |= {f"{prefix}tiles.{i}.weight": part for i, part in enumerate(parts)}
