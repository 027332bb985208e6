"""Buffers that a forward writes: its recomputation sees their earlier values, and writes none.

    BatchNorm        running statistics move in every forward in training
    spectral norm    a step of the power iteration in every forward, whose result divides the weight
    own averages     module.average.lerp_(x.mean(), 0.1), or module.average = ...

The buffers that a forward will write are not known before it: all of a block are copied, and copies of modules that
wrote none are dropped after it. Blocks of transformers have none, or constant ones such as masks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


class Before(NamedTuple):
    """A buffer as it was: where it is registered, the tensor and its version, and a copy of its value."""

    module: nn.Module
    name: str
    tensor: Tensor
    version: int
    value: Tensor

    @property
    def was_written(self) -> bool:
        """Return whether the buffer may have been written since; normalisation layers write without a new version."""
        now = self.module._buffers.get(self.name)
        return now is not self.tensor or now._version != self.version or isinstance(self.module, _NormBase)


def buffers_of(block: nn.Module) -> list[Before]:
    """Return all buffers of a block and its inner modules, with copies of their values."""
    return [
        Before(module, name, buffer, buffer._version, buffer.detach().clone())
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


def written(before: Sequence[Before]) -> list[Before]:
    """Return the entries of modules with a written buffer."""
    writers = {entry.module for entry in before if entry.was_written}
    return [entry for entry in before if entry.module in writers]


@contextmanager
def as_before(buffers: Sequence[Before]) -> Iterator[None]:
    """Inside, these buffers have their earlier values; writes to them are forgotten."""
    now = [(entry.module, entry.name, entry.module._buffers[entry.name]) for entry in buffers]
    for entry in buffers:
        entry.module._buffers[entry.name] = entry.value.clone()
    try:
        yield
    finally:
        for module, name, tensor in now:
            module._buffers[name] = tensor
