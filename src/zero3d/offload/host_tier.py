"""The host as a tier: records in the slab that a rank's buffers are in, too (host_slab.py).

updated on the host      used where they are, in the slab
updated on the device    copied to a ring's buffers and back
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zero3d.offload.ring import HostStore, Ring
from zero3d.offload.states import WORDS
from zero3d.offload.tiered_records import InPlace, ThroughRing, Tier
from zero3d.offload.tiers import Opening, OpenTier


class HostTier(OpenTier):
    """Gives records of the host's slab."""

    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self._slab = opening.slab

    def tier(self, kind: str, buffers: Sequence[Tensor], staging: Sequence[Tensor]) -> Tier:
        """Return a kind's records, where they are or through buffers."""
        part = WORDS[kind]
        if not buffers:
            return InPlace(self._slab.views[part])
        ring = Ring(HostStore(self._slab.memory[part]), self.records(kind), buffers)
        return ThroughRing(ring, self._slab.views[part])
