"""Seconds of states off the device: records on their way, updates of them, and weights that are read for gathers.

    updated on      of a parameter in records
    --------------  ------------------------------------------------------------------------------------
    the device      its record there and back: 2 x record / host_link
    the host        28 bytes / a GPU's share of host_bandwidth, its gradient down and its weight up: 6 / host_link
    either, a disk  its record read and written: 2 x record / a GPU's share of disk; at the same time as the above
                    (another tier as its row says how fast it is, of which the host's own is not slower than the link)

Updates run unit by unit behind the next forward, so that what a forward of one micro-batch takes less is seen. Weights
off the device are read ahead for every gather, gradients go there after every micro-batch: seen is what all
computation takes less.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple

from zero3d.account.optimizers import state_width, states_of
from zero3d.blueprint.auto import GRADIENT, UPDATE, ExecutorChoice, Rates as ExecutorRates, executor_of
from zero3d.blueprint.places import record_widths
from zero3d.spec.offload import AUTO
from zero3d.spec.optimizer import why_not_on_host
from zero3d.spec.tiers import DEVICE, HOST, TIERS
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.spec import ClusterSpec, ParallelPlan


class Rates(NamedTuple):
    """Bytes per second of one GPU: of its link to the host, its share of the host's memory, and of a tier's rates."""

    link: float
    memory: float
    read: float
    write: float

    @classmethod
    def of(cls, cluster: ClusterSpec, place: str = "none") -> Rates:
        """Return a GPU's share of its node's rates. place: the tier, if any, whose are asked for."""
        rates = [inf, inf]
        if place in TIERS:
            rates = [cluster.figure(said) / cluster.per_node for said in (TIERS[place].read, TIERS[place].write)]
        return cls(cluster.host_link, cluster.host_bandwidth / cluster.per_node, *rates)


def record_width(plan: ParallelPlan, place: str, matrix: bool = True) -> int:
    """Return the bytes of a parameter in a record of optimizer states: of a block's matrix, as most are, or not."""
    policy = policy_of(plan)
    weight = policy.compute.itemsize
    states = states_of(plan.optimizer, matrix) * state_width(policy.master.itemsize, plan.offload.moments)
    widths = record_widths(weight, policy.stored(weight), states, place)
    return widths.total - widths.weight * policy.params


def executor_seconds(plan: ParallelPlan, cluster: ClusterSpec) -> dict[str, float]:
    """Return seconds of one parameter's update by executor, records of a tier read and written meanwhile."""
    place, weight = plan.offload.optimizer, plan.compute.itemsize
    rates, record = Rates.of(cluster, place), record_width(plan, place)
    tier = record / rates.read + record / rates.write
    beside = 2 * weight if plan.offload.params != "none" else 0  # weights that come and go beside their records
    beside += _gradient(plan) if plan.offload.gradients_leave else 0
    down = 0 if plan.offload.gradients_leave else GRADIENT
    return {
        DEVICE: max((2 * record + beside) / rates.link, tier),
        HOST: max(UPDATE / rates.memory + (down + weight) / rates.link, tier),
    }


def chosen_executor(plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with the executor that an engine chooses where it says auto, and states are off the device."""
    if plan.offload.optimizer == "none" or plan.offload.executor != "auto":
        return plan
    return plan.replace(executor=_choice(plan, cluster).name)


def _choice(plan: ParallelPlan, cluster: ClusterSpec) -> ExecutorChoice:
    """Choose by the engine's rule, and rates of the cluster; a tier takes as long in both cases."""
    cannot = why_not_on_host(plan.optimizer, plan.precision)
    link, memory, *_ = Rates.of(cluster)
    rates = None if cluster.gpu.name == CPU else ExecutorRates(link, memory)
    return executor_of(replace(plan.offload, executor=AUTO), record_width(plan, DEVICE), cannot, lambda: rates)


def update_seconds(plan: ParallelPlan, cluster: ClusterSpec, elements: float) -> float:
    """Return seconds of a rank's records on their way and, on the host, of their update. elements: that it updates."""
    if plan.offload.optimizer == "none":
        away = plan.offload.params != "none"
        return 2 * plan.compute.itemsize * elements / Rates.of(cluster).link if away else 0.0
    executor = chosen_executor(plan, cluster).offload.executor
    return plan.offload.fraction * elements * executor_seconds(plan, cluster)[executor]


def read_seconds(plan: ParallelPlan, cluster: ClusterSpec, shard: float, gathers: int) -> float:
    """Return seconds in which a rank's weights are read for gathers. shard: its bytes of them."""
    if plan.offload.params == "none":
        return 0.0
    rates = Rates.of(cluster, plan.offload.params)
    return gathers * shard / min(rates.read, rates.link)


def _gradient(plan: ParallelPlan) -> int:
    """Return the bytes of a gradient on the host."""
    return policy_of(plan).held.itemsize


def gradient_seconds(plan: ParallelPlan, cluster: ClusterSpec, elements: float) -> float:
    """Return seconds of a rank's reduced gradients on their way to the host, and back where they are added to."""
    ways = 2 * plan.accumulate - 1 if plan.offload.gradients_leave and plan.offload.states else 0
    return ways * _gradient(plan) * elements / Rates.of(cluster).link


def executor_note(plan: ParallelPlan, cluster: ClusterSpec) -> str:
    """Say which executor updates records, with the arithmetic of both."""
    place, executor = plan.offload.optimizer, plan.offload.executor
    return f"states on the {place} are updated on the {executor}: {_choice(plan, cluster).why}"
