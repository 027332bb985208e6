"""One hash of an engine's states that does not depend on how they are cut: runs that agree in it agree in every bit."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm
from zero3d.precision import joined
from zero3d.zero.layout import grid
from zero3d.zero.model_group import ModelGroup
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.updates import MasterPiece


class Range(NamedTuple):
    """Elements [low, high) of a piece."""

    owned: MasterPiece
    low: int
    high: int


def fingerprint(optimizer: ShardedOptimizer, comm: Comm, model_group: ModelGroup) -> str:
    """Return 16 digits of the SHA-256 of masters and optimizer states, cell by cell of the layouts' grid.

    Reads this rank's part of them; 32 bytes for each of its cells to every rank.
    """
    cells = grid(comm.size) // comm.size  # of this rank
    hashes = [hashlib.sha256() for _ in range(cells)]
    for _, parts in groupby(optimizer.pieces, lambda owned: (owned.unit.name, owned.name)):
        ranges: dict[int, list[Range]] = {}
        for owned in parts:
            layout, piece = owned.unit.layout, owned.piece
            start = layout.slots[piece.slot].start + piece.start - comm.rank * layout.shard
            for cell, low, high in layout.grid_cells(start, owned.master.numel()):
                if 0 <= cell < cells:
                    ranges.setdefault(cell, []).append(Range(owned, low, high))
        for cell, in_cell in ranges.items():
            _add(hashes[cell], in_cell, optimizer)
    over_dp = hashlib.sha256(_bytes(comm.exchange(_numbers(b"".join(cell.digest() for cell in hashes)))))
    return hashlib.sha256(_bytes(model_group.exchange(_numbers(over_dp.digest())))).hexdigest()[:16]


def _add(hashed: hashlib._Hash, ranges: Sequence[Range], optimizer: ShardedOptimizer) -> None:
    """Hash ranges of one parameter, which follow one another, state by state."""
    states = {owned.master: optimizer.states_of(owned) for owned, *_ in ranges}
    known = {key: value for key, value in states[ranges[0].owned.master].items() if isinstance(value, Tensor)}
    for key in sorted(["", *known]):
        hashed.update(f"{ranges[0].owned.name} {key}".encode())
        scalar = bool(key) and not known[key].dim()
        for owned, low, high in ranges[:1] if scalar else ranges:
            values: Any = states[owned.master][key] if key else joined(owned.read()[low:high])
            within = values[None] if scalar else values[low:high] if key else values
            hashed.update(within.detach().cpu().contiguous().view(torch.uint8).numpy())


def _numbers(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).double()


def _bytes(numbers: Tensor) -> bytes:
    return bytes(numbers.flatten().to(torch.uint8).tolist())
