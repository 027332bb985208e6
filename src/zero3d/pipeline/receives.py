"""The buffers that a pipeline rank receives into, for as long as they are needed.

torch makes a buffer to receive into for every micro-batch of a step and keeps them all. Here there is one from the
moment something is received until that micro-batch's backward is over: as many as are in flight.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from zero3d.memory.arena import Arena

RECEIVED = "received"
Table = dict[int, tuple[Any, ...]]  # torch's, by micro-batch


class ReceiveBuffers:
    """The buffers that a chunk receives into: for each entry of torch's tables one, while it is needed.

    Two tables: activations that come from the chunk before (args_recv_info), gradients from the chunk after.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._empty: dict[tuple[int, int, int], Tensor] = {}  # what stands in the tables meanwhile, without memory
        self._lent: dict[tuple[int, int, int], Tensor] = {}

    def empty(self, table: Table, micro_batches: int) -> None:
        """Make entries for all micro-batches, like those of the first, whose buffers have no memory."""
        first = table[0]
        for micro_batch in range(micro_batches):
            table[micro_batch] = tuple(map(copy.copy, first))
            for place, info in enumerate(table[micro_batch]):
                if (buffer := getattr(info, "buffer", None)) is not None:
                    info.buffer = torch.empty_like(buffer).requires_grad_(buffer.requires_grad)  # torch 2.11 asks it
                    info.buffer.untyped_storage().resize_(0)
                    self._empty[id(table), micro_batch, place] = info.buffer

    def lend(self, table: Table, micro_batch: int) -> None:
        """Lend memory to the buffers of a micro-batch for which something is about to arrive."""
        for place, info in enumerate(table.get(micro_batch, ())):
            key = id(table), micro_batch, place
            if key in self._empty:
                like = self._empty[key]
                self._lent[key] = self._arena.borrow(RECEIVED, like.numel(), like.dtype)
                info.buffer = self._lent[key].view(like.shape).requires_grad_(like.requires_grad)

    def give_back(self, micro_batch: int, activations: Table, gradients: Table) -> None:
        """Give back the memory of a micro-batch that is through.

        Where a V turns, torch has put the neighbour's own tensors in the tables. Activations are freed at once, because
        graphs that wait for the garbage collector hold them; a gradient may still be on its way to the next chunk.
        """
        for table in (activations, gradients):
            for place, info in enumerate(table.get(micro_batch, ())):
                key = id(table), micro_batch, place
                if key in self._empty:
                    info.buffer = self._empty[key]
                if (lent := self._lent.pop(key, None)) is not None:
                    self._arena.give_back(RECEIVED, lent)
                    if table is activations:
                        lent.untyped_storage().resize_(0)

    def free(self) -> None:
        """Give back all memory, whoever still holds a reference."""
        while self._lent:
            _, lent = self._lent.popitem()
            self._arena.give_back(RECEIVED, lent)
            lent.untyped_storage().resize_(0)
