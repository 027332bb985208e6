"""What a run measured beside what the formulas say: numbers only, `report.py` prints them.

consumer           measured                               formula
-----------------  -------------------------------------  -------------------------------------
parameters         held by the arena                      stages.engine_bytes, exact
gradients          held by the arena                      stages.engine_bytes, exact
optimizer states   held by the arena                      stages.engine_bytes, exact
padding            held by the arena                      from the layouts, exact
temporary buffers  most held at any instant, by kind      an upper bound from unit sizes
activations        what autograd saved in one forward     none
traffic            engine.traffic, per operation          stages.step_traffic x steps, exact
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero3d.engine import Engine, MemoryEntry
from zero3d.hf.blocks import ROOT
from zero3d.ledger import Entry
from zero3d.precision import NAMES
from zero3d.zero.prefetch import WINDOW
from zero3d.zero.stages import Moved, count_gathers, step_traffic, token_order
from zero3d.zero.unit import Unit

NOTHING = Moved(0, 0, 0)


class MemoryRow(NamedTuple):
    """Bytes on one rank. formula: None when there is none; at_most: it is an upper bound; agrees: the verdict."""

    consumer: str
    dtype: str
    formula: int | None
    at_most: bool
    measured: int
    agrees: bool | None


class TrafficRow(NamedTuple):
    """What one operation sent on one rank in the whole run; `equal` compares unit by unit."""

    op: str
    formula: Moved
    measured: Moved
    equal: bool


# --- activations --------------------------------------------------------------------------------


@contextmanager
def activation_meter(units: Sequence[Unit]) -> Iterator[dict[str, int]]:
    """Bytes by dtype that autograd saves inside; distinct storages once, parameters left out.

    A view of a parameter lies in its unit's storage, which keeps its identity for ever.
    """
    seen = {unit.weights.full.untyped_storage()._cdata for unit in units}
    saved: dict[str, int] = defaultdict(int)

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in seen:
            seen.add(storage._cdata)
            saved[_name(tensor.dtype)] += storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield saved


# --- memory -------------------------------------------------------------------------------------


def memory_rows(engine: Engine, held: Iterable[MemoryEntry], activations: Mapping[str, int]) -> list[MemoryRow]:
    """ZeRO's five consumers, padding apart. `held` is engine.memory right after training."""
    entries = {entry.category: entry for entry in held}
    dtypes = state_dtypes(engine)
    rows = []
    for category, label in (("parameters", "parameters"), ("gradients", "gradients"),
                            ("optimizer", "optimizer states"), ("padding", "padding")):  # fmt: skip
        entry = entries[category]
        equal = entry.planned == entry.measured
        rows.append(MemoryRow(label, dtypes[category], entry.planned, False, entry.measured, equal))
    for category, bound in transient_bounds(engine).items():
        peak = entries[category].peak
        rows.append(MemoryRow(f"temporary: {category}", dtypes[category], bound, True, peak, peak <= bound))
    rows.append(MemoryRow("activations", _join(activations), None, False, sum(activations.values()), None))
    return rows


def state_dtypes(engine: Engine) -> dict[str, str]:
    """The dtypes each category of buffers really has."""
    weights = [unit.weights for unit in engine.units]
    grads = [unit.grads for unit in engine.units if unit.grads is not None]
    buffers = [full for grad in grads for full in (grad.full, grad.shard) if full is not None]
    masters = [w.master.dtype for w in weights if w.master is not w.held]
    states = [s.dtype for each in engine.optimizer.torch.state.values() for s in each.values() if s.dim() == 1]
    compute, reduced = {w.full.dtype for w in weights}, {buffer.dtype for buffer in buffers}
    gathered = compute if engine.policy.stage.shards_parameters else ()
    bucket = compute if engine.policy.reduce == "every_micro_batch" else ()
    trainable = [unit for unit in engine.units if unit.grads is not None and engine.comm.size > 1]
    wire = {unit.gradients.travels for unit in trainable}
    kinds = {"parameters": compute, "gradients": reduced, "optimizer": {*masters, *states},
             "gathered": gathered, "bucket": bucket, "wire": wire}  # fmt: skip
    return {category: _join(map(_name, kind)) for category, kind in kinds.items()} | {"padding": "of each"}


def transient_bounds(engine: Engine) -> dict[str, int]:
    """Upper bounds of temporary buffers, in bytes.

    gathered  stage 3: the root all the time, two units at a hand-over, WINDOW ahead
    bucket    stages 2, 3: the root's gradients all the time, two units filling, WINDOW being reduced
    wire      WINDOW reductions: (N-1)/N of a unit received and, if it travels in another dtype, cast to be sent
    """
    sizes = [unit.layout.total * unit.dtype.itemsize for unit in engine.units if unit.name != ROOT]
    root = sum(unit.layout.total * unit.dtype.itemsize for unit in engine.units if unit.name == ROOT)
    full = root + (2 + WINDOW) * max(sizes, default=0)
    policy, n = engine.policy, engine.comm.size
    moving = 0
    for unit in engine.units:
        if unit.grads is not None:
            travels = unit.gradients.travels
            local = unit.dtype if policy.stage.shards_optimizer else policy.master
            copies = 1 if travels == local else 2
            moving = max(moving, copies * unit.layout.total * travels.itemsize * (n - 1) // n)
    return {
        "gathered": full if policy.stage.shards_parameters else 0,
        "bucket": full if policy.reduce == "every_micro_batch" else 0,
        "wire": WINDOW * moving,
    }


# --- traffic ------------------------------------------------------------------------------------


def traffic_rows(engine: Engine, ledger: Iterable[Entry], applied: int, skipped: int) -> list[TrafficRow]:
    """The whole run per operation. `ledger` is engine.traffic right after training."""
    measured = {(e.op, e.unit): Moved(e.calls, e.elements, e.bytes) for e in ledger}
    planned = planned_traffic(engine, applied, skipped)
    rows = []
    for op in dict.fromkeys(op for op, _ in [*planned, *measured]):
        ours = {unit: moved for (kind, unit), moved in measured.items() if kind == op}
        formula = {unit: moved for (kind, unit), moved in planned.items() if kind == op}
        rows.append(TrafficRow(op, _total(formula.values()), _total(ours.values()), ours == formula))
    return rows


def planned_traffic(engine: Engine, applied: int, skipped: int) -> dict[tuple[str, str], Moved]:
    """By (operation, unit): step_traffic times steps, and once the order of reductions.

    A skipped step (fp16 overflow) updates nothing, so stages 0-2 gather nothing after it.
    """
    n = engine.comm.size
    if n == 1:
        return {}
    names = [unit.name for unit in engine.units if unit.name != ROOT]  # in model order: embedding, layers, head
    gathers = count_gathers(token_order(names, root=ROOT, no_backward=names[:1]))
    policy = engine.policy
    units = engine.traffic_units
    each = step_traffic(engine.stage, units, n, gathers, reduce=policy.reduce)
    planned = {}
    for (op, unit), moved in each.items():
        every = op != "all_gather" or policy.stage.shards_parameters
        steps = applied + skipped if every else applied
        planned[op, unit] = Moved(*(steps * figure for figure in moved))
    trainable = sum(unit.trainable for unit in units)
    planned["broadcast", "-"] = Moved(1, trainable, 8 * trainable)
    return planned


def _total(moved: Iterable[Moved]) -> Moved:
    return Moved(*(sum(figures) for figures in zip(NOTHING, *moved, strict=True)))


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _join(names: Iterable[str]) -> str:
    return " + ".join(sorted(set(names))) or "-"
