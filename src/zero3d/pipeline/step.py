"""A training step on one rank, as torch's stages call it: by the numbers of a chunk and of a micro-batch.

    forward     looks the micro-batch up and runs the chunk; behind the last chunk the loss
    backward    around every backward: gradients that no hook saw are handed on
    weights     around the weight phase of a split backward: the chunk's units are gathered

An observer may be told of one of the micro-batches on its way.

Split backward. A zero-bubble schedule takes gradients of inputs and of weights apart, by `autograd.grad`; the
latter writes `.grad` without any hook, so what is found there is handed on by `Callbacks.sweep`. No hook tells
either that recomputed blocks and saved weights are read again, so the chunk's units are gathered first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from zero3d.distributed.ledger import Ledger
from zero3d.memory.arena import Arena
from zero3d.pipeline.actions import Action
from zero3d.pipeline.chunks import Chunks, SumAndWeight
from zero3d.pipeline.failures import Failures
from zero3d.zero.accumulation import Accumulation, Contribution
from zero3d.zero.clocks import Clocks
from zero3d.zero.step_parts import BACKWARD, FORWARD


class Callbacks(NamedTuple):
    """Functions of the engine that a step calls around its forwards and backwards.

    accumulation  counts micro-batches
    sweep         hands on gradients that no hook saw
    begin         a forward comes next, of a micro-batch through a chunk, by their numbers
    done          all gradients of a chunk and a micro-batch are there
    gathered      a chunk's units, whole inside the block
    arena         lends receive buffers
    clocks        tell what compute does from waits for other stages
    own_shape     shape of token ids -> shape of this rank's token ids
    """

    accumulation: Accumulation
    sweep: Callable[[], None]
    begin: Callable[[int, int], None]
    done: Callable[[nn.Module], None]
    gathered: Callable[[nn.Module], AbstractContextManager[None]]
    arena: Arena
    clocks: Clocks
    own_shape: Callable[[Sequence[int]], Sequence[int]] = tuple

    def apart(self) -> Callbacks:
        """Return the callbacks for a micro-batch that belongs to no step: nothing of it is counted, drawn or summed."""
        nothing = Accumulation(1, every_micro_batch=False, scales_loss=False)
        return self._replace(accumulation=nothing, sweep=lambda: None, begin=lambda *_: None, done=lambda _: None)


class Observer(Protocol):
    """What a step tells of one of its micro-batches, whose number is `micro_batch`."""

    @property
    def micro_batch(self) -> int: ...

    def enters(self, chunk: int, batch: Any, entering: Sequence[Tensor]) -> None:
        """Hear that its forward through a chunk comes next, of tensors that enter from the chunk before."""

    def leaves(self, chunk: int, leaving: Any) -> None:
        """Hear what its forward through a chunk has given; of the last one the loss."""

    def backward(self, chunk: int) -> AbstractContextManager[None]:
        """Return what is put around its backward through a chunk, or around each half of a split one."""


class Step:
    """The training step that runs, or the last one that ran.

    losses    (sum, weight) of each micro-batch, on the rank of the last chunk only
    actions   what this rank has done, in order
    """

    def __init__(
        self,
        chunks: Chunks,
        failures: Failures,
        callbacks: Callbacks,
        ledger: Ledger,
        axis: str,
        loss_dtype: torch.dtype,
    ) -> None:
        self._chunks = chunks
        self._failures = failures
        self._callbacks = callbacks
        self._ledger = ledger
        self._axis = axis
        self._loss_dtype = loss_dtype
        self.arena, self.clocks = callbacks.arena, callbacks.clocks
        self._batches: Sequence[Any] = ()
        self._scale = 1.0
        self._observer: Observer | None = None
        self.losses: list[SumAndWeight] = []
        self.actions: list[Action] = []

    @contextmanager
    def over(self, batches: Sequence[Any], scale: float, observer: Observer | None) -> Iterator[None]:
        """Begin a step over these micro-batches, whose losses are multiplied by `scale`; let go of them at its end."""
        self._batches = batches
        self._scale = scale
        self.losses = []
        self.actions = []
        self._observer = observer
        try:
            yield
        finally:
            self._batches, self._observer = (), None

    def finish(self, micro_batches: int) -> None:
        """Count the micro-batches of a step that has run."""
        self._callbacks.accumulation.finish(micro_batches, [weight for _, weight in self.losses])

    # --- called by stages -----------------------------------------------------------------------

    def forward(self, chunk: int, micro_batch: int, entering: tuple[Tensor, ...]) -> Any:
        """Return a chunk's output; behind the last chunk the scaled sum of losses."""
        batch = self._batches[micro_batch]
        ids, inputs = self._chunks.split_batch(batch)
        self._callbacks.begin(micro_batch, chunk)
        observer = self._observer_of(micro_batch)
        if observer is not None:
            observer.enters(chunk, batch, entering if chunk else ())
        with self.clocks.of(FORWARD):
            output = self._chunks.run(chunk, entering if chunk else (ids,), inputs)
            if chunk == self._chunks.last:
                with self._failures.in_chunk(chunk):
                    output = self._scaled_loss(output, batch)
        if observer is not None:
            observer.leaves(chunk, output)
        return output

    @contextmanager
    def backward(self, chunk: int, micro_batch: int) -> Iterator[None]:
        """Run a backward inside; hand on gradients that no hook saw."""
        observer = self._observer_of(micro_batch)
        counting = self._callbacks.accumulation.counting(Contribution(0.0, last=False))
        around = observer.backward(chunk) if observer else nullcontext()
        with self._failures.in_chunk(chunk), counting, around, self.clocks.of(BACKWARD):
            yield
            self._callbacks.sweep()

    def _observer_of(self, micro_batch: int) -> Observer | None:
        return self._observer if self._observer is not None and self._observer.micro_batch == micro_batch else None

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
