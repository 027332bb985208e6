"""Refuse ranks with different numbers of micro-batches: one that has more would wait for its peers for ever.

train_batch   has a list: all tell each other how long it is
evaluate      has a list, or an iterable of batches one by one: all tell each other before each that there is one more

On accelerators nothing is compared: that would wait for the device. The ledger, which counts a step's traffic, leaves
these numbers out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import Any

import torch

from zero3d.distributed.agreement import name_ranks
from zero3d.distributed.collectives import Comm
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena

UNKNOWN = -1


class Counts:
    """Compares numbers of micro-batches over all ranks of a mesh; 8 bytes to each other rank."""

    def __init__(self, mesh: Mesh) -> None:
        self._comm = Comm(mesh.everyone, Arena(torch.device("cpu")), Ledger())
        alone = mesh.everyone.backend in ("none", "fake")  # a dry run has no peers
        self._compares = mesh.device.type == "cpu" and not alone

    def check(self, batches: Sized) -> None:
        """Raise ConfigError on all ranks where they have lists of different lengths; not on an accelerator."""
        if self._compares:
            _refuse(self._exchange(len(batches)))

    def checked(self, batches: Iterable[Any]) -> Iterable[Any]:
        """Return the batches. Raises ConfigError on all ranks where numbers differ, at once or when one has no more."""
        if not self._compares:
            return batches
        counts = self._exchange(len(batches) if isinstance(batches, Sized) else UNKNOWN)
        if UNKNOWN in counts:
            return self._one_by_one(batches)
        _refuse(counts)
        return batches

    def _one_by_one(self, batches: Iterable[Any]) -> Iterator[Any]:
        over = object()
        for number, batch in enumerate(_with_end(batches, over)):
            counts = self._exchange(number + (batch is not over))
            _refuse(counts, more=True)
            if batch is over:
                return
            yield batch

    def _exchange(self, count: int) -> list[int]:
        told = self._comm.exchange(torch.tensor([count], dtype=torch.int64))
        return [int(each) for each in self._comm.read(told.view(-1), [count] * self._comm.size)]


def refuse_none(number: int, method: str) -> None:
    """Raise ConfigError where there is no micro-batch: a mean loss over nothing is NaN."""
    if number == 0:
        raise ConfigError(f"engine.{method} was given no micro-batches: it takes a list of at least one.")


def _with_end(batches: Iterable[Any], over: object) -> Iterator[Any]:
    yield from batches
    yield over


def _refuse(counts: list[int], more: bool = False) -> None:
    least = min(counts)
    if least == max(counts):
        return
    fewer = [rank for rank, count in enumerate(counts) if count == least]
    others = "others have more" if more else f"others have up to {max(counts)}"
    raise ConfigError(
        f"{name_ranks(fewer)} {'has' if len(fewer) == 1 else 'have'} no more batches after {least}, and {others}: all "
        "ranks must run equally many micro-batches, or those that have more wait for ever. Drop the last ones, or give "
        "a rank that has none left a batch whose targets are all masked: its weight is 0."
    )
