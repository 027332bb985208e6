"""What all units of an engine share: their policy, its memory and messages, and the states that units go through.

parameters   SHARDED -> GATHERING -> FULL (<-> KEPT: gathered, but no user may read) -> SHARDED
gradients    EMPTY -> FILLING -> REDUCING -> REDUCED (-> FILLING when more arrive) -> EMPTY
                      FILLING -> SUMMED (-> FILLING) -> REDUCING in the fixed tree of exact mode
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero3d.blueprint.layout import Slot, UnitLayout
from zero3d.blueprint.stages import Stage
from zero3d.distributed.block_codec import BlockCodec
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import Arena
from zero3d.zero.streams import ToHost

if TYPE_CHECKING:
    from zero3d.zero.buckets import UnitBuckets


class State(Enum):
    SHARDED = auto()
    GATHERING = auto()
    FULL = auto()
    KEPT = auto()
    EMPTY = auto()
    FILLING = auto()
    SUMMED = auto()
    REDUCING = auto()
    REDUCED = auto()


@dataclass(frozen=True)
class Policy:
    """How all units of an engine behave.

    master  dtype of masters and reduced gradients
    wire    dtype in which gradients are reduced; they travel in a narrower one where nothing is rounded
    poison  fill released storages with NaN: finds early releases
    split_master  masters of weights in another dtype are those and a remainder (masters.py)
    """

    stage: Stage
    release: str
    reduce: str
    accumulate: int
    master: torch.dtype
    wire: torch.dtype
    poison: bool = False
    split_master: bool = False


@dataclass(frozen=True)
class SlowWire:
    """How sums of gradients travel between copies of shards: in a form, whose codes are rounded by noise or not."""

    form: str
    stochastic: bool = False

    def noise(self, text: str, device: torch.device) -> torch.Generator | None:
        """Return the source of numbers that this text alone decides on."""
        return torch.Generator(device).manual_seed(crc32(text.encode())) if self.stochastic else None


class Setting(NamedTuple):
    """What all units of an engine share.

    comm        the ranks that states are cut over
    records     what units have in records, by name (buckets.py)
    kept        memory of the host for units' reduced gradients, by name, where they leave the device
    to_host     copies them there
    slow        how sums travel between these
    across      the ranks that have the same shards; one alone where states are cut over all of dp
    sources     ranks whose tokens give a unit's gradients here: those of the ep axis, of experts; each one's are a
                term of their own
    part        number of this rank's part of the experts, on the ep axis
    codec       of weights on their way to a gather; None: they travel as they are (wires.py)
    node        the neighbours who keep a second shard of gathered weights together, if any do
    """

    policy: Policy
    comm: Comm
    arena: Arena
    across: Comm
    records: Mapping[str, UnitBuckets] = MappingProxyType({})
    kept: Mapping[str, Tensor] = MappingProxyType({})
    to_host: ToHost | None = None
    sources: int = 1
    part: int = 0
    slow: SlowWire | None = None
    codec: BlockCodec | None = None
    node: Comm | None = None

    def slot(self, full: Tensor) -> Tensor:
        """Return this rank's slice of a unit's storage."""
        return full.view(self.comm.size, -1)[self.comm.rank]


def parameter_views(full: Tensor, layout: UnitLayout) -> list[Tensor]:
    """Return a view of a unit's storage for each of its parameters, in their shapes."""
    return [_view(full, slot) for slot in layout.slots]


def _view(full: Tensor, slot: Slot) -> Tensor:
    if slot.runs == 1:
        return full[slot.start : slot.start + slot.numel].view(slot.shape)
    rows = full.as_strided((slot.runs, slot.run), (slot.stride, 1), full.storage_offset() + slot.start)
    return rows.view(slot.shape)
