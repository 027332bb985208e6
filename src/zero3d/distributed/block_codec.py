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

from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.distributed.block_bytes import BLOCK, SCALE, message_bytes
from zero3d.memory.scratch import cached_group

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

    def scratch(self, elements: int, device: str) -> int:
        """Return the fp32 elements that coding so many works in, on a device of this type."""
        return min(-(-elements // BLOCK) * BLOCK, cached_group(device))

    def encode(
        self, values: Tensor, message: Tensor, scratch: Tensor | None = None, noise: torch.Generator | None = None
    ) -> None:
        """Write values [n] as a message [message_bytes(n)] of uint8, some blocks at a time.

        noise  rounds up or down by chance, with numbers of this generator
        """
        scales, codes = self._parts(message)
        scratch = self._own(values, scratch)
        for first, rows in self._groups(values, scratch):
            part = values[first * BLOCK : first * BLOCK + rows.numel()]
            rows.view(-1)[: part.numel()].copy_(part)
            rows.view(-1)[part.numel() :].zero_()
            within = slice(first, first + len(rows))
            self._encode(rows, scales[within], codes[within], noise)

    def _encode(self, rows: Tensor, scales: Tensor, codes: Tensor, noise: torch.Generator | None) -> None:
        torch.linalg.vector_norm(rows, float("inf"), dim=1, out=scales)
        scales.add_(scales - scales)  # infinity, too, is NaN from here on
        scales.div_(self.most).clamp_(LEAST_SCALE, LARGEST / self.most)
        rows.div_(scales[:, None])
        if noise is None:
            rows.round_()
        else:
            rows.add_(torch.rand(rows.shape, generator=noise, device=rows.device)).floor_().clamp_(max=self.most)
        rows.nan_to_num_(0.0)
        if self.bits == 8:
            codes.view(torch.int8).copy_(rows)
        else:
            pairs = rows.to(torch.int8).view(torch.uint8)
            torch.bitwise_or(pairs[:, ::2] & 15, pairs[:, 1::2] << 4, out=codes)

    def decode(self, message: Tensor, out: Tensor, scratch: Tensor | None = None) -> None:
        """Write the values of a message into `out` [n], some blocks at a time."""
        scales, codes = self._parts(message)
        scratch = self._own(out, scratch)
        for first, rows in self._groups(out, scratch):
            within = slice(first, first + len(rows))
            if self.bits == 8:
                rows.copy_(codes[within].view(torch.int8))
            else:
                signed = codes[within].view(torch.int8)
                rows[:, ::2].copy_((signed << 4) >> 4)
                rows[:, 1::2].copy_(signed >> 4)
            rows.mul_(scales[within, None])
            part = out[first * BLOCK : first * BLOCK + rows.numel()]
            part.copy_(rows.view(-1)[: part.numel()])

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """Return the scales [K] and the codes [K, bytes of a block] of a message."""
        count = message.numel() // self.message_bytes(BLOCK)
        return message[: SCALE * count].view(torch.float32), message[SCALE * count :].view(count, -1)

    def _own(self, values: Tensor, scratch: Tensor | None) -> Tensor:
        if scratch is not None:
            return scratch
        elements = self.scratch(values.numel(), values.device.type)
        return torch.empty(elements, dtype=torch.float32, device=values.device)

    def _groups(self, values: Tensor, scratch: Tensor) -> list[tuple[int, Tensor]]:
        """Return the first block of each group that fits into the scratch, and the group's rows [blocks, 256] of it."""
        blocks, fits, rows = -(-values.numel() // BLOCK), scratch.numel() // BLOCK, scratch.view(-1, BLOCK)
        return [(first, rows[: min(fits, blocks - first)]) for first in range(0, blocks, fits)]
