"""Values that are not finite: steps counted, gradients traced to the first unit, weights found.

    ordinary step     nothing but the norm, which the boundary reads anyway; `count` counts the steps it skips in a row
    last attempt      inside `tracing` every local gradient is looked at as autograd hands it over, on the device
    afterwards        `fail` reads what was seen; ranks compare, and the one where it began tells all

fp16: an overflow does not count while the loss scale can still fall, which is how it finds its value.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zero3d.agree import agree
from zero3d.errors import NonFiniteError, Zero3dError
from zero3d.precision import NAMES, LossScale
from zero3d.zero.arena import host_value
from zero3d.zero.collectives import Comm
from zero3d.zero.optimizer import APPLIED, OVERFLOW
from zero3d.zero.prefetch import Reductions
from zero3d.zero.unit import Unit

MANY = 5  # non-finite steps in a row after which a loop of somebody's own is warned
SHOWN = 3
BEYOND = "each rank's own gradients are finite: their sum or its norm is not"


class Found(NamedTuple):
    """A rank's first gradient that is not finite: the smallest of all ranks' is the first of all.

    part   of the pipeline, negative: backward begins at the last one
    place  among the gradients that came in this step
    """

    part: float
    place: float
    text: str


NOTHING = Found(0.0, inf, BEYOND)


class Trace:
    """Of every parameter the place at which its gradient was first not finite; a number on the device."""

    def __init__(self) -> None:
        self._came = 0
        self._first: dict[tuple[Unit, int], Tensor] = {}

    def look(self, unit: Unit, index: int, grad: Tensor) -> None:
        """A local gradient has come."""
        self._came += 1
        values = grad.coalesce().values() if grad.is_sparse else grad
        if values.numel():
            place = torch.where(is_finite(values), inf, float(self._came))
            known = self._first.get((unit, index))
            self._first[unit, index] = place if known is None else torch.minimum(known, place)

    def first(self, parts: Mapping[int, nn.Module]) -> Found:
        """The earliest of this rank. Reads the device once."""
        if not self._first:
            return NOTHING
        places = host_value(torch.stack(list(self._first.values())), [inf] * len(self._first))
        found = [
            Found(
                -float(_part_of(unit, parts)), place, f"unit {unit.name!r}, parameter {unit.layout.slots[index].name}"
            )
            for (unit, index), place in zip(self._first, places, strict=True)
            if place < inf
        ]
        return min(found, default=NOTHING)


class Health:
    """Non-finite steps of an engine.

    in_a_row  of them up to now; a step without targets neither counts nor ends them
    """

    def __init__(
        self, everyone: Comm, reductions: Reductions, scale: LossScale, parts: Mapping[int, nn.Module]
    ) -> None:
        self._everyone, self._reductions, self._scale, self._parts = everyone, reductions, scale, parts
        self._trace = Trace()
        self.in_a_row = 0

    def count(self, reason: str) -> None:
        """A boundary was reached, and its overflow is not yet known to the loss scale."""
        if reason == APPLIED:
            self.in_a_row = 0
        elif reason == OVERFLOW and not self._scale.can_fall:
            self.in_a_row += 1
            self._warn()

    def _warn(self) -> None:
        """A run that never applies a step should not look like one that trains."""
        if self.in_a_row == MANY and self._everyone.rank == 0:
            warnings.warn(
                f"{MANY} steps in a row were skipped because the gradient norm was not finite. If the loss is "
                "NaN from the start at stage 3, a parameter is used outside its module's forward: see "
                "engine.full_params().",
                stacklevel=4,
            )

    def is_last(self, most: int) -> bool:
        """Whether the next step, if it is not finite, is the last of `most` in a row, or of fp16's patience."""
        return not self._scale.can_fall and (self.in_a_row + 1 >= most or self._scale.spent)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Around a step whose local gradients are looked at; two small kernels for each, and no host read."""
        self._trace = Trace()
        self._reductions.watch = self._trace.look
        try:
            yield
        finally:
            self._reductions.watch = None

    def fail(self, what: str, remedy: str) -> None:
        """Raise NonFiniteError on all ranks, told by the one where the traced step's first such gradient was."""
        own = self._trace.first(self._parts)
        rank, world = self._everyone.rank, self._everyone.size
        mine = torch.tensor(own[:2], dtype=torch.float64, device=self._everyone.device)
        places = self._everyone.exchange(mine).tolist()
        where = f" on rank {rank}" if own is not NOTHING else ""
        error = NonFiniteError(f"{what} First in the last one: {own.text}{where}. {remedy}")
        first = min(range(world), key=lambda each: (places[each], each))
        agree(self._everyone, partial(_raise, error) if rank == first else lambda: None)


def _raise(error: Zero3dError) -> None:
    raise error


def _part_of(unit: Unit, parts: Mapping[int, nn.Module]) -> int:
    one = unit.weights.params[0]
    return next(number for number, part in parts.items() if any(p is one for p in part.parameters()))


# --- weights ----------------------------------------------------------------------------------------


def is_finite(values: Tensor) -> Tensor:
    """Tell whether all values are finite: one flag on the device, without a copy of them. Not of an empty tensor."""
    least, most = torch.aminmax(values.detach())  # both are NaN where one value is; a norm takes twenty times as long
    return least.isfinite() & most.isfinite()


def check_weights(units: Iterable[Unit], dp: Comm, everyone: Comm, error: type[Zero3dError], remedy: str) -> None:
    """Raise `error` on all ranks, with their names, where parameters that ranks hold are not finite."""
    bad = [text for unit in units if unit.dtype.is_floating_point for text in _bad_weights(unit, dp.rank)]
    told = torch.tensor([float(len(bad))], dtype=torch.float64, device=everyone.device)
    if any(host_value(everyone.exchange(told).view(-1), [0.0] * everyone.size)):
        some = f"{', '.join(bad[:SHOWN])}{f' and {len(bad) - SHOWN} more' if len(bad) > SHOWN else ''}"
        said = error(f"weights are NaN or infinite: {some} (as rank {everyone.rank} holds them). {remedy}")
        agree(everyone, partial(_raise, said) if bad else lambda: None)


def _bad_weights(unit: Unit, rank: int) -> list[str]:
    """Names of a unit's parameters whose values that this rank keeps are not finite in compute dtype."""
    pieces = unit.weights.update_pieces(rank)
    if not pieces:
        return []
    held = unit.weights.held
    finite = torch.stack([is_finite(held[p.offset : p.offset + p.stop - p.start]) for p in pieces])
    flags = host_value(finite.double(), [1.0] * len(pieces))
    names = [unit.layout.slots[piece.slot].name for piece in pieces]
    return [
        f"{name} in {NAMES.get(unit.dtype, unit.dtype)}" for name, fine in zip(names, flags, strict=True) if not fine
    ]
