"""Seconds of states off the device: records on their way, updates of them, and weights that are read for gathers.

    updated on      of a parameter in records
    --------------  ------------------------------------------------------------------------------------
    the device      its record there and back: 2 x record / host_link
    the host        28 bytes / a GPU's share of host_bandwidth, its gradient down and its weight up: 6 / host_link
    either, a disk  its record read and written: 2 x record / a GPU's share of disk; at the same time as the above

Updates run unit by unit behind the next forward, so that what a forward of one micro-batch takes less is seen. Weights
off the device are read ahead for every gather: seen is what the computation takes less.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from zero3d.memory.offload import DEVICE, DISK, HOST
from zero3d.memory.placement import REMAINDER, record_widths
from zero3d.plan.spec import ClusterSpec, ParallelPlan
from zero3d.zero.stages import WIDTHS

UPDATE = 28  # bytes per parameter that Adam reads and writes on the host: master, m, v both ways, gradient
GRADIENT = 4  # bytes on their way down


class Rates(NamedTuple):
    """Bytes per second of one GPU: of its link to the host, its share of the host's memory, its share of the disk."""

    link: float
    memory: float
    disk: float

    @classmethod
    def of(cls, cluster: ClusterSpec) -> Rates:
        """Return a GPU's share of its node's rates."""
        return cls(
            cluster.host_link, cluster.host_bandwidth / cluster.per_node, cluster.disk / cluster.per_node
        )  # fmt: skip


def record_width(plan: ParallelPlan) -> int:
    """Return the bytes of a parameter in a record of optimizer states at its place."""
    weight, wide, optimizer = WIDTHS[plan.precision]
    moments = 2 * (2 if plan.moments == "bf16" else wide)
    master = REMAINDER if plan.master == "split" else optimizer - 2 * wide
    return record_widths(weight, master, moments, plan.offload).total


def executor_seconds(plan: ParallelPlan, cluster: ClusterSpec) -> dict[str, float]:
    """Return seconds of one parameter's update by executor, records on a disk read and written meanwhile."""
    rates, record, weight = Rates.of(cluster), record_width(plan), WIDTHS[plan.precision].weight
    disk = 2 * record / rates.disk if plan.offload == DISK else 0.0
    weights = 2 * weight / rates.link if plan.params != "none" else 0.0  # they come and go beside their records
    return {
        DEVICE: max(2 * record / rates.link + weights, disk),
        HOST: max(UPDATE / rates.memory + (GRADIENT + weight) / rates.link, disk),
    }


def chosen_executor(plan: ParallelPlan, cluster: ClusterSpec) -> ParallelPlan:
    """Return the plan with the faster executor where it says auto, and states are in records off the device."""
    if plan.offload == "none" or plan.executor != "auto":
        return plan
    seconds = executor_seconds(plan, cluster)
    return replace(plan, executor=min(seconds, key=lambda name: seconds[name]))


def update_seconds(plan: ParallelPlan, cluster: ClusterSpec, elements: float) -> float:
    """Return seconds of a rank's records on their way and, on the host, of their update. elements: that it updates."""
    if plan.offload == "none":
        return 2 * WIDTHS[plan.precision].weight * elements / Rates.of(cluster).link if plan.params != "none" else 0.0
    return plan.fraction * elements * executor_seconds(plan, cluster)[chosen_executor(plan, cluster).executor]


def read_seconds(plan: ParallelPlan, cluster: ClusterSpec, shard: float, gathers: int) -> float:
    """Return seconds in which a rank's weights are read for gathers. shard: its bytes of them."""
    if plan.params == "none":
        return 0.0
    rates = Rates.of(cluster)
    return gathers * shard / (min(rates.disk, rates.link) if plan.params == DISK else rates.link)


def executor_note(plan: ParallelPlan, cluster: ClusterSpec) -> str:
    """Say which executor updates records, with the arithmetic of both."""
    rates, record, seconds = Rates.of(cluster), record_width(plan), executor_seconds(plan, cluster)
    disk = f", a disk at {_rate(rates.disk)}" if plan.offload == DISK else ""
    return (
        f"updates of states on the {plan.offload} run on the {plan.executor}. Per parameter and GPU, on the device "
        f"2 x {record} bytes at {_rate(rates.link)}{disk}: {1e9 * seconds[DEVICE]:.2f} ns; on the host {UPDATE} bytes "
        f"at {_rate(rates.memory)}, {GRADIENT + WIDTHS[plan.precision].weight} at {_rate(rates.link)}{disk}: "
        f"{1e9 * seconds[HOST]:.2f} ns"
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.3g} GB/s"
