"""Store optimizer states in 8 bits: blocks of 256 elements, each with the largest of them in fp32.

    element   code in CODES, of value / largest of the block        1 byte
    block     scale: the largest, in fp32                            4 bytes for 256 elements

Codes are dynamic: of a sign, a decimal exponent and a linear fraction, the more of this the larger the value. Source:
Dettmers, Lewis, Shleifer and Zettlemoyer, "8-bit optimizers via block-wise quantization" (2022), section 2.

Two departures make storing repeatable and steps safe. The code 1.0 has either sign, so that what was read is stored
again with the bits that it had: checkpoints have fp32 values, and reading these back changes nothing. A second moment
that is not 0 is never stored as 0, where Adam would divide by its epsilon, unless its share of the largest is below the
least fp32 number.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

BLOCK = 256
EXPONENTS = 7  # decimal ones, from 1 down


def magnitudes(bits: int) -> list[float]:
    """Return positive codes, rising to 1, whose fraction has so many bits at the largest exponent."""
    values = []
    for exponent in range(EXPONENTS):
        steps = 1 << max(bits - exponent, 0)
        values += [10.0**-exponent * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
    return [*sorted(values)[:-1], 1.0]


class Codes(NamedTuple):
    """The codes of one kind of moment.

    values  [255] rising
    bounds  [255] between them, and infinity: a bound's own value has the code below
    first   [65536] by the upper half of a number's bits: the code of the least number that begins with these, which no
            more than one bound lies behind
    """

    values: Tensor
    bounds: Tensor
    first: Tensor


@lru_cache
def codes(signed: bool, device: torch.device) -> Codes:
    """Return the codes of first moments, which are signed, or of second ones."""
    positive = magnitudes(6 if signed else 7)
    values = torch.tensor([*(-value for value in reversed(positive)), 0.0, *positive] if signed else [0.0, *positive])
    bounds = (values[1:].double() + values[:-1].double()).div(2).float()
    if not signed:
        bounds[0] = 0.0
    upper = torch.arange(1 << 16, dtype=torch.int32)
    least = torch.where(upper < 1 << 15, upper << 16, (upper << 16) | 0xFFFF).view(torch.float32)
    first = torch.bucketize(least.nan_to_num(0.0), bounds, out_int32=True)
    return Codes(values.to(device), torch.cat([bounds, torch.tensor([float("inf")])]).to(device), first.to(device))


def decode(stored: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """Return blocks [K, 256] of fp32."""
    values = codes(signed, stored.device).values.index_select(0, stored.reshape(-1).int())
    return values.view(stored.shape).mul_(scales[:, None])


def encode(blocks: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """Return the codes [K, 256] and scales [K] of blocks of fp32, which are used up.

    A code is found in a table, as far as half of a number's bits tell, and by one comparison: on CPUs a tenth of the
    time of a binary search (torch.bucketize), with the same result.
    """
    known = codes(signed, blocks.device)
    scales = blocks.abs().amax(1)
    blocks.div_(torch.where(scales == 0, 1.0, scales)[:, None])
    flat = blocks.view(-1)
    found = known.first.index_select(0, (flat.view(torch.int32) >> 16).bitwise_and_(0xFFFF))
    found += flat > known.bounds.index_select(0, found)
    return found.to(torch.uint8).view(blocks.shape), scales


@dataclass
class Blocks:
    """One state of one piece of a parameter, in 8 bits.

    codes   [K, 256] uint8, those behind the piece's end of zeros
    scales  [K] fp32
    numel   elements of the piece
    signed  whether values may be negative
    dtype   of the values
    """

    dtype: ClassVar[torch.dtype] = torch.float32

    codes: Tensor
    scales: Tensor
    numel: int
    signed: bool

    def read(self) -> Tensor:
        """Return the values [numel], in fp32."""
        return decode(self.codes, self.scales, self.signed).view(-1)[: self.numel]

    def write(self, values: Tensor) -> None:
        """Store values [numel]."""
        blocks = torch.zeros(self.codes.shape, dtype=torch.float32, device=self.codes.device)
        blocks.view(-1)[: self.numel].copy_(values)
        stored, scales = encode(blocks, self.signed)
        self.codes.copy_(stored)
        self.scales.copy_(scales)
