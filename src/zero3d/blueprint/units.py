"""Which units there are, and the layout of each, from facts of parameters: an engine's and a plan's are the same.

model.layers.0                  all parameters of a module, where they are alike in dtype and in being trained
model.layers.0/trainable-bf16   those of one kind, where it has several: frozen ones, some that stay in fp32
model.layers.0/experts          its experts that tokens are sent to
lm_head.weight                  a matrix that another pipeline stage has, too, where the module has more

A unit is deferred if its gradients may come in several parts. That holds for the root's unit, which any module may use
between others, and for units with tied parameters. A forward needs deferred units first, and they are reduced last.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

from zero3d.blueprint.layout import Shape, UnitLayout
from zero3d.blueprint.policy import Policy, Ranks
from zero3d.blueprint.unit import Kind
from zero3d.distributed.unit_order import ROOT

T = TypeVar("T")


class Member(NamedTuple, Generic[T]):
    """A parameter, and the facts that decide in which unit it is.

    owner  name of the module whose parameters make units together, or ROOT
    first  token ids are looked up in it: whatever its place in the model, its unit is the first
    tied   other modules use it, too
    """

    parameter: T
    owner: str
    kind: Kind
    first: bool = False
    tied: bool = False


class FoundUnit(NamedTuple, Generic[T]):
    """The parameters of a unit, in model order. deferred: its gradients may come in several parts."""

    name: str
    owner: str
    kind: Kind
    parameters: list[T]
    deferred: bool


def group_parameters(members: Iterable[Member[T]]) -> list[FoundUnit[T]]:
    """Divide parameters, given in model order, into units: these are in the order of their first parameters."""
    found: dict[tuple[str, Kind], list[Member[T]]] = {}
    for member in members:
        found.setdefault((member.owner, member.kind), []).append(member)
    kinds: dict[str, list[Kind]] = {}
    for owner, kind in found:
        kinds.setdefault(owner, []).append(kind)
    ordered = sorted(found.items(), key=lambda item: not any(member.first for member in item[1]))
    return [
        FoundUnit(
            _name(owner, kind, kinds[owner]),
            owner,
            kind,
            [member.parameter for member in own],
            owner == ROOT or any(member.tied for member in own),
        )
        for (owner, kind), own in ordered
    ]


def _name(owner: str, kind: Kind, kinds: Sequence[Kind]) -> str:
    """Name a unit by what its owner's units differ in: experts or not, trainable or frozen, and the dtype."""
    name = f"{owner}/experts" if kind.experts else owner
    if sum(other.experts == kind.experts for other in kinds) == 1:
        return name
    return f"{name}/{'trainable' if kind.trainable else 'frozen'}-{kind.dtype.name}"


class InForward(Protocol):
    """Describes a unit by whether it is deferred (`FoundUnit.deferred`)."""

    @property
    def deferred(self) -> bool: ...


U = TypeVar("U", bound=InForward)


def in_turn(units: Iterable[U]) -> list[U]:
    """Return units in the order in which a forward needs them.

    What the root uses itself comes first: sent behind the others it would have to be waited for with them.
    """
    return sorted(units, key=lambda unit: not unit.deferred)


class LaidOut(Protocol):
    """Describes a unit by its layout."""

    @property
    def layout(self) -> UnitLayout: ...


L = TypeVar("L", bound=LaidOut)


def in_order_of_use(units: Iterable[L], first_uses: Mapping[str, int]) -> list[L]:
    """Return units in the order in which a forward comes to their parameters; of others it comes to them at the end."""

    def place(unit: L) -> float:
        return min(first_uses.get(slot.name, inf) for slot in unit.layout.slots)

    return sorted(units, key=place)


def lay_out(
    parameters: Sequence[tuple[str, Shape, int]], kind: Kind, policy: Policy, ranks: Ranks, block: int
) -> UnitLayout:
    """Return the layout of a unit.

    parameters  (name, shape on this rank, optimizer group) in model order
    block       elements of which the optimizer allows no shard a part
    """
    dp, copies = ranks.shard.size * ranks.copies.size, ranks.copies.size
    block = max(block, policy.block)
    if kind.experts:
        return UnitLayout.for_experts(parameters, dp, ranks.ep, block, copies)
    return UnitLayout(parameters, dp, block, copies)
