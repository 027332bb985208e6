"""A micro-batch on its way through this rank's part of the model, forward and backward: in a step, and again.

    enters    what its gradients depend on is remembered; or, again, put in its place
    leaves    what a model chunk of a pipeline hands on is hashed, and the gradient that it hands back
    backward  gradients of parameters are hashed

Without a pipeline the model is its only chunk, number 0, and nothing enters or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.engine.replay.hashes import Boundary, GradientHashes, Parameter
from zero3d.engine.replay.inputs import Inputs, Surroundings
from zero3d.zero.reductions import Reductions

Given = Mapping[int, Inputs]  # by number of a model chunk; the first one's has the micro-batch


class Recording:
    """Follows one micro-batch on its way through this rank's model chunks, and the hashes of what came of it."""

    def __init__(self, micro_batch: int) -> None:
        self.micro_batch = micro_batch
        self.hashes = GradientHashes()

    def enters(self, chunk: int, batch: Any, entering: Sequence[Tensor]) -> None:
        """Look at the gradients of what enters a chunk, when they come."""
        for t in entering:
            if t.requires_grad:
                t.register_hook(partial(self.hashes.leaves, Boundary(chunk, backwards=True)))  # type: ignore[no-untyped-call]

    def leaves(self, chunk: int, leaving: Any) -> None:
        """Look at what leaves a chunk."""
        self.hashes.leaves(Boundary(chunk, backwards=False), leaving)


class InStep(Recording):
    """Follows a micro-batch of a step: remembers what it began with, and looks at gradients beside whoever does."""

    def __init__(
        self, micro_batch: int, chunks: Mapping[int, nn.Module], device: torch.device, reductions: Reductions
    ) -> None:
        super().__init__(micro_batch)
        self._chunks = chunks
        self._device = device
        self._reductions = reductions
        self.began: dict[int, Inputs] = {}

    def enters(self, chunk: int, batch: Any, entering: Sequence[Tensor]) -> None:
        kept = None if self.began else batch
        self.began[chunk] = Inputs.now(kept, self._chunks[chunk], self._device)
        super().enters(chunk, batch, entering)

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """Look at the gradients that come inside."""
        other = self._reductions.watch

        def watch(*came: Any) -> None:
            self.hashes.add(*came)
            if other is not None:
                other(*came)

        self._reductions.watch = watch
        try:
            yield
        finally:
            self._reductions.watch = other


class Again(Recording):
    """Follows a micro-batch that belongs to no step: begins from given inputs, and takes gradients that no hook saw."""

    def __init__(self, given: Given, surroundings: Mapping[int, Surroundings], parameters: Sequence[Parameter]) -> None:
        super().__init__(0)
        self._given = given
        self._surroundings = surroundings
        self._parameters = parameters

    @property
    def batch(self) -> Any:
        """The micro-batch."""
        return next(iter(self._given.values())).batch

    def enters(self, chunk: int, batch: Any, entering: Sequence[Tensor]) -> None:
        self._surroundings[chunk].become(self._given[chunk])
        super().enters(chunk, batch, entering)

    @contextmanager
    def backward(self, chunk: int) -> Iterator[None]:
        """Take gradients inside, of weights that are taken apart, too."""
        yield
        for unit, index in self._parameters:
            p = unit.weights.params[index]
            if p.grad is not None:
                grad, p.grad = p.grad, None
                self.hashes.add(unit, index, grad)

    def restore(self) -> None:
        """Put the surroundings of before back."""
        for surroundings in self._surroundings.values():
            surroundings.restore()
