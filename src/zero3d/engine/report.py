"""An engine's report: what it holds, what it has sent, where time goes, which settings are in force, as plain rows.

A report is made on one rank, at any time between steps, without communication and without waiting for the device.
What it looks like is in report_view.py.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer

from zero3d.account.traffic import Moved
from zero3d.distributed.degrees import Degrees
from zero3d.distributed.kernels import capability
from zero3d.engine.accounting import MemoryEntry
from zero3d.engine.options import KEYWORDS, Options
from zero3d.engine.parts import Parts
from zero3d.engine.traffic_formulas import TrafficFormulas
from zero3d.engine.transients import dtypes_of, transient_bounds
from zero3d.memory.arena import STATES
from zero3d.precision import Precision
from zero3d.spec.optimizer import OptimizerRow
from zero3d.spec.tiers import DEVICE
from zero3d.zero.step_parts import PartTime

VERSION = 1
DATA = frozenset({"weights"})  # keywords that are no settings: values, which an engine does not keep


class HeldRow(NamedTuple):
    """Counts the bytes of one category at one place on this rank; `MemoryEntry` says what measured figures are.

    at_rest  by formula, between two steps
    planned  by formula, at the end of a step's last backward: all gradients are there
    bound    what comes and goes in a step takes at most so much
    """

    category: str
    place: str
    dtype: str
    at_rest: int | None
    planned: int | None
    bound: int | None
    measured: int
    peak: int
    at_peak: int
    now: int


class SentRow(NamedTuple):
    """Counts what this rank sent by one operation on one axis."""

    axis: str
    operation: str
    calls: int
    elements: int
    bytes: int


class Setting(NamedTuple):
    """Says what a keyword of an engine is, as plain values.

    became  what the engine has made of it, where that says more than the value: of `auto`, of None
    """

    name: str
    value: Any
    default: Any
    became: Any = None


@dataclass(frozen=True)
class Report:
    """Holds what an engine says of itself on this rank.

    steps         applied so far
    step_traffic  of one applied step by formula, over dp; None where no formula holds
    times         seconds of a step by part
    notes         lines about what computes, and the arithmetic of what was left to `auto`
    versions      of what computes, and where
    axes          ranks of each axis
    """

    rank: int
    ranks: int
    steps: int
    memory: Sequence[HeldRow]
    traffic: Sequence[SentRow]
    step_traffic: Sequence[SentRow] | None
    times: Sequence[PartTime]
    settings: Sequence[Setting]
    notes: Sequence[str]
    versions: Mapping[str, str]
    axes: Mapping[str, int]

    @classmethod
    def of(
        cls, parts: Parts, formulas: TrafficFormulas, entries: Sequence[MemoryEntry], rows: Sequence[PartTime] = ()
    ) -> Report:
        """Make the report of an engine's parts. rows: seconds of a step by part."""
        mesh, ledger, micro_batches = parts.mesh, parts.axes.ledger, parts.options.accumulate
        in_step = formulas.of_a_step(micro_batches, ledger)
        return cls(
            rank=mesh.rank,
            ranks=mesh.world,
            steps=parts.stepper.count,
            memory=list(_held(parts, entries, micro_batches)),
            traffic=[SentRow(e.axis, e.op, e.calls, e.elements, e.bytes) for e in ledger.totals()],
            step_traffic=None if in_step is None else _by_operation(in_step),
            times=list(rows),
            settings=list(_settings(parts)),
            notes=[*parts.all_notes, *parts.offload.why],
            versions=_versions(parts),
            axes={name: mesh.degrees.size(name) for name in Degrees._fields},
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        tree = {each.name: getattr(self, each.name) for each in fields(self)}
        for name in ("memory", "traffic", "step_traffic", "times", "settings"):
            tree[name] = None if tree[name] is None else [row._asdict() for row in tree[name]]
        return {"version": VERSION, **tree, "notes": list(self.notes)}

    def __str__(self) -> str:
        """Return tables for people, as wide as the terminal."""
        from zero3d.engine.report_view import as_text  # with rich, which training alone does not need

        return as_text(self.as_json())

    def _repr_html_(self) -> str:
        """Return tables for a notebook."""
        from zero3d.engine.report_view import as_html

        return as_html(self.as_json())


def _held(parts: Parts, entries: Sequence[MemoryEntry], micro_batches: int) -> Iterator[HeldRow]:
    dtypes, bounds = dtypes_of(parts), transient_bounds(parts, micro_batches)
    at_rest = parts.accounts.at_rest
    for entry in entries:
        here = entry.place == DEVICE
        has_dtype = entry.category in STATES or (here and entry.category in bounds)
        rest = ceil(at_rest[entry.category]) if here and entry.category in at_rest else entry.planned
        yield HeldRow(
            entry.category,
            entry.place,
            dtypes[entry.category] if has_dtype else "-",
            rest,
            entry.planned,
            bounds.get(entry.category) if here else None,
            *entry[3:],
        )


def _by_operation(moved: Mapping[tuple[str, str], Moved]) -> list[SentRow]:
    operations = sorted({operation for operation, _ in moved})
    return [
        SentRow("dp", name, *Moved.total(each for (operation, _), each in moved.items() if operation == name))
        for name in operations
    ]


# --- settings -----------------------------------------------------------------------------------


def _settings(parts: Parts) -> Iterator[Setting]:
    """Yield all keywords of the engine; those of `offload` one by one, as its mapping has them."""
    options, usual, became = parts.options, Options(), _became(parts)
    for name, (section, key) in KEYWORDS.items():
        if name in DATA:
            continue
        if name != "offload":
            given, default = (_at(of, section, key) for of in (options, usual))
            yield _setting(name, given, default, became.get(name))
            continue
        asked, settled = parts.offload.asked, parts.offload.offload
        for each in fields(asked):
            found = getattr(settled, each.name)
            yield _setting(f"offload.{each.name}", getattr(asked, each.name), each.default, found)


def _at(options: Options, section: str, key: str) -> Any:
    value = getattr(options, section)
    return getattr(value, key) if key else value


def _setting(name: str, value: Any, default: Any, became: Any) -> Setting:
    value, default, became = _plain(value), _plain(default), _plain(became)
    return Setting(name, value, default, None if became == value else became)


def _became(parts: Parts) -> dict[str, Any]:
    """Return what the engine has made of keywords that leave something to it."""
    policy, node = parts.policy, parts.axes.node
    made = {
        "release": policy.release,
        "reduce": policy.reduce,
        "reduce_scatter": parts.axes.shard().algorithm,
        "communicators": parts.mesh.communicators,
        "second_shard": None if node is None else node.size,
        "schedule": None if parts.pipeline is None else parts.schedule.name,
        "optimizer": _described(parts.optimizer.torch),
        "clip_norm": parts.optimizer.clip_norm,
        "sp_mixers": None if parts.sequence is None else parts.sequence.mixers,
    }
    scheduler = parts.stepper.scheduler
    return made | {"scheduler": None if scheduler is None else type(scheduler).__name__}


def _described(optimizer: Optimizer) -> str:
    """Return an optimizer's name with the options of its first group."""
    group = optimizer.param_groups[0]
    options = {name: _plain(group[name]) for name in optimizer.defaults if name in group}
    told = (f"{name}={_number(value)}" for name, value in options.items() if value is not None and value is not False)
    return f"{type(optimizer).__name__}({', '.join(told)})"


def _number(value: Any) -> Any:
    return f"{value:g}" if isinstance(value, float) else value


def _plain(value: Any) -> Any:
    """Return a value as JSON has it; of functions, classes and objects a name."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, torch.Tensor):
        return "a tensor"  # not read: that would wait for the device
    if isinstance(value, Precision):
        return value.name
    if isinstance(row := getattr(value, "row", None), OptimizerRow):
        return row.name
    if isinstance(value, partial):
        return _plain(value.func)
    name = getattr(value, "__qualname__", type(value).__qualname__).rpartition("<locals>.")[2]
    return "a function" if name == "<lambda>" else name


# --- versions -----------------------------------------------------------------------------------


def _versions(parts: Parts) -> dict[str, str]:
    device = parts.mesh.device
    module = None if device.type == "cpu" else torch.get_device_module(device)
    on = f"cpu, kernels for {capability()}" if module is None else f"{device}, {module.get_device_name(device)}"
    imported = {name: sys.modules[name] for name in ("zero3d", "torch", "transformers") if name in sys.modules}
    found = {name: str(each.__version__) for name, each in imported.items()}
    backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else "none"
    return found | {"Python": platform.python_version(), "backend": str(backend), "device": on}
