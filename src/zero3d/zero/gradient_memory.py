"""Memory of gradients: there from their first use in a step to the update of their unit.

    forward          nothing
    backward         each unit's from its first gradient, or from its reduction on
    step             all of them; each is given back when its unit has been updated

Memory comes uninitialised, and the first write covers all that is read later. The padding between parameters may hold
anything.
"""

from __future__ import annotations

from fractions import Fraction

import torch

from zero3d.memory.arena import Arena


class GradientMemory:
    """Owns a flat buffer whose memory comes and goes; views of it stay, and no optimizer has to be told.

    It begins with memory, in which views are cut.

    buffer    must not be read or written unless it is `there`: a segmentation fault otherwise
    poisoned  memory given back is filled with NaN and kept, which finds late readers
    """

    def __init__(
        self, arena: Arena, elements: int, used: Fraction | int, dtype: torch.dtype, poisoned: bool = False
    ) -> None:
        self._arena, self._used = arena, used
        self._poisoned = poisoned
        self.buffer = arena.reserve("gradients", elements, used, dtype)
        self.there = True

    def fill(self) -> torch.Tensor:
        """Return the buffer with memory, which nobody has written."""
        if not self.there:
            self.there = True
            self._arena.fill("gradients", self.buffer, self._used)
        return self.buffer

    def drop(self) -> None:
        """Give the memory back for good."""
        self.drain()
        self._arena.forget("gradients", self.buffer, self._used)

    def drain(self) -> None:
        """Give the memory back, if it is there."""
        if self.there:
            self.there = False
            self._arena.drain("gradients", self.buffer, self._poisoned, used=self._used)
