"""Values that are not finite: steps counted, gradients traced to the first unit, weights found.

    ordinary step     nothing but the norm, which the boundary reads anyway; steps skipped in a row are counted
    last attempt      inside `tracing` every local gradient is looked at as autograd hands it over, on the device
    afterwards        `fail` reads what was seen; ranks compare, and the one where it began tells all

fp16: an overflow does not count while the loss scale can still fall, which is how it finds its value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.errors import NonFiniteError, Zero3dError
from zero3d.precision import NAMES, LossScale, is_finite
from zero3d.zero.optimizer import APPLIED, OVERFLOW, Outcome
from zero3d.zero.reductions import Reductions
from zero3d.zero.unit import Unit

MANY = 5  # non-finite steps in a row after which a loop of somebody's own is warned
SHOWN = 3
BEYOND = "each rank's own gradients are finite: their sum or its norm is not"


class NonFinite(NamedTuple):
    """A rank's first gradient that is not finite: the smallest of all ranks' is the first of all.

    chunk  the model chunk of a pipeline, negative: backward begins at the last one
    place  among the gradients that came in this step
    """

    chunk: int
    place: int
    text: str


NEVER = 1 << 62  # no gradient's place
NOTHING = NonFinite(0, NEVER, BEYOND)


class Trace:
    """Owns of every parameter the place at which its gradient was first not finite; a number on the device."""

    def __init__(self) -> None:
        self._came = 0
        self._first: dict[tuple[Unit, int], Tensor] = {}

    def look(self, unit: Unit, index: int, grad: Tensor) -> None:
        """Look at a local gradient that has come."""
        self._came += 1
        values = grad.coalesce().values() if grad.is_sparse else grad
        if values.numel():
            place = torch.where(is_finite(values), NEVER, self._came)
            known = self._first.get((unit, index))
            self._first[unit, index] = place if known is None else torch.minimum(known, place)

    def first(self, chunks: Mapping[int, nn.Module], everyone: Comm) -> NonFinite:
        """Return the earliest of this rank. Reads the device once."""
        if not self._first:
            return NOTHING
        places = everyone.read(torch.stack(list(self._first.values())), [NEVER] * len(self._first))
        firsts = [
            NonFinite(-_chunk_of(unit, chunks), place, f"unit {unit.name!r}, parameter {unit.slot_of(index).name}")
            for (unit, index), place in zip(self._first, places, strict=True)
            if place < NEVER
        ]
        return min(firsts, default=NOTHING)


class Health(Feature):
    """Counts the non-finite steps of an engine.

    in_a_row  of them up to now; a step without targets neither counts nor ends them
    """

    def __init__(
        self, everyone: Comm, reductions: Reductions, scale: LossScale, chunks: Mapping[int, nn.Module]
    ) -> None:
        self._everyone, self._chunks = everyone, chunks
        self._reductions, self._scale = reductions, scale
        self._trace = Trace()
        self.in_a_row = 0

    @classmethod
    def opened(cls, parts: Runtime) -> Self:
        return cls(parts.axes.world, parts.reductions, parts.loss_scale, parts.partition.chunks)

    def loaded(self) -> None:
        self.in_a_row = 0

    def after_update(self, outcome: Outcome) -> None:
        """Count a boundary, before the loss scale hears of its overflow."""
        if outcome.reason == APPLIED:
            self.in_a_row = 0
        elif outcome.reason == OVERFLOW and not self._scale.can_fall:
            self.in_a_row += 1
            self._warn()

    def _warn(self) -> None:
        """Warn once that no step is applied: such a run should not look like one that trains."""
        if self.in_a_row == MANY and self._everyone.rank == 0:
            warnings.warn(
                f"{MANY} steps in a row were skipped because the gradient norm was not finite. If the loss is "
                "NaN from the start at stage 3, a parameter is used outside its module's forward: see "
                "engine.full_params().",
                stacklevel=6,  # the caller of engine.step or train_batch
            )

    def is_last(self, most: int) -> bool:
        """Return whether the next step, if it is not finite, is the last of `most` in a row, or of fp16's patience."""
        return not self._scale.can_fall and (self.in_a_row + 1 >= most or self._scale.spent)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Look at the local gradients of a step run inside; two small kernels for each, and no host read."""
        self._trace = Trace()
        self._reductions.watch = self._trace.look
        try:
            yield
        finally:
            self._reductions.watch = None

    def fail(self, what: str, remedy: str) -> None:
        """Raise NonFiniteError on all ranks; it names the parameter whose gradient was the first such one traced."""
        here, rank = self._trace.first(self._chunks, self._everyone), self._everyone.rank
        numbers = torch.tensor(here[:2], dtype=torch.int64)
        places = self._everyone.exchange(numbers).tolist()
        where = f" on rank {rank}" if here is not NOTHING else ""
        error = NonFiniteError(f"{what} First in the last one: {here.text}{where}. {remedy}")
        agree(self._everyone, partial(_raise, error) if rank == places.index(min(places)) else lambda: None)


def _raise(error: Zero3dError) -> None:
    raise error


def _chunk_of(unit: Unit, chunks: Mapping[int, nn.Module]) -> int:
    one = unit.weights.params[0]
    return next(number for number, chunk in chunks.items() if any(p is one for p in chunk.parameters()))


# --- weights ----------------------------------------------------------------------------------------


def check_weights(units: Iterable[Unit], everyone: Comm, error: type[Zero3dError], remedy: str) -> None:
    """Raise `error` on all ranks, with their names, where parameters that ranks hold are not finite."""
    bad = [text for unit in units if unit.dtype.is_floating_point for text in _bad_weights(unit)]
    count = torch.tensor([len(bad)], dtype=torch.int64)
    if any(everyone.read(everyone.exchange(count).view(-1), [0] * everyone.size)):
        some = f"{', '.join(bad[:SHOWN])}{f' and {len(bad) - SHOWN} more' if len(bad) > SHOWN else ''}"
        refusal = error(f"weights are NaN or infinite: {some} (as rank {everyone.rank} holds them). {remedy}")
        agree(everyone, partial(_raise, refusal) if bad else lambda: None)


def _bad_weights(unit: Unit) -> list[str]:
    """Return the names of a unit's parameters of which this rank has values that are not finite in compute dtype."""
    pieces = unit.weights.update_pieces(unit.comm.rank)
    if not pieces:
        return []
    values = unit.weights.shard_or_full
    finite = torch.stack([is_finite(values[p.offset : p.offset + p.stop - p.start]) for p in pieces])
    flags = unit.comm.read(finite.double(), [1.0] * len(pieces))
    names = [unit.layout.slots[piece.slot].name for piece in pieces]
    return [
        f"{name} in {NAMES.get(unit.dtype, unit.dtype)}" for name, fine in zip(names, flags, strict=True) if not fine
    ]
