"""What a run measured beside what the formulas say: numbers only, `report.py` prints them.

consumer           measured                               formula
-----------------  -------------------------------------  -------------------------------------
parameters         held by the arena                      stages.engine_bytes, exact
gradients          held by the arena                      stages.engine_bytes, exact
optimizer states   held by the arena                      stages.engine_bytes, exact
padding            held by the arena                      from the layouts, exact
temporary buffers  most held at any instant, by kind      an upper bound from unit sizes
activations        what autograd saved in one forward     none
traffic            engine.traffic, per operation          traffic.step_traffic x steps, exact
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from zero3d.engine import Engine, MemoryEntry
from zero3d.hf.blocks import ROOT
from zero3d.plan.traffic import Moved, count_gathers, step_traffic
from zero3d.precision import NAMES
from zero3d.zero.prefetch import WINDOW

NOTHING = Moved(0, 0, 0)
LOSS_VALUES = 2  # of train_batch's exchange: sum of losses, sum of weights


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


class Activations:
    """Bytes by dtype that the first forward keeps for its backward: distinct storages once, parameters left out.

    What autograd saves, and the inputs of recomputed blocks. A view of a parameter lies in its
    unit's storage, which keeps its identity for ever.
    """

    def __init__(self, engine: Engine) -> None:
        self.bytes: dict[str, int] = defaultdict(int)
        self._seen = {unit.weights.full.untyped_storage()._cdata for unit in engine.units}
        self._hooks = saved_tensors_hooks(self._pack, lambda tensor: tensor)
        for root in engine.parts.values():
            mine = [root.register_forward_pre_hook(self._begin)]
            mine.append(root.register_forward_hook(partial(self._end, mine)))

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
        return tensor


# --- memory -------------------------------------------------------------------------------------


def memory_rows(
    engine: Engine, held: Iterable[MemoryEntry], activations: Mapping[str, int], micro_batches: int
) -> list[MemoryRow]:
    """ZeRO's five consumers, padding apart. `held` is engine.memory right after training."""
    entries = {entry.category: entry for entry in held}
    dtypes = state_dtypes(engine)
    rows = []
    for category, label in (("parameters", "parameters"), ("gradients", "gradients"),
                            ("optimizer", "optimizer states"), ("padding", "padding")):  # fmt: skip
        entry = entries[category]
        equal = entry.planned == entry.measured
        rows.append(MemoryRow(label, dtypes[category], entry.planned, False, entry.measured, equal))
    for category, bound in transient_bounds(engine, micro_batches).items():
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


