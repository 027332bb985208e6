"""The host's copy of what a rank saves: one memory, made once and used again by every save behind training.

    | fp64 | fp32: masters, moments | 16 bits | ...      without gaps, the widest first; halves are joined on their way

It has the bytes of the rank's file of tensors, its buffers and random states apart: a master is fp32 there, however
the engine stores it. Memory is a `HostSlab`: its pages are there before training goes on, and pinned on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from zero3d.checkpoint.state import EngineState
from zero3d.checkpoint.writing import BUFFER_BYTES, chunks
from zero3d.errors import OutOfBudget
from zero3d.memory.blocks import padded
from zero3d.memory.budget import HostBudget
from zero3d.offload.host_slab import HostSlab
from zero3d.offload.records import Record
from zero3d.precision import Halves
from zero3d.spec.sizes import decimal

NAME = "copy that a save behind training writes"
States = Mapping[str, Tensor | Halves]


class HostCopy:
    """Owns the memory that states are copied into.

    budget  measures what this rank may take of its host
    nbytes  of the memory that is there
    """

    def __init__(self, device: torch.device, budget: Callable[[], HostBudget]) -> None:
        self._device, self._budget = device, budget
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.nbytes = 0

    def measure(self) -> HostBudget | None:
        """Return what the host has, where nothing was taken yet. All ranks call it together."""
        return self._budget() if not self.nbytes else None

    def reserve(self, states: States, budget: HostBudget | None) -> dict[str, Tensor]:
        """Reserve a place for each state, by its key. Raises OutOfBudget where the host has no memory for that."""
        needed = sum(_nbytes(values) for values in states.values())
        if padded(needed) > self.nbytes:
            self._grow(needed, budget)
        places, start = {}, 0
        for key in sorted(states, key=lambda key: (-states[key].dtype.itemsize, key)):
            values = states[key]
            stop = start + _nbytes(values)
            places[key] = self._memory[start:stop].view(values.dtype).view(values.shape)
            start = stop
        return places

    def _grow(self, needed: int, budget: HostBudget | None) -> None:
        """Take the memory: once, or again where an optimizer has made more states at its first step."""
        if budget is not None and padded(needed) > budget.nbytes:
            raise OutOfBudget(
                f"saving in the background takes {decimal(padded(needed))} of host memory on this rank, for a copy of "
                f"the states, and the rank may take {decimal(budget.nbytes)}: {budget}. Save while training waits "
                "(checkpoint.asynchronous=false), or use more hosts."
            )
        self._memory, self.nbytes = torch.empty(0, dtype=torch.uint8), 0  # what is there goes first
        slab = HostSlab({NAME: [Record(NAME, ((torch.uint8, needed),))]}, self._device)
        self._memory, self.nbytes = slab.memory[NAME][0], slab.nbytes


@torch.no_grad()
def fill(places: Mapping[str, Tensor], states: States) -> None:
    """Copy states into their places, a bounded part at a time; on an accelerator all of it is enqueued."""
    for key, place in places.items():
        values = states[key]
        most = max(1, BUFFER_BYTES // values.dtype.itemsize)
        for into, part in zip(chunks(place, most), chunks(values, most), strict=True):
            into.copy_(part, non_blocking=True)


def copy_bytes(engine: EngineState) -> int:
    """Return the bytes of the copy by formula: of layouts, and of what the optimizer has for an element."""
    return padded(sum(_of_units(engine)))


def _of_units(engine: EngineState) -> Iterator[int]:
    """Yield the bytes of each unit: of its elements that this rank saves."""
    widths: dict[str, int] = {}
    for owned in engine.optimizer.pieces:
        states = engine.optimizer.torch.state.get(owned.master, {}).values()
        kept = [value.dtype for value in states if not isinstance(value, Tensor) or value.dim()]
        widths[owned.name] = owned.unit.weights.masters.dtype.itemsize + sum(dtype.itemsize for dtype in kept)
    for unit in engine.units:
        for piece in unit.saved_pieces():
            name = unit.layout.slots[piece.slot].name
            if engine.saves(name):
                yield (unit.dtype.itemsize if unit.grads is None else widths[name]) * (piece.stop - piece.start)


def _nbytes(values: Tensor | Halves) -> int:
    return values.shape.numel() * values.dtype.itemsize
