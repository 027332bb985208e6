"""What a plan needs and how long its step takes: `evaluate(model, cluster, plan, system) -> Estimate`."""

from __future__ import annotations

from zero3d.errors import ConfigError
from zero3d.plan.foreign import foreign_memory
from zero3d.plan.profiles import PROFILES, ZERO3D_PACE, profile
from zero3d.plan.spec import ClusterSpec, Estimate, ModelSpec, ParallelPlan
from zero3d.plan.time import step_seconds
from zero3d.plan.traffic import traffic_elements


def evaluate(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan, system: str = "zero3d") -> Estimate:
    """Memory of the fullest rank class and seconds of a step. Raises ConfigError for what cannot be.

    system  zero3d, or another's profile: megatron, deepspeed, torchtitan, nanotron
    """
    check(model, cluster, plan)
    found = profile(system)
    memory = foreign_memory(model, plan, cluster, found)
    seconds = step_seconds(model, plan, cluster, found.pace)
    tokens = plan.dp * plan.accumulate * plan.micro_batch * model.length
    flops = 3.0 * tokens * sum(part.operations.matrices + part.operations.scores for part in model.parts)
    return Estimate(memory, seconds, {}, tokens, flops)


def check(model: ModelSpec, cluster: ClusterSpec, plan: ParallelPlan) -> None:
    """Refuse degrees that fit neither cluster nor model."""
    degrees = {
        "dp": plan.dp,
        "tp": plan.tp,
        "pp": plan.pp,
        "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate,
    }
    small = [name for name, value in degrees.items() if value < 1]
    if small:
        raise ConfigError(f"{small[0]}={degrees[small[0]]}: must be at least 1.")
    if plan.world > cluster.gpus:
        raise ConfigError(
            f"dp={plan.dp} x tp={plan.tp} x pp={plan.pp} = {plan.world} ranks do not fit {cluster.gpus} GPUs: "
            f"pass dp={max(1, cluster.gpus // (plan.tp * plan.pp))}."
        )
    if model.heads % plan.tp or model.hidden % plan.tp:
        raise ConfigError(f"tp={plan.tp} does not divide {model.heads} heads and hidden {model.hidden}.")
    parts = plan.pp * plan.virtual
    if parts > len(model.blocks):
        raise ConfigError(f"pp={plan.pp} x virtual={plan.virtual} = {parts} parts for {len(model.blocks)} blocks.")
