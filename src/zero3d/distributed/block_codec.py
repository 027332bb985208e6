"""Values in blocks of 256: whole numbers of 8 or 4 bits, and what they are multiplied by.

    message of K blocks [bytes]   |  scales: K of fp32  |  codes: K x 256, of 4 bits two in a byte, the first one low  |

    scale    largest magnitude of the block / 127 (7 in 4 bits), at least 2^-126, so that it has all of its bits
    code     value / scale, rounded half to even; from a generator's noise up or down, so that its mean is the value
    value    code x scale, in fp32, then in the dtype that is asked for

What is lost of an element is at most half of its block's scale (with noise less than all of it), and fp32's rounding of
the product and the caller's dtype's. So a block's largest element decides how exact its others are. A block of zeros
has codes and values of 0. A block in which anything is not finite decodes to NaN, all of it: none is missed.

Every operation is on one element or one block, and rounds as IEEE 754 says: the codes are the same on every device, and
whoever decodes a message has the same bits as its sender.

Source: Wang et al., "ZeRO++: extremely efficient collective communication" (2023), section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.block_bytes import BLOCK, SCALE, coding_scratch, message_bytes

LEAST_SCALE = 2.0**-126  # the least fp32 number that has all of its bits
LARGEST = torch.finfo(torch.float32).max * (1 - 2.0**-23)  # so that the largest code's value is finite


class BlockCodec(NamedTuple):
    """Encodes values in blocks, and decodes them; `bits` is 8 or 4."""

    bits: int

    @property
    def most(self) -> int:
        """Return the largest code."""
        return (1 << self.bits - 1) - 1

    def message_bytes(self, elements: int) -> int:
        """Return the bytes of a message."""
        return message_bytes(elements, self.bits)

    def encode(
        self, values: Tensor, message: Tensor, scratch: Tensor | None = None, noise: torch.Generator | None = None
    ) -> None:
        """Write values [n] as a message [message_bytes(n)] of uint8, some blocks at a time.

        scratch  of `coding_scratch` elements, with noise twice as many: nothing else is allocated
        noise    rounds up or down by chance, with numbers of this generator
        """
        scales, codes = self._parts(message[None])
        if scratch is None:
            scratch = _scratch(message.numel() // self.message_bytes(BLOCK), 1 if noise is None else 2, values)
        drawn = None
        if noise is not None:
            scratch, drawn = scratch.chunk(2)
        for wide, part, cells in self._groups(values[None], scratch):
            flat = wide.view(1, -1)
            flat[:, : part.shape[1]].copy_(part)
            flat[:, part.shape[1] :].zero_()
            chances = None if drawn is None else drawn[: wide.numel()].view(wide.shape).uniform_(generator=noise)
            self._encode(wide, scales[cells], codes[cells], chances)

    def _encode(self, wide: Tensor, scales: Tensor, codes: Tensor, chances: Tensor | None) -> None:
        torch.linalg.vector_norm(wide, float("inf"), dim=2, out=scales)
        scales.nan_to_num_(nan=math.nan, posinf=math.nan)
        scales.div_(self.most).clamp_(LEAST_SCALE, LARGEST / self.most)
        wide.div_(scales[..., None])
        if chances is None:
            wide.round_()
        else:
            wide.add_(chances).floor_().clamp_(max=self.most)
        wide.nan_to_num_(0.0)
        if self.bits == 4:  # two in a byte: 16 times the second one, and the first one modulo 16
            first, second = wide[..., ::2], wide[..., 1::2]
            wide = second.mul_(16).add_(first).add_(first.lt_(0), alpha=16)
        codes.view(torch.int8).copy_(wide)

    def decode(self, messages: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """Write the values of messages [R, bytes] into `out` [R, n], or those of one into [n], in groups.

        scratch  of `coding_scratch` elements: nothing else is allocated
        """
        if messages.dim() == 1:
            messages, out = messages[None], out[None]
        scales, codes = self._parts(messages)
        for wide, part, cells in self._groups(out, scratch):
            signed = codes[cells].view(torch.int8)
            if self.bits == 8:
                wide.copy_(signed)
            else:
                first, second = wide[..., ::2], wide[..., 1::2]
                first.copy_(signed)
                first.sub_(second.copy_(first).add_(8).mul_(1 / 16).floor_(), alpha=16)
                second.copy_(signed).mul_(1 / 16).floor_()
            wide.mul_(scales[cells][..., None])
            part.copy_(wide.view(len(wide), -1)[:, : part.shape[1]])

    def _parts(self, messages: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales [R, K] and the codes [R, K, bytes of a block's] of messages."""
        blocks = messages.shape[1] // self.message_bytes(BLOCK)
        codes = messages[:, SCALE * blocks :].view(len(messages), blocks, -1)
        return messages[:, : SCALE * blocks].view(torch.float32), codes

    def _groups(self, values: Tensor, scratch: Tensor | None) -> Iterator[tuple[Tensor, Tensor, tuple[slice, slice]]]:
        """Cut values [R, n] into what is coded at once: whole rows, or blocks of one.

        Yields scratch [rows, blocks, 256] for it, the values themselves, and where its blocks are among all [R, K].
        """
        count, blocks = len(values), -(-values.shape[1] // BLOCK)
        if scratch is None:
            scratch = _scratch(count * blocks, 1, values)
        fits = scratch.numel() // BLOCK
        rows, columns = max(1, fits // blocks), min(blocks, fits)
        for row in range(0, count, rows):
            for first in range(0, blocks, columns):
                here, last = min(rows, count - row), min(first + columns, blocks)
                wide = scratch[: here * (last - first) * BLOCK].view(here, last - first, BLOCK)
                part = values[row : row + here, first * BLOCK : last * BLOCK]
                yield wide, part, (slice(row, row + here), slice(first, last))


def _scratch(blocks: int, times: int, values: Tensor) -> Tensor:
    elements = times * coding_scratch(blocks * BLOCK, values.device.type)
    return torch.empty(elements, dtype=torch.float32, device=values.device)
