"""Inputs of recomputed blocks that are kept in parts over tp, or on the host. No torch.

                   of an input on the device   ring on the device       on the host
    as it is       1                           -                        -
    in parts       1/tp                        -                        -
    on the host    -                           3 buffers of an input    a slot for each input in flight, in whole blocks
    both           -                           3 buffers of a part      the same of parts

An input is the hidden state of a micro-batch. ZeRO (2020), section 6.1: P_a and P_a+cpu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil

from zero3d.account.transients import DEPTH
from zero3d.activations.policy import Policy
from zero3d.distributed.degrees import Degrees
from zero3d.memory.blocks import padded
from zero3d.tools.plan.in_flight import moments
from zero3d.tools.plan.spec import ClusterSpec, ModelSpec, ParallelPlan, Part


def in_parts(plan: ParallelPlan) -> bool:
    """Return whether inputs are kept in parts: under sequence parallelism they are slices already."""
    return (
        plan.mesh.partition_activations
        and plan.tp > 1
        and not plan.mesh.sequence_parallel
        and plan.activations != "none"
    )


def on_host(plan: ParallelPlan) -> bool:
    """Return whether inputs are kept on the host."""
    return plan.offload.activations_leave and plan.activations != "none"


def without_effect(plan: ParallelPlan) -> set[str]:
    """Return the keys of sections that change nothing here: those of axes and inputs that a plan has not."""
    alone = {key for axis in Degrees._fields if getattr(plan, axis) == 1 for key in plan.mesh.options(axis)}
    used = {"experts": plan.ep > 1, "partition_activations": in_parts(plan), "activations": on_host(plan)}
    return alone | {key for key, there in used.items() if not there}


def share_here(plan: ParallelPlan) -> float:
    """Return how much of an input is kept on the device."""
    return 0.0 if on_host(plan) else 1 / plan.tp if in_parts(plan) else 1.0


def kept_bytes(model: ModelSpec, plan: ParallelPlan) -> int:
    """Return the bytes of one input of one micro-batch as this rank keeps it, wherever."""
    elements = plan.tokens(model.length) * model.hidden
    parts = plan.tp if in_parts(plan) or plan.mesh.sequence_parallel else 1
    return ceil(elements / parts) * plan.compute.itemsize


def ring_here(model: ModelSpec, plan: ParallelPlan) -> float:
    """Return the bytes of the buffers through which inputs go to the host and come back."""
    return float(DEPTH * kept_bytes(model, plan)) if on_host(plan) else 0.0


def input_seconds(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec) -> float:
    """Return the seconds of one input on its way to the host, or back."""
    return kept_bytes(model, plan) / cluster.host_link if on_host(plan) else 0.0


def slots_on_host(model: ModelSpec, plan: ParallelPlan, pp_stage: int, chunks: Mapping[int, Sequence[Part]]) -> float:
    """Return the bytes of a rank's slots: made as many at a time as a micro-batch has inputs, till all have one."""
    if not on_host(plan):
        return 0.0
    every = Policy.of(plan.activations).every or 1
    inputs = [ceil(sum(part.kind == "block" for part in parts) / every) for parts in chunks.values()]
    needed = max(
        sum(count * flight for count, flight in zip(inputs, moment.in_flight, strict=True))
        for moment in moments(plan, pp_stage)
    )
    return float(ceil(needed / max(1, sum(inputs))) * sum(inputs) * padded(kept_bytes(model, plan)))
