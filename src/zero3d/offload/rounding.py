"""Stochastic rounding of Adam's moments to bf16, the same bits however they are cut.

A moment moves by 1 - beta = 0.001 of itself and less in a step, where bf16 tells numbers apart by 0.004: rounded to the
nearest, it would stand still. Rounded up or down at random, the nearer the likelier, it is right on average.

    u      bits of the fp32 value as an integer
    noise  16 bits, uniform
    bf16   = (u + noise) >> 16, a carry being the next value in magnitude

The noise is a function of (seed, applied step, which moment, global index of the element), and of nothing else:

    a, b   two 32-bit numbers of a hash of (seed, step, moment, tile); a tile is 2^18 elements
    noise  = the upper 16 bits of (a T[index in the tile] + b) mod 2^32, as a signed number, + 2^15
    T      one fixed table of scattered numbers

It is uniform, independent from step to step, and independent for any two elements (multiply-add hashing, Dietzfelbinger
1996), so that errors of many elements add up like errors of independent draws. It has no state, and costs two integer
operations an element.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.memory.arena import host_value

TILE = 1 << 18
_INFINITY = 0x7F800000
_LARGEST_BITS = 0x7F7F0000
_LARGEST = 255 * 2.0**120  # of bf16's finite values; what is not less has no next one to be rounded up to
_GOLDEN = 0x9E3779B1  # 2^32 over the golden ratio, odd: a factor that scatters what is near


class Draw(NamedTuple):
    """What noise is a function of, beside the element: `moment` is 0 for exp_avg and 1 for exp_avg_sq."""

    seed: int
    step: int
    moment: int

    def keys(self, tile: int) -> tuple[int, int]:
        """Return a tile's two numbers, signed."""
        digest = blake2b(repr((*map(int, self), tile)).encode(), digest_size=8).digest()
        multiplier, offset = struct.unpack("<2i", digest)
        return multiplier, offset


def first_of(unit: str) -> int:
    """Return the number of a unit's first element, for noise: far from any other unit's, the same on any mesh."""
    return int.from_bytes(blake2b(unit.encode(), digest_size=5).digest()) * TILE * (1 << 20)


def noise_table(device: torch.device) -> Tensor:
    """Return [TILE] int32: 0, 1, 2 and so on scattered over 32 bits, no two alike."""
    mixed = torch.arange(TILE, dtype=torch.int64)
    for _ in range(3):  # each round is one to one
        mixed = (mixed ^ (mixed >> 15)) * _GOLDEN & 0xFFFFFFFF
    return mixed.to(torch.int32).to(device)


def round_to_bf16(values: Tensor, out: Tensor, draw: Draw, first: int, table: Tensor, scratch: Tensor) -> None:
    """Round flat fp32 values, which are used up, to bf16, up or down at random.

    What bf16 has is kept, infinities and NaN among it; nothing finite becomes infinite.

    first    global index of the first element
    table    of `noise_table`
    scratch  fp32, at least as many elements
    """
    bits, noise = values.view(torch.int32), scratch.view(torch.int32)[: values.numel()]
    # On an accelerator the norm would have to be waited for, and the guard is cheap.
    plain = values.device.type == "cpu" and host_value(torch.linalg.vector_norm(values).view(1), [inf])[0] < _LARGEST
    cut_off = None if plain else _cut_off(bits)
    _fill(noise, draw, first, table)
    upper = bits.add_(noise).add_(1 << 15).bitwise_right_shift_(16)  # noise is from -2^15 here
    out.view(torch.int16).copy_(upper if cut_off is None else torch.where(*cut_off, upper))


def _cut_off(bits: Tensor) -> tuple[Tensor, Tensor]:
    """Return a mask of values with no next one to be rounded up to, and all upper halves; a NaN's stays a NaN."""
    magnitude = bits & 0x7FFFFFFF
    quiet = (magnitude > _INFINITY).to(torch.int32) << 6
    return magnitude >= _LARGEST_BITS, (bits >> 16) | quiet


def _fill(noise: Tensor, draw: Draw, first: int, table: Tensor) -> None:
    """Write the noise of consecutive elements, from -2^15 to 2^15 - 1."""
    start = 0
    while start < noise.numel():
        tile, offset = divmod(first + start, TILE)
        stop = min(noise.numel(), start + TILE - offset)
        a, b = draw.keys(tile)
        scattered = table[offset : offset + stop - start]
        torch.add(torch.tensor(b, dtype=torch.int32), scattered, alpha=a, out=noise[start:stop])
        start = stop
    noise.bitwise_right_shift_(16)
