"""A unit: the parameters gathered, released and reduced together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from zero3d.blueprint.layout import Piece, Slot, UnitLayout
from zero3d.blueprint.unit import UnitPlan
from zero3d.zero.gradients import Gradients
from zero3d.zero.released_parameters import untold
from zero3d.zero.unit_parts import UnitParts
from zero3d.zero.weights import Weights

MakeGradients = Callable[[str, UnitLayout, UnitParts], Gradients]


class Unit:
    """Parameters handled together: one dtype, all trainable or all frozen.

    fill      writes this rank's slice [total/N] of the first weights
    deferred  its gradients may come in several parts (root unit, tied parameters): reduced last
    gradients  makes the owner of its gradients
    users     tokens of the calls that need the full parameters now
    comm      the ranks over which it is cut: the dp axis, of experts the edp axis; a part of them where states are
              cut over some neighbours alone
    across    the ranks that have the same shards as this one
    sources   ranks whose tokens give its gradients here, and which part of the experts it is (unit_parts.py)
    stage     number of the row of the stage table that it follows
    """

    def __init__(
        self,
        name: str,
        params: Mapping[str, nn.Parameter],
        layout: UnitLayout,
        dtype: torch.dtype,
        parts: UnitParts,
        fill: Callable[[Tensor], None],
        deferred: bool = False,
        gradients: MakeGradients = Gradients,
    ) -> None:
        self.name = name
        self.layout = layout
        self.dtype = dtype
        self.deferred = deferred
        self.users: set[object] = set()
        self.comm = parts.comm
        self.across = parts.across
        self.sources = parts.sources
        self.part = parts.part
        self.stage = parts.plan.row.number
        self.weights = Weights(name, [params[slot.name] for slot in layout.slots], layout, dtype, parts, fill)
        self._parts, self._make_gradients = parts, gradients
        self.grads = self._own_gradients() if self.weights.trainable else None

    def _own_gradients(self) -> Gradients:
        return self._make_gradients(self.name, self.layout, self._parts)

    def train(self) -> None:
        """Make masters and gradients of a unit that was frozen."""
        self._parts = self._parts._replace(plan=self.plan.trained)
        self.weights.train(self._parts)
        self.grads = self._own_gradients()

    @property
    def plan(self) -> UnitPlan:
        """What the unit is now: a second backward of a step, or more micro-batches, may have made it another."""
        return self._parts.plan if self.grads is None else self.grads.unit_plan

    @property
    def trained(self) -> int:
        """How many of its parameters are not frozen now."""
        with untold():
            return sum([p.requires_grad for p in self.weights.params])

    def slot_of(self, index: int) -> Slot:
        """Return the slot of a gradient's parameter, by its number among those of all sources."""
        return self.layout.slots[index % len(self.layout.slots)]

    def saved_pieces(self) -> list[Piece]:
        """Return the pieces of this rank's shard that it saves: of a shard that others have, too, its part."""
        return self.layout.pieces_of_copy(self.comm.rank, self.across.rank)

    @property
    def gradients(self) -> Gradients:
        """The gradients of a trainable unit."""
        assert self.grads is not None, f"{self.name} is frozen"
        return self.grads


def units_of(chunk: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Return the units that have parameters of a model chunk."""
    parameters = set(chunk.parameters())
    return [unit for unit in units if not parameters.isdisjoint(unit.weights.params)]
