"""What a run measured beside what the formulas say: numbers only, `report.py` prints them.

consumer           measured                               formula
-----------------  -------------------------------------  -------------------------------------
parameters         held by the arena                      account/states.py, exact
gradients          held by the arena                      account/states.py, exact
optimizer states   held by the arena                      account/states.py, exact
padding            held by the arena                      from the layouts, exact
temporary buffers  most held at any instant, by kind      an upper bound from unit sizes
activations        what autograd saved in one forward     none
device             most allocated and reserved there      none (accelerators only)
buffers off it     held by the accounts of host, disk     none

States are one row for each place that has any: the device, the host, a disk.

What ranks sent is in `traffic.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

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
from zero3d.engine.accounting import MemoryEntry
from zero3d.engine.checkpoints import COPY
from zero3d.engine.engine import Engine
from zero3d.memory.arena import STATES
from zero3d.precision import NAMES, dtype_name, torch_dtype
from zero3d.spec.tiers import DEVICE
from zero3d.train.device_memory import memory_bytes, reserved_bytes

LABELS = {"optimizer": "optimizer states"}


class MemoryRow(NamedTuple):
    """Holds bytes on one rank at a place: the device, the host, a disk.

    formula  None when there is none
    at_most  it is an upper bound
    agrees   the verdict
    """

    consumer: str
    dtype: str
    formula: int | None
    at_most: bool
    measured: int
    agrees: bool | None
    place: str = DEVICE


# --- activations --------------------------------------------------------------------------------


class Activations:
    """Counts bytes by dtype that the first forward keeps for its backward: distinct storages, no parameters.

    What autograd saves, and the inputs of recomputed blocks. A view of a parameter lies in its
    unit's storage, which keeps its identity for ever.
    """

    def __init__(self, engine: Engine) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self._seen = {unit.weights.full.untyped_storage()._cdata for unit in engine.units}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        for root in engine.chunks.values():
            handles = [root.register_forward_pre_hook(self._begin)]
            handles.append(root.register_forward_hook(partial(self._end, handles)))

    def _begin(self, *_: Any) -> None:
        self._hooks.__enter__()

    def _end(self, handles: list[Any], *_: Any) -> None:
        self._hooks.__exit__()
        for handle in handles:
            handle.remove()

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.bytes[_name(tensor.dtype)] += storage.nbytes()
        return tensor.detach()  # an operation's output would hold the operation that holds it


# --- memory -------------------------------------------------------------------------------------


def memory_rows(
    engine: Engine, entries: Iterable[MemoryEntry], activations: Mapping[str, int], micro_batches: int
) -> list[MemoryRow]:
    """Return ZeRO's five consumers, padding apart, and the whole of an accelerator.

    `entries` is engine.memory right after training.
    """
    entries = list(entries)
    by_category = {entry.category: entry for entry in entries if entry.place == DEVICE}
    dtypes = state_dtypes(engine)
    rows = [_state_row(by_category[category], dtypes) for category in STATES]
    for category, bound in transient_bounds(engine, micro_batches).items():
        peak = by_category[category].peak
        rows.append(MemoryRow(f"temporary: {category}", dtypes[category], bound, True, peak, peak <= bound))
    rows.append(MemoryRow("activations", _join(activations), None, False, sum(activations.values()), None))
    if (on_host := by_category.get("activations")) is not None:
        rows.append(MemoryRow("host: activations", "-", None, False, on_host.peak, None))
    reserved = reserved_bytes(engine)
    if reserved is not None:
        rows.append(MemoryRow("device: allocated", "-", None, False, memory_bytes(engine), None))
        rows.append(MemoryRow("device: reserved", "-", None, False, reserved, None))
    for entry in entries:
        if entry.place != DEVICE and entry.category in STATES:
            rows.append(_state_row(entry, dtypes))
        elif entry.category == COPY:
            equal = entry.planned == entry.measured
            rows.append(MemoryRow("copy for saves", "-", entry.planned, False, entry.measured, equal, entry.place))
        elif entry.place != DEVICE:
            rows.append(MemoryRow(f"temporary: {entry.category}", "-", None, False, entry.peak, None, entry.place))
    return rows


def _state_row(entry: MemoryEntry, dtypes: Mapping[str, str]) -> MemoryRow:
    """Return the row of a category of states at a place, whose formula is exact."""
    label = LABELS.get(entry.category, entry.category)
    equal = entry.planned == entry.measured
    return MemoryRow(label, dtypes[entry.category], entry.planned, False, entry.measured, equal, entry.place)


def state_dtypes(engine: Engine) -> dict[str, str]:
    """Return the dtypes each category of buffers really has."""
    plans = engine.blueprint.plans.values()
    gradients = [plan.gradients for plan in plans if plan.gradients is not None]
    reduced = {buffer.dtype for unit in engine.units if unit.grads is not None for buffer in unit.grads.buffers}
    stored = [unit.weights.masters.stored for unit in engine.units]
    masters = {master.dtype for master in stored if master is not None}
    states = set(_in_records(engine)) or {flat.dtype for _, _, flat in engine.optimizer.flat_states()}
    compute = {unit.weights.full.dtype for unit in engine.units}
    gathered = {unit.weights.full.dtype for unit in engine.units if not unit.plan.whole}
    bucket = {torch_dtype(plan.local) for plan in gradients if not plan.kept}
    wire = {torch_dtype(plan.travels) for plan in gradients} if engine.dp.size > 1 else set[torch.dtype]()
    kinds = {
        "parameters": compute,
        "gradients": reduced,
        "optimizer": masters | states,
        "gathered": gathered,
        "bucket": bucket,
        "wire": wire,
    }
    return {category: _join(map(_name, kind)) for category, kind in kinds.items()} | {"padding": "of each"}


def _in_records(engine: Engine) -> Iterator[torch.dtype]:
    """Yield the dtypes that records of optimizer states hold."""
    for unit in engine.units:
        records = unit.weights.records
        if records is not None and unit.grads is not None:
            for bucket in records.buckets[:1]:
                yield from (records.view(bucket, name).dtype for name in bucket.names)


def transient_bounds(engine: Engine, micro_batches: int) -> dict[str, int]:
    """Return upper bounds of temporary buffers, in bytes.

    gathered  stage 3, more ranks than one: the root all the time, two blocks at a hand-over, AHEAD units ahead
    bucket    stages 2, 3, more ranks than one: the root's gradients all the time, two units filling, IN_FLIGHT being
              reduced; parts of tied parameters' gradients are summed in the reduced dtype
    wire      gathers in blocks of 8 bits. IN_FLIGHT reductions, of which one is being added up (`reductions_bytes`),
              and sums of shards over their copies behind them. Scratch in which masters are cast, those in halves
              updated, or records. Besides, the ring of inputs of recomputed blocks on the host
    exact     a bucket for every micro-batch at all stages
    """
    blueprint, device = engine.blueprint, engine.mesh.device.type
    policy, units = blueprint.policy, list(blueprint.units)
    full, messages = gathered_at_once(units, device)
    parts = 2 if engine.experts.anywhere else 1  # a block is two units then
    passing, wider = dict[str, int](), 1
    for name, plan, layout in units:
        if plan.gradients is None:
            continue
        if not plan.gradients.kept:
            width = plan.kind.dtype.itemsize
            local = plan.gradients.travels if policy.exact else plan.gradients.local
            passing[name], wider = layout.total * width * plan.sources, max(wider, local.itemsize // width)
    local_gradients = whole_units(passing.items(), 2 * parts)
    deferred = [unit.layout.total for unit in engine.units if unit.deferred and unit.name in passing]
    tied = sum(deferred) * policy.master.itemsize
    updated = [unit for unit in engine.units if unit.grads is not None and not unit.plan.from_masters]
    masters = sum(unit.weights.elements for unit in updated if unit.weights.masters.stored is not None)
    ring, update = _of_records(engine)
    kept = engine.kept_inputs
    ring += 0 if kept is None or kept.slots is None else kept.slots.peak.device
    return {
        "gathered": full,
        "bucket": wider * local_gradients + tied + _to_host(blueprint) if passing else 0,
        "wire": ring
        + messages
        + max(
            reductions_bytes(_trained(blueprint), micro_batches) + bytes_over_copies(engine),
            master_scratch(masters, device, policy.splits),
            update,
            *(feature.scratch for feature in engine.features),
        ),
    }


def bytes_over_copies(engine: Engine) -> int:
    """Return the bytes in which a step's shards are summed over copies; those of an exact sum are a reduction's."""
    blueprint = engine.blueprint
    trained = _trained(blueprint)
    if blueprint.policy.exact or not trained or blueprint.ranks.copies.size == 1:
        return 0
    how = sum_over_copies(trained[0].plan)
    return sums_of_copies([unit.layout.shard for unit in trained], how, engine.mesh.device.type)


def _trained(blueprint: Blueprint) -> list[BlueprintUnit]:
    return [unit for unit in blueprint.units if unit.plan.gradients is not None]


def _to_host(blueprint: Blueprint) -> int:
    """Return the bytes to which reductions come whose sums are kept on the host, and sums over copies of these."""
    policy = blueprint.policy
    if not policy.gradients:
        return 0
    longest = max(unit.layout.shard for unit in _trained(blueprint))
    sums = IN_FLIGHT * policy.held.itemsize * longest if blueprint.ranks.copies.size > 1 else 0
    return arriving_bytes((IN_FLIGHT + LEAVING) * [longest], policy) + sums


def _of_records(engine: Engine) -> tuple[int, int]:
    """Return the bytes of the device's ring of records, and of the scratch in which it updates one.

    That is fp32 of what is in 16 bits, and noise, or what a cast takes. A CPU has the ring on the host.
    """
    records = [unit.weights.records for unit in engine.units if unit.grads is not None]
    buckets = [bucket for of_unit in records if of_unit is not None for bucket in of_unit.buckets]
    longest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
    policy, offload, device = engine.policy, engine.offload, engine.mesh.device.type
    wide, staging = policy.master.itemsize, gradient_staging(longest, policy)
    if not buckets or offload.executor != DEVICE:
        return staging, wide * longest * policy.narrow
    rounded, splits = offload.moments == "bf16", policy.splits
    fields = max(len(bucket.names) * (bucket.stop - bucket.start) for bucket in buckets)  # no one wider than a master
    passing = device != "cpu" and offload.optimizer != "none"
    ring = ring_bytes(wide * fields) if passing else 0
    return ring + staging, record_scratch(longest, device, splits, rounded, not splits, policy.narrow)


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, dtype_name(dtype))


def _join(names: Iterable[str]) -> str:
    return " + ".join(sorted(set(names))) or "-"
