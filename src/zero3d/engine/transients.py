"""The buffers of an engine that come and go, bounded from above by its units' sizes, and the dtypes of all buffers."""

from __future__ import annotations

import torch

from zero3d.account.transients import (
    arriving_bytes,
    gathered_at_once,
    gradient_staging,
    master_scratch,
    record_scratch,
    reductions_bytes,
    ring_bytes,
    sum_over_copies,
    sums_of_copies,
    whole_units,
)
from zero3d.blueprint.blueprint import Blueprint, BlueprintUnit
from zero3d.distributed.unit_order import IN_FLIGHT, LEAVING
from zero3d.engine.parts import Parts
from zero3d.precision import dtype_of, torch_dtype
from zero3d.spec.tiers import DEVICE


def dtypes_of(parts: Parts) -> dict[str, str]:
    """Return the dtypes that the buffers of each category really have."""
    plans = parts.blueprint_now.plans.values()
    gradients = [plan.gradients for plan in plans if plan.gradients is not None]
    reduced = {buffer.dtype for unit in parts.units if unit.grads is not None for buffer in unit.grads.buffers}
    stored = [unit.weights.masters.stored for unit in parts.units]
    masters = {master.dtype for master in stored if master is not None}
    in_records = frozenset[torch.dtype]() if parts.tiers is None else parts.tiers.dtypes
    states = in_records or {flat.dtype for _, _, flat in parts.optimizer.flat_states()}
    compute = {unit.weights.full.dtype for unit in parts.units}
    gathered = {unit.weights.full.dtype for unit in parts.units if not unit.plan.whole}
    bucket = {torch_dtype(plan.local) for plan in gradients if not plan.kept}
    wire = {torch_dtype(plan.travels) for plan in gradients} if parts.axes.dp.size > 1 else set[torch.dtype]()
    kinds: dict[str, set[torch.dtype]] = {
        "parameters": compute,
        "gradients": reduced,
        "optimizer": masters | set(states),
        "gathered": gathered,
        "bucket": bucket,
        "wire": wire,
    }
    named = {category: {dtype_of(dtype).name for dtype in kind} for category, kind in kinds.items()}
    return {category: " + ".join(sorted(names)) or "-" for category, names in named.items()} | {"padding": "of each"}


def transient_bounds(parts: Parts, micro_batches: int) -> dict[str, int]:
    """Return upper bounds of temporary buffers, in bytes.

    gathered  stage 3, more ranks than one: the root all the time, and what is read outside of its module; two blocks at
              a hand-over, AHEAD units ahead
    bucket    stages 2, 3, more ranks than one: the root's gradients all the time, two units filling, IN_FLIGHT being
              reduced; parts of tied parameters' gradients are summed in the reduced dtype
    wire      gathers in blocks of 8 bits. IN_FLIGHT reductions, of which one is being added up (`reductions_bytes`),
              and sums of shards over their copies behind them. Scratch in which masters are cast, those in halves
              updated, or records. Besides, the ring of inputs of recomputed blocks on the host
    exact     a bucket for every micro-batch at all stages
    """
    blueprint, device = parts.blueprint_now, parts.mesh.device.type
    policy, units = blueprint.policy, list(blueprint.units)
    with_root = {unit.name for hooks in parts.hooks for unit in hooks.with_root}
    full, messages = gathered_at_once(units, device, with_root)
    kinds = 2 if parts.partition.experts.anywhere else 1  # a block is two units then
    passing, wider = dict[str, int](), 1
    for name, plan, layout in units:
        if plan.gradients is None:
            continue
        if not plan.gradients.kept:
            width = plan.kind.dtype.itemsize
            local = plan.gradients.travels if policy.exact else plan.gradients.local
            passing[name], wider = layout.total * width * plan.sources, max(wider, local.itemsize // width)
    local_gradients = whole_units(passing.items(), 2 * kinds)
    deferred = [unit.layout.total for unit in parts.units if unit.deferred and unit.name in passing]
    tied = sum(deferred) * policy.master.itemsize
    updated = [unit for unit in parts.units if unit.grads is not None and not unit.plan.from_masters]
    masters = sum(unit.weights.elements for unit in updated if unit.weights.masters.stored is not None)
    ring, update = _of_records(parts)
    kept = parts.kept_inputs
    ring += 0 if kept is None or kept.slots is None else kept.slots.peak.device
    return {
        "gathered": full,
        "bucket": wider * local_gradients + tied + _to_host(blueprint) if passing else 0,
        "wire": ring
        + messages
        + max(
            reductions_bytes(_trained(blueprint), micro_batches) + bytes_over_copies(parts),
            master_scratch(masters, device, policy.splits),
            update,
            *(feature.scratch for feature in parts.features),
        ),
    }


def bytes_over_copies(parts: Parts) -> int:
    """Return the bytes for a step's sums of shards over copies; an exact sum takes a reduction's."""
    blueprint = parts.blueprint_now
    trained = _trained(blueprint)
    if blueprint.policy.exact or not trained or blueprint.ranks.copies.size == 1:
        return 0
    how = sum_over_copies(trained[0].plan)
    return sums_of_copies([unit.layout.shard for unit in trained], how, parts.mesh.device.type)


def _trained(blueprint: Blueprint) -> list[BlueprintUnit]:
    return [unit for unit in blueprint.units if unit.plan.gradients is not None]


def _to_host(blueprint: Blueprint) -> int:
    """Return the bytes on the device for reductions with sums kept on the host, and for sums over copies of these."""
    policy = blueprint.policy
    if not policy.gradients:
        return 0
    longest = max(unit.layout.shard for unit in _trained(blueprint))
    sums = IN_FLIGHT * policy.held.itemsize * longest if blueprint.ranks.copies.size > 1 else 0
    return arriving_bytes((IN_FLIGHT + LEAVING) * [longest], policy) + sums


def _of_records(parts: Parts) -> tuple[int, int]:
    """Return the bytes of the device's ring of records, and of the scratch in which it updates one.

    The scratch is fp32 copies of 16-bit values and noise, or the scratch of a cast. A CPU has the ring on the host.
    """
    records = [unit.weights.records for unit in parts.units if unit.grads is not None]
    buckets = [bucket for of_unit in records if of_unit is not None for bucket in of_unit.buckets]
    longest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
    policy, offload, device = parts.policy, parts.offload.offload, parts.mesh.device.type
    wide, staging = policy.master.itemsize, gradient_staging(longest, policy)
    if not buckets or offload.executor != DEVICE:
        return staging, wide * longest * policy.narrow
    rounded, splits = offload.moments == "bf16", policy.splits
    fields = max(len(bucket.names) * (bucket.stop - bucket.start) for bucket in buckets)  # no one wider than a master
    passing = device != "cpu" and offload.optimizer != "none"
    ring = ring_bytes(wide * fields) if passing else 0
    return ring + staging, record_scratch(longest, device, splits, rounded, not splits, policy.narrow)
