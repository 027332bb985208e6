"""Records: runs of bytes that move between tiers whole, and the tensors in them.

    [remainder int16 | exp_avg fp32 | exp_avg_sq fp32]      one after the other, without gaps

The same bytes on every tier, so that moving a record is a copy. In memory a record begins at a whole block of 4096
bytes, which direct I/O asks for, and takes whole blocks.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zero3d.errors import LayoutError


class Record(NamedTuple):
    """What one record is called, and its fields in order: dtype and elements of each."""

    name: str
    fields: tuple[tuple[torch.dtype, int], ...]

    @property
    def nbytes(self) -> int:
        """Return the bytes of all fields."""
        return sum(dtype.itemsize * elements for dtype, elements in self.fields)

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the fields as views of memory, uint8, that is at least as long. Raises LayoutError for odd ones."""
        found, start = [], 0
        for dtype, elements in self.fields:
            if start % dtype.itemsize:
                raise LayoutError(
                    f"record {self.name}: a field of {dtype} would begin at byte {start}, which is not a multiple of "
                    f"{dtype.itemsize}: put wider fields first, or cut records at multiples of 16 elements."
                )
            found.append(memory[start : start + elements * dtype.itemsize].view(dtype))
            start += elements * dtype.itemsize
        return found
