"""The parts of a unit: its plan, the memory and messages of its engine, and the states that it goes through.

parameters   SHARDED -> GATHERING -> FULL (<-> KEPT: gathered, but no user may read) -> SHARDED
gradients    EMPTY -> FILLING -> REDUCING -> REDUCED (-> FILLING when more arrive) -> EMPTY
                      FILLING -> SUMMED (-> FILLING) -> REDUCING in the fixed tree of exact mode
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from fractions import Fraction
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from zero3d.blueprint.layout import Slot, UnitLayout
from zero3d.blueprint.unit import UnitPlan
from zero3d.distributed.block_codec import BlockCodec
from zero3d.distributed.collectives import Comm
from zero3d.memory.arena import Arena
from zero3d.precision import torch_dtype
from zero3d.zero.gradient_memory import GradientMemory
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
class SlowWire:
    """How sums of gradients travel between copies of shards: in a form, whose codes are rounded by noise or not."""

    form: str
    stochastic: bool = False

    def noise(self, text: str, device: torch.device) -> torch.Generator | None:
        """Return the source of numbers that this text alone decides on."""
        return torch.Generator(device).manual_seed(crc32(text.encode())) if self.stochastic else None


class UnitParts(NamedTuple):
    """The parts of a unit: its plan, and the objects that it shares with other units of its engine.

    comm        the ranks that states are cut over
    records     the buckets of units whose states are in records, by unit name (buckets.py)
    kept        memory of the host for units' reduced gradients, by name, where they leave the device
    to_host     copies them there
    slow        how sums travel between these
    across      the ranks that have the same shards; one alone where states are cut over all of dp
    part        number of this rank's part of the experts, on the ep axis
    codec       of weights on their way to a gather; None: they travel as they are (wires.py)
    node        the neighbours who keep a second shard of gathered weights together, if any do
    """

    plan: UnitPlan
    comm: Comm
    arena: Arena
    across: Comm
    records: Mapping[str, UnitBuckets] = MappingProxyType({})
    kept: Mapping[str, Tensor] = MappingProxyType({})
    to_host: ToHost | None = None
    part: int = 0
    slow: SlowWire | None = None
    codec: BlockCodec | None = None
    node: Comm | None = None

    @property
    def wide(self) -> torch.dtype:
        """Return the dtype of masters and reduced gradients."""
        return torch_dtype(self.plan.policy.master)

    @property
    def sources(self) -> int:
        """Return how many ranks' tokens give gradients that are kept apart."""
        return self.plan.sources

    def gradient_memory(self, elements: int, used: Fraction | int, dtype: torch.dtype) -> GradientMemory:
        """Return memory for gradients of a unit like this, of which `used` elements stand for parameters."""
        return GradientMemory(self.arena, elements, used, dtype, self.plan.policy.poison)

    def slot(self, full: Tensor) -> Tensor:
        """Return this rank's slice of a unit's storage."""
        return full.view(self.comm.size, -1)[self.comm.rank]

    def spare(self, full: Tensor) -> Tensor:
        """Return the longer part of a unit's storage before or behind this rank's slice: others' slices come there."""
        shard = full.numel() // self.comm.size
        before, behind = full[: self.comm.rank * shard], full[(self.comm.rank + 1) * shard :]
        return before if len(before) > len(behind) else behind


def parameter_views(full: Tensor, layout: UnitLayout) -> list[Tensor]:
    """Return a view of a unit's storage for each of its parameters, in their shapes."""
    return [_view(full, slot) for slot in layout.slots]


def _view(full: Tensor, slot: Slot) -> Tensor:
    if slot.runs == 1:
        return full[slot.start : slot.start + slot.numel].view(slot.shape)
    rows = full.as_strided((slot.runs, slot.run), (slot.stride, 1), full.storage_offset() + slot.start)
    return rows.view(slot.shape)
