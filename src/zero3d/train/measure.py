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
    coded_messages,
    gradient_staging,
    master_scratch,
    record_scratch,
    reduction_of,
    ring_bytes,
    sum_over_copies,
    sums_of_copies,
    whole_units,
)
from zero3d.blueprint.stages import LEAVING, WINDOW
from zero3d.distributed.choice import PAIRWISE
from zero3d.engine.accounting import MemoryEntry
from zero3d.engine.checkpoints import COPY
from zero3d.engine.engine import Engine
from zero3d.memory.arena import STATES
from zero3d.precision import NAMES, dtype_name, torch_dtype
from zero3d.spec.tiers import DEVICE
from zero3d.train.device_memory import memory_bytes, reserved_bytes
from zero3d.zero.unit import Unit

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
    weights = [unit.weights for unit in engine.units]
    grads = [unit.grads for unit in engine.units if unit.grads is not None]
    buffers = [buffer for grad in grads for buffer in grad.buffers]
    masters = [w.masters.stored.dtype for w in weights if w.masters.stored is not None]
    states = {flat.dtype for _, _, flat in engine.optimizer.flat_states()}
    in_records = set(_in_records(engine))
    states = in_records or states
    compute, reduced = {w.full.dtype for w in weights}, {buffer.dtype for buffer in buffers}
    gathered = {w.full.dtype for w in weights if not w.keeps_full}
    trainable = [unit for unit in engine.units if unit.grads is not None and engine.dp.size > 1]
    bucket = {torch_dtype(grad.plan.local) for grad in grads if not grad.plan.kept}
    wire = {torch_dtype(unit.gradients.plan.travels) for unit in trainable}
    kinds = {
        "parameters": compute,
        "gradients": reduced,
        "optimizer": {*masters, *states},
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

    gathered  stage 3, more ranks than one: the root all the time, two blocks at a hand-over, WINDOW units ahead
    bucket    stages 2, 3, more ranks than one: the root's gradients all the time, two units filling, WINDOW being
              reduced; parts of tied parameters' gradients are summed in the reduced dtype
    wire      gathers in blocks of 8 bits. WINDOW reductions (`reduction_bytes`), of which one is being added up, and
              sums of shards over their copies behind them. Scratch in which masters are cast, those in halves updated,
              or records. Besides, the ring of inputs of recomputed blocks on the host
    exact     a bucket for every micro-batch at all stages
    """
    coded = [unit.layout.total for unit in engine.units if unit.weights.coded]
    released = [unit for unit in engine.units if not unit.weights.keeps_full]
    sizes = [(unit.name, unit.layout.total * unit.dtype.itemsize) for unit in released]
    full = whole_units(sizes, ahead=0 if len(coded) == len(sizes) else WINDOW)
    parts = 2 if engine.experts.anywhere else 1  # a block is two units then
    passing = [unit for unit in engine.units if unit.grads is not None and not unit.grads.plan.kept]
    local_gradients = whole_units(
        ((unit.name, unit.layout.total * unit.dtype.itemsize * unit.sources) for unit in passing), 2 * parts
    )
    policy = engine.policy
    moving, adding, tied, masters, exact = 0, 0, 0, 0, engine.summands is not None
    wider, device = 1, engine.mesh.device.type
    for unit in engine.units:
        if unit.grads is not None:
            travels = unit.gradients.plan.travels
            local = travels if exact else unit.gradients.plan.local
            wider = max(wider, local.itemsize // unit.dtype.itemsize) if unit in passing else wider
            masters += 0 if unit.weights.masters.stored is None else unit.weights.masters.stored.numel()
            travelling, sums = reduction_bytes(engine, unit, micro_batches)
            moving, adding = max(moving, travelling), max(adding, sums)
            tied += unit.layout.total * policy.master.itemsize if unit.deferred and unit in passing else 0
    ring, update = _of_records(engine)
    kept = engine.kept_inputs
    ring += 0 if kept is None or kept.slots is None else kept.slots.peak.device
    return {
        "gathered": full,
        "bucket": wider * local_gradients + tied + _to_host(engine) if passing else 0,
        "wire": ring
        + (coded_messages(max(coded), device) if coded else 0)
        + max(
            WINDOW * moving + adding + bytes_over_copies(engine),
            master_scratch(masters, device, policy.splits),
            update,
            *(feature.scratch for feature in engine.features),
        ),
    }


def bytes_over_copies(engine: Engine) -> int:
    """Return the bytes in which a step's shards are summed over copies; those of an exact sum are a reduction's."""
    trained = [unit for unit in engine.units if unit.grads is not None]
    if engine.summands is not None or not trained or trained[0].across.size == 1:
        return 0
    how = sum_over_copies(trained[0].plan)
    return sums_of_copies([unit.layout.shard for unit in trained], how, engine.mesh.device.type)


def _to_host(engine: Engine) -> int:
    """Return the bytes to which reductions come whose sums are kept on the host, and sums over copies of these."""
    trained = [unit for unit in engine.units if unit.grads is not None]
    if not engine.policy.gradients:
        return 0
    longest, wide = max(unit.layout.shard for unit in trained), engine.policy.master.itemsize
    held = engine.policy.held.itemsize
    sums = WINDOW * held * longest if trained[0].across.size > 1 else 0
    return arriving_bytes((WINDOW + LEAVING) * [longest], held, wide) + sums


def _of_records(engine: Engine) -> tuple[int, int]:
    """Return the bytes of the device's ring of records, and of the scratch in which it updates one.

    That is fp32 of what is in 16 bits, and noise, or what a cast takes. A CPU has the ring on the host.
    """
    records = [unit.weights.records for unit in engine.units if unit.grads is not None]
    buckets = [bucket for of_unit in records if of_unit is not None for bucket in of_unit.buckets]
    longest = max((bucket.stop - bucket.start for bucket in buckets), default=0)
    wide = engine.policy.master.itemsize
    held = engine.policy.held.itemsize
    staging = gradient_staging(longest, held) if engine.policy.gradients else 0
    narrow = held < wide
    if not buckets or engine.offload.executor != DEVICE:
        return staging, wide * longest * narrow
    rounded = engine.offload.moments == "bf16"
    device, splits = engine.mesh.device.type, engine.policy.splits
    fields = max(len(bucket.names) * (bucket.stop - bucket.start) for bucket in buckets)  # no one wider than a master
    passing = device != "cpu" and engine.offload.optimizer != "none"
    ring = ring_bytes(engine.policy.master.itemsize * fields) if passing else 0
    return ring + staging, record_scratch(longest, device, splits, rounded, not splits, narrow)


def reduction_bytes(engine: Engine, unit: Unit, micro_batches: int) -> tuple[int, int]:
    """Return the most bytes of one reduction: what travels, until it is over; shards, while terms are added up.

    messages     a rank's own slot stays: (N-1)/N of a unit received and, if it travels in another dtype, cast to go
    all-to-all   terms in 16 bits, and exact ones: a unit received, a unit cast
    sums         all others: a unit cast; a shard received, unless it lands where it stays

    Experts' gradients of several sources are summed to a unit in the reduced dtype first, exact ones in a tree.
    Terms are added up in a shard from the second micro-batch on; exact ones in as many as the tree over ranks is deep.
    """
    plan, shard, master = unit.plan, unit.layout.shard, unit.plan.policy.master
    n, exact = plan.cut.size, plan.policy.exact
    whole = unit.layout.total * master.itemsize if unit.sources > 1 else 0  # sources are summed before they go
    tree = exact * whole * unit.sources.bit_length()
    if n == 1:
        return whole, exact * shard * master.itemsize + tree
    adds = micro_batches > 1 and (plan.cut.algorithm == PAIRWISE or plan.policy.often)
    how = reduction_of(plan, adds)
    moving, terms = how.nbytes(shard), how.terms
    deep = n.bit_length() if exact else int(terms and adds)
    return whole + moving, deep * shard * master.itemsize + tree


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, dtype_name(dtype))


def _join(names: Iterable[str]) -> str:
    return " + ".join(sorted(set(names))) or "-"
