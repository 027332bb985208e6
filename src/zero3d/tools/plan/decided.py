"""What an engine with a plan's settings decides about all units: its blueprint's policy, and ranks. No torch.

Of algorithms a plan knows whether the backend sums on the way: `reduce_scatter` auto is all-to-all until a cluster's
hosts are known (`states.with_algorithm`).
"""

from __future__ import annotations

from functools import lru_cache

from zero3d.blueprint.policy import Group, Policy, Ranks
from zero3d.blueprint.unit import Kind, UnitPlan, decide
from zero3d.distributed.choice import ALL_TO_ALL, NATIVE, choose_algorithm
from zero3d.distributed.degrees import EXPERT_SHARD, Degrees
from zero3d.errors import ConfigError, MeshError
from zero3d.spec.dtypes import BY_NAME
from zero3d.spec.sections import Spec
from zero3d.tools.plan.spec import ParallelPlan


@lru_cache(maxsize=1 << 14)
def policy_of(plan: ParallelPlan) -> Policy:
    """Return how all units behave. Raises ConfigError for what a stage cannot do."""
    return Policy.of(plan if plan.precision in BY_NAME else plan.replace(precision=plan.compute.name))


@lru_cache(maxsize=1024)
def policy_of_others(plan: ParallelPlan) -> Policy:
    """Return how units behave in another system, in whose pipelines weights come and go as they do without one."""
    return Policy.of(Spec(plan.zero))


@lru_cache(maxsize=1 << 14)
def ranks_of(plan: ParallelPlan) -> Ranks:
    """Return the ranks among which units are shared out. Raises ConfigError where a second shard does not divide dp."""
    algorithm = _as_asked(plan.zero.reduce_scatter)
    names = "shard", EXPERT_SHARD, "replicate"
    shard, eshard, copies = (Group(plan.degrees.size(name), algorithm) for name in names)
    return Ranks(shard, eshard, copies, plan.ep, node_of(plan))


def usual_unit(plan: ParallelPlan, algorithm: str) -> UnitPlan:
    """Return what a trained unit is whose weights have the run's dtype, belong to no experts and keep no second shard.

    algorithm  by which its gradients are reduced (`algorithm_on`)
    """
    policy = policy_of(plan)
    ranks = Ranks(Group(plan.shard, algorithm), copies=Group(plan.replicate, algorithm))
    return decide(Kind(policy.compute), policy, ranks)


def algorithm_on(plan: ParallelPlan, per_node: int) -> str:
    """Return the algorithm by which an engine reduces gradients on NCCL and hosts of so many ranks."""
    if plan.shard == 1:
        return _as_asked(plan.zero.reduce_scatter)
    return _algorithm(plan.degrees, plan.zero.reduce_scatter, per_node)


@lru_cache(maxsize=4096)
def _algorithm(degrees: Degrees, asked: str, per_node: int) -> str:
    on_host = degrees.on_host(degrees.group("shard"), degrees.dp_on_host(per_node))
    return choose_algorithm("nccl", degrees.size("shard"), asked, on_host)


def _as_asked(reduce_scatter: str) -> str:
    """Return the algorithm where hosts are not known: a backend's own sums alone are rounded on their way."""
    return NATIVE if reduce_scatter == NATIVE else ALL_TO_ALL


def node_of(plan: ParallelPlan, per_node: int | None = None) -> int:
    """Return how many neighbours keep second shards together: 1 where nobody does.

    per_node  ranks of a node; not needed where `with_algorithm` has made a number of them

    Raises ConfigError for what does not divide dp.
    """
    if plan.zero.stage != 3:
        return 1
    try:
        return plan.degrees.second_shard(plan.zero.second_shard, per_node)
    except MeshError as error:
        raise ConfigError(f"zero.{error}") from error
