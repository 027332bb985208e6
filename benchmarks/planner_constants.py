"""Constants that serve to judge published tables alone: what a table does not tell, chosen so that its rows fit.

`zero3d plan` uses none of them. What it does use stands in zero3d.tools.plan.constants, in the same form.
"""

from __future__ import annotations

from collections.abc import Mapping

from zero3d.tools.plan.constants import CONSTANTS, Key, Rows, Values, fitted
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.kernels import Kernels
from zero3d.tools.plan.profiles import Profile, profiles
from zero3d.tools.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan

JUDGING = (
    fitted("galvatron", "gathered", 4.0, "bytes of a hidden element in the buffer of gathered inputs", 2.0,
           Rows("galvatron_states", "memory", "tp 2, 4 and 8")),
    fitted("nanotron", "across above 256", 25e9, "bytes/s and GPU between nodes, above 256 GPUs", 50e9,
           Rows("nanotron", "time", "64 nodes")),
)  # fmt: skip
EVERY = (*CONSTANTS, *JUDGING)


class Planner:
    """The planner under some values of its constants."""

    def __init__(self, changed: Mapping[Key, float] | None = None) -> None:
        values = {constant.key: constant.value for constant in EVERY} | dict(changed or {})
        self.values: Values = values | {
            constant.key: values[constant.lender, constant.name] for constant in EVERY if constant.lender
        }
        self.systems: dict[str, Profile] = profiles(self.values)
        self.cards: set[str] = set()  # that plans have been made for

    @property
    def kernels(self) -> Kernels:
        """Return what kernels take."""
        return self.systems["zero3d"].pace.kernels

    def value(self, system: str, name: str) -> float:
        """Return the value of a constant."""
        return self.values[system, name]

    def evaluate(self, model: ModelSpec, spec: ClusterSpec, plan: ParallelPlan, system: str | Profile) -> Estimate:
        """Evaluate a plan as `plan.evaluate` does, under these constants."""
        self.cards.add(spec.gpu.name)
        return evaluate(model, spec, plan, self.systems[system] if isinstance(system, str) else system)
