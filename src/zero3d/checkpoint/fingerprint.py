"""One hash of an engine's states that no cut changes: runs that agree in it agree in every bit.

Every element of a state is mixed with its place in the full model's tensor, and the mixed numbers are added modulo
2^64: whichever ranks hold the elements, and in whichever units, the sum is the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from zero3d.checkpoint.manifest import FROZEN
from zero3d.checkpoint.save import optimizer_scalars
from zero3d.checkpoint.state import EngineState, state_pieces
from zero3d.models.experts import ROUTER_BIAS
from zero3d.precision import joined
from zero3d.shards.boxes import Box, Shape

CHUNK = 1 << 20  # elements that are mixed at once, in 8 bytes each and a few copies of that
# Odd multipliers with ones and zeros all over (those of SplitMix64), as torch has no unsigned arithmetic.
_PLACE, _BITS, _FIRST, _SECOND = (
    number - (1 << 64) if number >> 63 else number
    for number in (0x9E3779B97F4A7C15, 0xD1B54A32D192ED03, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_WIDTHS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(engine: EngineState) -> str:
    """Return 16 digits of a hash of masters, optimizer states and routers' biases, at any dp, tp, pp, ep and stage.

    Reads this rank's part of them; 8 bytes from each rank to every other.
    """
    total = torch.zeros((), dtype=torch.int64)
    for piece in state_pieces(engine):
        if piece.state == FROZEN:
            continue
        shape, seed = engine.full_model.shapes[piece.name], _seed(f"{piece.name} {piece.state}")
        for box, values in piece.boxes():
            total += _of_box(seed, shape, box, joined(values)).cpu()
    for name, value in optimizer_scalars(engine).items() if engine.world.rank == 0 else ():
        total += _of_box(_seed(name), (1,), ((0, 1),), torch.tensor([value], dtype=torch.float64))
    for name in engine.persistent_buffers if engine.dp.rank == engine.tp.rank == 0 else ():
        if name.rpartition(".")[2] == ROUTER_BIAS:
            bias = engine.buffers[name][0]
            total += _of_box(_seed(name), tuple(bias.shape), ((0, len(bias)),), bias).cpu()
    everywhere = engine.world.exchange(total.view(1)).sum()
    return hashlib.sha256(everywhere.view(1).numpy().tobytes()).hexdigest()[:16]


def _seed(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little", signed=True)


def _of_box(seed: int, shape: Shape, box: Box, values: Tensor) -> Tensor:
    """Return the sum of a box's elements, each mixed with its place in a tensor of this shape."""
    flat = values.detach().reshape(-1)
    bits = flat.contiguous().view(_WIDTHS[flat.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start, stop in pairwise([*range(0, len(bits), CHUNK), len(bits)]):
        places = torch.zeros(stop - start, dtype=torch.int64, device=bits.device)
        rest = torch.arange(start, stop, device=bits.device)
        for (low, _), size, stride in _merged(shape, box):
            places += (low + rest % size) * stride
            rest = rest // size
        mixed = (places * _PLACE + seed) ^ (bits[start:stop].long() * _BITS)
        mixed = (mixed ^ _right(mixed, 30)) * _FIRST
        mixed = (mixed ^ _right(mixed, 27)) * _SECOND
        total += (mixed ^ _right(mixed, 31)).sum()
    return total


def _merged(shape: Shape, box: Box) -> Iterator[tuple[tuple[int, int], int, int]]:
    """Yield a box's dimensions, the last one first, as (range, its length, stride); whole ones are part of the next."""
    stride, size = 1, 1
    for (low, high), length in zip(reversed(box), reversed(shape), strict=True):
        if (low, high) == (0, length):
            size *= length
            continue
        yield (low * size, high * size), (high - low) * size, stride
        stride, size = stride * size * length, 1
    yield (0, size), size, stride


def _right(values: Tensor, by: int) -> Tensor:
    """Shift to the right as if there were no sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)
