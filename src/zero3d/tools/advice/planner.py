"""The planner that `zero3d train` gives a run to ask. No torch: the process that starts the ranks has one, too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zero3d.train.planner import Check, Planned, Planner

if TYPE_CHECKING:
    from torch import nn

    from zero3d.config import Config
    from zero3d.distributed.mesh import Mesh
    from zero3d.engine.engine import Engine


class RunPlanner(Planner):
    """Answers by tracing a run's model and pricing its configuration on this cluster."""

    def refuse(self, config: Config) -> None:
        """Refuse a cluster file that cannot be read."""
        if config.plan.cluster is not None:
            from zero3d.tools.plan.hardware import read_file

            read_file(config.plan.cluster)

    def plan(self, config: Config, model: nn.Module, mesh: Mesh, steps: int) -> Planned | str | None:
        """Plan on rank 0, for a run that reaches the step at which it is checked."""
        from zero3d.tools.advice.plan_check import CHECKED_STEP
        from zero3d.tools.advice.planned_run import plan_run

        return plan_run(config, model, mesh) if steps >= CHECKED_STEP and mesh.rank == 0 else None

    def late(self, config: Config, mesh: Mesh) -> Planned | str:
        """Plan with a model that is built once more, without weights."""
        from zero3d.tools.advice.planned_run import plan_late

        return plan_late(config, mesh)

    def check(self, config: Config, engine: Engine, planned: Planned | str | None, steps: int) -> Check | None:
        """Check on all ranks of a run that reaches that step."""
        from zero3d.tools.advice.plan_check import CHECKED_STEP, PlanCheck
        from zero3d.tools.advice.planned_run import PlannedRun

        if steps < CHECKED_STEP:
            return None
        return PlanCheck(config, engine, planned if isinstance(planned, PlannedRun) else None)
