"""A training step on one rank, as torch's stages call it: by the numbers of a chunk and of a micro-batch.

    forward     looks the micro-batch up and runs the chunk; behind the last chunk the loss
    backward    around every backward: gradients that no hook saw are handed on
    weights     around the weight phase of a split backward: the chunk's units are gathered

Split backward. A zero-bubble schedule takes gradients of inputs and of weights apart, by `autograd.grad`; the
latter writes `.grad` without any hook, so what is found there is handed on by `Callbacks.sweep`. No hook tells
either that recomputed blocks and saved weights are read again, so the chunk's units are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero3d.distributed.ledger import Ledger
from zero3d.memory.arena import Arena
from zero3d.pipeline.actions import Action
from zero3d.pipeline.chunks import Chunks, SumAndWeight
from zero3d.pipeline.failures import Failures
from zero3d.zero.accumulation import Accumulation, Contribution


class Callbacks(NamedTuple):
    """What a step calls of the engine around its forwards and backwards.

    accumulation  counts micro-batches
    sweep         hands on gradients that no hook saw
    begin         a forward comes next, of a micro-batch through a chunk, by their numbers
    done          all gradients of a chunk and a micro-batch are there
    gathered      a chunk's units, whole inside the block
    arena         lends what is received into
    """

    accumulation: Accumulation
    sweep: Callable[[], None]
    begin: Callable[[int, int], None]
    done: Callable[[nn.Module], None]
    gathered: Callable[[nn.Module], AbstractContextManager[None]]
    arena: Arena


class Step:
    """The training step that runs, or the last one that ran.

    losses    (sum, weight) of each micro-batch, on the rank of the last chunk only
    actions   what this rank has done, in order
    """

    def __init__(
        self, chunks: Chunks, failures: Failures, callbacks: Callbacks, ledger: Ledger, axis: str,
        loss_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self._chunks, self._failures, self._callbacks = chunks, failures, callbacks
        self._ledger, self._axis, self._loss_dtype = ledger, axis, loss_dtype
        self.arena = callbacks.arena
        self._batches: Sequence[Any] = ()
        self._scale = 1.0
        self.losses: list[SumAndWeight] = []
        self.actions: list[Action] = []

    @contextmanager
    def over(self, batches: Sequence[Any], scale: float) -> Iterator[None]:
        """Begin a step over these micro-batches, whose losses are multiplied by `scale`; let go of them at its end."""
        self._batches, self._scale, self.losses, self.actions = batches, scale, [], []
        try:
            yield
        finally:
            self._batches = ()

    def finish(self, micro_batches: int) -> None:
        """Count the micro-batches of a step that has run."""
        self._callbacks.accumulation.finish(micro_batches, [weight for _, weight in self.losses])

    # --- called by stages -----------------------------------------------------------------------

    def forward(self, chunk: int, micro_batch: int, entering: tuple[Tensor, ...]) -> Any:
        """Return a chunk's output; behind the last chunk the scaled sum of losses."""
        batch = self._batches[micro_batch]
        ids, inputs = self._chunks.split_batch(batch)
        self._callbacks.begin(micro_batch, chunk)
        output = self._chunks.run(chunk, entering if chunk else (ids,), inputs)
        if chunk != self._chunks.last:
            return output
        with self._failures.in_chunk(chunk):
            return self._scaled_loss(output, batch)

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """Run a backward inside; hand on gradients that no hook saw."""
        with self._failures.in_chunk(chunk), self._callbacks.accumulation.counting(Contribution(0.0, last=False)):
            yield
            self._callbacks.sweep()

    def weights(self, chunk: int) -> AbstractContextManager[None]:
        """Keep a chunk's units gathered for the weight phase of a split backward inside."""
        return self._callbacks.gathered(self._chunks.modules[chunk])

    def done(self, chunk: int) -> None:
        """Tell the engine that a micro-batch's backward through a chunk is over, of weights too."""
        self._callbacks.done(self._chunks.modules[chunk])

    def count_message(self, operation: str, chunk: int, tensor: Tensor) -> None:
        """Write what a chunk sends to another rank into the ledger."""
        self._ledger.record(operation, self._axis, f"part {chunk}", tensor.numel(), tensor.element_size())

    def _scaled_loss(self, output: Any, batch: Any) -> Tensor:
        total, weight = self._chunks.loss(output, batch)
        self.losses.append((total.detach(), weight))
        loss = total.to(self._loss_dtype)
        return loss * self._scale if self._scale != 1.0 else loss
