"""Chooses what `zero.weights=auto` becomes in a run, before its engine is built: by rank 0's plan, else kept."""

from __future__ import annotations

from dataclasses import replace

from zero3d.config import Config
from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.distributed.collectives import Comm
from zero3d.distributed.mesh import Mesh
from zero3d.spec.offload import AUTO
from zero3d.spec.zero import KEPT
from zero3d.train.planner import Planned

WITHOUT_PLAN = KEPT, f"zero.weights=auto: {KEPT}: this run has no plan to choose by"


def choose_weights(config: Config, mesh: Mesh, comm: Comm, plan: Planned | str | None) -> tuple[Config, list[str]]:
    """Return the configuration to build the engine of, and what was chosen in lines. All ranks call it.

    comm  of all ranks, on the host
    plan  of rank 0
    """
    if config.zero.weights != AUTO:
        return config, []
    chosen, why = agree(comm, lambda: plan.weights(config, mesh) if isinstance(plan, Planned) else WITHOUT_PLAN)
    chosen = exchange_texts(comm, chosen)[0]
    return replace(config, zero=replace(config.zero, weights=chosen)), [why]
