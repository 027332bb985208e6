"""The blueprint of a rank: the plan and the layout of each of its units, as one value.

Settings, ranks and facts of parameters decide it, before anything is allocated. A setting may change later, as `auto`
does when the place of states is known: the same function then makes a new one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zero3d.blueprint.layout import Shape, UnitLayout
from zero3d.blueprint.policy import Policy, Ranks
from zero3d.blueprint.unit import Kind, UnitPlan, decide
from zero3d.blueprint.units import lay_out
from zero3d.spec.sections import Spec


class UnitFacts(NamedTuple):
    """Gives the facts of a unit.

    parameters  (name, shape on this rank, optimizer group) in model order
    """

    name: str
    kind: Kind
    parameters: Sequence[tuple[str, Shape, int]]


class BlueprintUnit(NamedTuple):
    """Holds a unit's plan and its layout."""

    name: str
    plan: UnitPlan
    layout: UnitLayout


class Blueprint(NamedTuple):
    """Says what all units of a rank are.

    plans    the plan of each unit, by its name
    layouts  where its parameters lie, and where shards are cut
    """

    policy: Policy
    ranks: Ranks
    plans: Mapping[str, UnitPlan]
    layouts: Mapping[str, UnitLayout]

    @classmethod
    def of(cls, spec: Spec, ranks: Ranks, units: Sequence[UnitFacts], block: int) -> Blueprint:
        """Return the blueprint of these units. Raises ConfigError for what a stage cannot do.

        block  elements of which the optimizer allows no shard a part
        """
        policy = Policy.of(spec)
        plans = {unit.name: decide(unit.kind, policy, ranks) for unit in units}
        layouts = {unit.name: lay_out(unit.parameters, unit.kind, policy, ranks, block) for unit in units}
        return cls(policy, ranks, plans, layouts)

    @property
    def units(self) -> Iterator[BlueprintUnit]:
        """Yield the units in model order."""
        return (BlueprintUnit(name, plan, self.layouts[name]) for name, plan in self.plans.items())