def transient_bounds(engine: Engine, micro_batches: int) -> dict[str, int]:
    """Upper bounds of temporary buffers, in bytes.

    gathered  stage 3: the root all the time, two units at a hand-over, WINDOW ahead
    bucket    stages 2, 3: the root's gradients all the time, two units filling, WINDOW being reduced; parts of
              tied parameters' gradients are summed in the reduced dtype
    wire      WINDOW reductions: (N-1)/N of a unit received and, if it travels in another dtype, cast to be sent;
              from the second micro-batch on, a shard that is added to the sum
    """
    sizes = [unit.layout.total * unit.dtype.itemsize for unit in engine.units if unit.name != ROOT]
    root = sum(unit.layout.total * unit.dtype.itemsize for unit in engine.units if unit.name == ROOT)
    full = root + (2 + WINDOW) * max(sizes, default=0)
    policy, n = engine.policy, engine.comm.size
    moving, shard, tied = 0, 0, 0
    for unit in engine.units:
        if unit.grads is not None:
            travels = unit.gradients.travels
            local = unit.dtype if policy.stage.shards_optimizer else policy.master
            copies = 1 if travels == local else 2
            moving = max(moving, copies * unit.layout.total * travels.itemsize * (n - 1) // n)
            shard = max(shard, unit.layout.shard * policy.master.itemsize)
            tied += unit.layout.total * policy.master.itemsize if unit.deferred else 0
    return {
        "gathered": full if policy.stage.shards_parameters else 0,
        "bucket": full + tied if policy.reduce == "every_micro_batch" else 0,
        "wire": WINDOW * moving + (shard if micro_batches > 1 else 0),
    }


# --- traffic ------------------------------------------------------------------------------------


class Traffic:
    """The ledger's part that training moved: evaluations and checkpoints are taken out.

    gathers  parameter gathers per unit and step, from the tokens of the first step
    """

    def __init__(self, engine: Engine) -> None:
        self.gathers: Mapping[str, int] = {}
        self._ledger, self._tokens = engine.traffic, engine.gathers
        self._apart: Counter[tuple[str, str, str, str]] = Counter()
        self._last = 0
        engine.traffic.reset()
        engine.gathers.events = []

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is moved inside is no training."""
        before = self._rows()
        yield
        self._apart.update({key: figure - before[key] for key, figure in self._rows().items()})

    def last_step(self) -> int:
        """Bytes since it was asked last."""
        if self._tokens.events is not None:
            self.gathers, self._tokens.events = count_gathers(self._tokens.events), None
        total = sum(entry.moved.bytes for entry in self.entries())
        self._last, last = total, self._last
        return total - last

    def entries(self) -> list[TrafficEntry]:
        """Training's traffic by axis, operation and unit."""
        left = self._rows() - self._apart
        names = dict.fromkeys(key[:3] for key in left)
        return [TrafficEntry(*key, Moved(*(left[*key, f] for f in Moved._fields))) for key in names]

    def _rows(self) -> Counter[tuple[str, str, str, str]]:
        rows: Counter[tuple[str, str, str, str]] = Counter()
        for entry in self._ledger:
            for name in Moved._fields:
                rows[entry.axis, entry.op, entry.unit, name] += getattr(entry, name)
        return rows


class TrafficEntry(NamedTuple):
    """What one operation moved on one unit."""

    axis: str
    op: str
    unit: str
    moved: Moved


def traffic_rows(engine: Engine, traffic: Traffic, applied: int, skipped: int, micro_batches: int) -> list[TrafficRow]:
    """The whole session per operation."""
    measured = {(_on(entry.axis, entry.op), entry.unit): entry.moved for entry in traffic.entries()}
    planned = planned_traffic(engine, traffic.gathers, applied, skipped, micro_batches)
    planned |= planned_pipeline(engine, applied + skipped, micro_batches)
    rows = []
    for op in dict.fromkeys(op for op, _ in [*planned, *measured]):
        ours = {unit: moved for (kind, unit), moved in measured.items() if kind == op}
        formula = {unit: moved for (kind, unit), moved in planned.items() if kind == op}
        rows.append(TrafficRow(op, _total(formula.values()), _total(ours.values()), ours == formula))
    return rows


def planned_traffic(
    engine: Engine, gathers: Mapping[str, int], applied: int, skipped: int, micro_batches: int
) -> dict[tuple[str, str], Moved]:
    """By (operation, unit): step_traffic times steps, the mean loss of each, and once the order of reductions.

    A skipped step (fp16 overflow) updates nothing, so stages 0-2 gather nothing after it.
    """
    n = engine.comm.size
    if n == 1:
        return {}
    policy, units = engine.policy, engine.traffic_units
    each = step_traffic(engine.stage, units, n, gathers, micro_batches, policy.reduce)
    calls, values, size = each["exchange", "-"]
    loss = LOSS_VALUES * (n - 1)
    each["exchange", "-"] = Moved(calls + 1, values + loss, size + 8 * loss)
    planned = {}
    for (op, unit), moved in each.items():
        every = op != "all_gather" or policy.stage.shards_parameters
        steps = applied + skipped if every else applied
        planned[op, unit] = Moved(*(steps * figure for figure in moved))
    trainable = sum(unit.trainable for unit in units)
    planned["broadcast", "-"] = Moved(1, trainable, 8 * trainable)
    return planned


def planned_pipeline(engine: Engine, steps: int, micro_batches: int) -> dict[tuple[str, str], Moved]:
    """By (operation, part or unit) on the pp axis: hidden states, tied gradients, and what a replica agrees on.

    A step exchanges the weight with the verdict on orders, the norms and the mean loss; the first one also
    the places of the norms.
    """
    if engine.pipeline is None or steps == 0:
        return {}
    peers, replica = engine.mesh.pp - 1, engine.replica
    each = engine.pipeline.traffic(micro_batches)
    for unit in replica.traded:
        shard = unit.gradients.shard
        each["trade", unit.name] = Moved(1, shard.numel(), shard.numel() * shard.element_size())
    planned = {
        (_on("pp", op), unit): Moved(*(steps * figure for figure in moved)) for (op, unit), moved in each.items()
    }
    values = (steps * (2 + replica.longest + LOSS_VALUES) + 1 + replica.longest) * peers
    planned[_on("pp", "exchange"), "-"] = Moved(3 * steps + 2, values, 8 * values)
    return planned


def _on(axis: str, op: str) -> str:
    return op if axis == "dp" else f"{op} ({axis})"


def _total(moved: Iterable[Moved]) -> Moved:
    return Moved(*(sum(figures) for figures in zip(NOTHING, *moved, strict=True)))


def _name(dtype: torch.dtype) -> str:
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))


def _join(names: Iterable[str]) -> str:
    return " + ".join(sorted(set(names))) or "-"
