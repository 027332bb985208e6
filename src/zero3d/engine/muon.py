"""Muon in an engine: which units have matrices, who owns these, and the factors of every piece's learning rate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Self

from zero3d.account.traffic import Sent
from zero3d.blueprint.layout import Slot
from zero3d.distributed.collectives import Comm
from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError
from zero3d.optim.find import describe
from zero3d.optim.matrices import Range, ranges
from zero3d.optim.muon_optimizer import MATRICES, MOMENTUM, MuonRule, MuonWithAdamW
from zero3d.optim.orthogonal import Orthogonal, Seen
from zero3d.optim.owners import WIRE, Matrix, Owners, matrices_of
from zero3d.zero.optimizer import ShardedOptimizer
from zero3d.zero.unit import Unit


def _exchanges(parts: Runtime, torch_optimizer: MuonWithAdamW) -> list[Orthogonal]:
    """Return an `Orthogonal` for each axis that cuts matrices, and tell torch's optimizer of its pieces.

    Raises ConfigError for matrices that are gathered in tiles.
    """
    rule, optimizer = parts.options.optimizer, parts.optimizer
    assert isinstance(rule, MuonRule)
    full = parts.partition.full_model
    torch_optimizer.table = describe(full.shapes, full.trainable, parts.matrices)
    seen = Seen(parts.matrices, parts.partition.cuts)
    for name, tile in full.tiles.items():
        if tile.owner in seen.forms:
            raise ConfigError(
                f"zero.gather_budget has {tile.owner} in tiles ({name}), and Muon needs whole matrices: pass a larger "
                "budget, or AdamW for it (optimizer.groups: [{match: ..., name: adamw}])."
            )
    by_comm: dict[Comm, dict[int, Unit]] = {}
    for number, unit in enumerate(optimizer.units):
        if seen.of(unit):
            by_comm.setdefault(unit.comm, {})[number] = unit
    batches = parts.axes.arena.device.type != "cpu" and not parts.policy.exact
    exchanges = [
        Orthogonal(
            torch_optimizer,
            units,
            _owners(units, seen, comm, rule.options["ns_steps"]),
            seen,
            comm,
            parts.axes.tp,
            parts.axes.arena,
            batches,
        )
        for comm, units in by_comm.items()
    ]
    for owned in optimizer.pieces:
        if owned.name in seen.forms:
            slot = owned.unit.layout.slots[owned.piece.slot]
            span = owned.piece.start, owned.piece.start + owned.master.numel()
            torch_optimizer.ranges[owned.master] = list(_factors(slot, seen, rule, span))
    return exchanges


def _owners(units: dict[int, Unit], seen: Seen, comm: Comm, steps: int) -> Owners:
    found: list[Matrix] = []
    for number, unit in units.items():
        cuts = {slot: seen.cut(unit.layout.slots[slot].name) for slot in seen.of(unit)}
        degrees = {slot: cut.size for slot, cut in cuts.items() if cut is not None}
        found += matrices_of(number, unit.layout, seen.of(unit), degrees, steps)
    whole = any(unit.weights.updates_all for unit in units.values())
    return Owners(found, {number: unit.layout for number, unit in units.items()}, comm.size, whole)


def _factors(slot: Slot, seen: Seen, rule: MuonRule, span: tuple[int, int]) -> Iterator[tuple[int, int, float]]:
    """Yield the ranges of a piece of a parameter, from its start, each with the factor of its learning rate."""
    numel = prod(seen.forms[slot.name].shape_of(slot.shape))
    of_matrix = _ranges(slot, seen)
    start, last = span[0], (span[0], span[0], 1.0)
    for index in range(span[0] // numel, -(-span[1] // numel)):
        for begin, stop, shape in of_matrix:
            low, high = max(index * numel + begin, span[0]), min(index * numel + stop, span[1])
            if low < high:
                factor = rule.factor(shape)
                if last[0] < last[1] and last[2] != factor:
                    yield last[0] - start, last[1] - start, last[2]
                    last = (low, low, factor)
                last = (last[0], high, factor)
    yield last[0] - start, last[1] - start, last[2]


def _ranges(slot: Slot, seen: Seen) -> Sequence[Range]:
    """Return the ranges of each of a parameter's matrices, as this tp rank has it."""
    form, cut = seen.forms[slot.name], seen.cut(slot.name)
    here = form.shape_of(slot.shape)
    whole = here if cut is None else cut.logical_shape(here)
    if form.split is None:
        return [(0, prod(here), (whole[0], whole[1]))]
    owners = form.split.owners((whole[0], whole[1]))
    if cut is not None and cut.dim == form.split.dim:
        local = (len(owners) // cut.size,)
        boxes = cut._replace(dim=0).boxes(((0, local[0]),), local)
        owners = [owners[place] for ((start, stop),), _ in boxes for place in range(start, stop)]
    return list(ranges(here, form.split.dim, owners, form.split.parts((whole[0], whole[1]))))


class MatrixSteps(Feature):
    """Takes gradients of matrices into their momenta, and makes them orthogonal momentum.

    It is called by the optimizer, in the middle of its step: gradients must be clipped, and not yet used.
    """

    name = "Muon"
    instead_of_it = "AdamW"
    trains_unfrozen = False

    def __init__(self, optimizer: ShardedOptimizer, muon: MuonWithAdamW, exchanges: Sequence[Orthogonal]) -> None:
        self._optimizer, self._muon = optimizer, muon
        self._exchanges = exchanges
        optimizer.orthogonal = self

    @classmethod
    def opened(cls, parts: Runtime) -> Self | None:
        if not parts.matrices:
            return None
        muon = parts.optimizer.torch
        assert isinstance(muon, MuonWithAdamW)
        return cls(parts.optimizer, muon, _exchanges(parts, muon))

    def __call__(self) -> None:
        """Do so, when gradients are final."""
        optimizer = self._optimizer
        if optimizer.updates is not None:
            optimizer.updates.finish()
        for batch in optimizer.in_batches():
            for number, group in enumerate(self._muon.param_groups):
                own = [owned for owned in batch if owned.group == number] if group[MATRICES] else []
                momenta = [optimizer.state_view(owned, MOMENTUM, owned.master.dtype) for owned in own]
                gradients = [owned.gradient for owned in own]
                near = [grad.to(momentum.device) for grad, momentum in zip(gradients, momenta, strict=True)]
                self._muon.average(group, near, momenta)
                for grad, made in zip(gradients, near, strict=True):
                    if made is not grad:
                        grad.copy_(made)
        for exchange in self._exchanges:
            exchange.apply()

    def traffic(self) -> list[Sent]:
        """Return what a step sends."""
        return [row for exchange in self._exchanges for row in exchange.traffic()]

    @property
    def scratch(self) -> int:
        """Return the most bytes that travel at once."""
        return WIRE * max((exchange.owners.held(exchange.comm.rank) for exchange in self._exchanges), default=0)
