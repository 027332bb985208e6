"""Sent messages and receive buffers of a pipeline rank, each kept for as long as it is needed.

torch's schedules hold sent tensors to the end of a step: two hidden states for every micro-batch. Here a hidden
state is let go when its gradient has come back, a gradient when a later message of its receiver acknowledges its use
(pipeline/acknowledgements.py). Both have arrived by then, so that nobody waits. A message that torch sends together
with a receive stays torch's: 1f1b's, but for those before its first backward.

torch makes a buffer to receive into for every micro-batch of a step, too, and keeps them all. Here there is one from
the moment something is received until that micro-batch's backward is over: as many as are in flight.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import schedules

from zero3d.memory.arena import Arena
from zero3d.pipeline.acknowledgements import Work

RECEIVED = "received"
Table = dict[int, tuple[Any, ...]]  # torch's, by micro-batch


class Message(NamedTuple):
    """Operations started together, whose tensors must live until their end, and handles to wait for."""

    handles: list[dist.Work]
    operations: list[dist.P2POp]


class Sends:
    """Messages under way, by the work known to begin after their arrival.

    acknowledgements   by backward that sends a gradient, the work known to begin after the gradient's arrival
    """

    def __init__(self, acknowledgements: Mapping[Work, Work]) -> None:
        self._acknowledgements = acknowledgements
        self._under_way: dict[Work | None, list[Message]] = {}  # None: known at the end of the step only

    def send(self, work: Work, operations: list[dist.P2POp]) -> None:
        """Start what `work` sends."""
        if operations:
            until = self._acknowledgements.get(work) if work.backward else work._replace(backward=True)
            handles = schedules._batch_p2p(operations)  # torch's own way: both ends must take the same communicator
            self._under_way.setdefault(until, []).append(Message(handles, operations))

    def begin(self, work: Work) -> None:
        """Let go of messages that have arrived once this rank has the inputs of `work`."""
        self._wait(work)

    def finish(self) -> None:
        """Wait until everything has arrived."""
        for until in list(self._under_way):
            self._wait(until)

    def forget(self) -> None:
        """Let go of everything without waiting, after a step that failed."""
        self._under_way.clear()

    def _wait(self, until: Work | None) -> None:
        for message in self._under_way.pop(until, ()):
            for handle in message.handles:
                handle.wait()


class ReceiveBuffers:
    """The buffers that a chunk receives into: for each entry of torch's tables one, while it is needed.

    Two tables: activations that come from the chunk before (args_recv_info), gradients from the chunk after.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._empty: dict[tuple[int, int, int], Tensor] = {}  # what stands in the tables meanwhile, without memory
        self._lent: dict[tuple[int, int, int], Tensor] = {}

    def empty(self, table: Table, micro_batches: int) -> None:
        """Make entries for all micro-batches, like the first one's, with buffers without memory."""
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
