"""One hash of an engine's states that does not depend on how they are cut: runs that agree in it agree in every bit."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from zero3d.distributed.collectives import Comm
from zero3d.zero.layout import grid
from zero3d.zero.model_group import ModelGroup
from zero3d.zero.optimizer import ShardedOptimizer


def fingerprint(optimizer: ShardedOptimizer, comm: Comm, model_group: ModelGroup) -> str:
    """Return 16 digits of the SHA-256 of masters and optimizer states, cell by cell of the layouts' grid.

    Reads this rank's part of them; 32 bytes for each of its cells to every rank.
    """
    cells = grid(comm.size) // comm.size  # of this rank
    hashes = [hashlib.sha256() for _ in range(cells)]
    for owned in optimizer.pieces:
        layout, piece, master = owned.unit.layout, owned.piece, owned.master
        states = optimizer.torch.state.get(master, {})
        flat = {"": master} | {key: value for key, value in states.items() if isinstance(value, Tensor)}
        start = layout.slots[piece.slot].start + piece.start - comm.rank * layout.shard
        for cell, low, high in layout.grid_cells(start, master.numel()):
            if 0 <= cell < cells:
                for key, value in sorted(flat.items()):
                    values = value[low:high] if value.dim() else value[None]
                    hashes[cell].update(f"{owned.name} {key}".encode())
                    hashes[cell].update(values.detach().cpu().contiguous().view(torch.uint8).numpy())
    over_dp = hashlib.sha256(_bytes(comm.exchange(_numbers(b"".join(cell.digest() for cell in hashes)))))
    return hashlib.sha256(_bytes(model_group.exchange(_numbers(over_dp.digest())))).hexdigest()[:16]


def _numbers(raw: bytes) -> Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).double()


def _bytes(numbers: Tensor) -> bytes:
    return bytes(numbers.flatten().to(torch.uint8).tolist())
