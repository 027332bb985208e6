"""The bytes that a run sent beside what the formulas say, by axis and operation, unit by unit.

rows                                        formula
------------------------------------------  ----------------------------------------------------------------
all_gather, reduce_scatter, exchange        step_traffic x steps (exact: all_to_all for reduce_scatter)
send_forward (pp), send_backward (pp)       pipeline_traffic x steps
trade (pp)                                  gradients of tied parameters, once a step
all_reduce (tp), all_gather (tp), ...       tensor_traffic of all tokens trained on
pass_rows (dp), pass_rows (tp)              of Muon's matrices to their owners and back (optim/owners.py)
pass_rows (ep), exchange (ep)               expert_traffic of all rows that routers sent to other ranks' experts
exchange (pp), (tp) or (replica)            weight, norms and loss of a model-parallel group; partial
                                            gradients, once a step

Evaluations and checkpoints are taken out on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from zero3d.engine.engine import Engine
from zero3d.expert_parallel.traffic import Passed, expert_traffic
from zero3d.tensor_parallel.traffic import tensor_traffic
from zero3d.zero.traffic import Moved, count_gathers, step_traffic

NOTHING = Moved(0, 0, 0)
LOSS_VALUES = 2  # of train_batch's exchange: sum of losses, sum of weights


class TrafficRow(NamedTuple):
    """Holds what one operation sent on one rank in the whole run; `equal` compares unit by unit."""

    op: str
    formula: Moved
    measured: Moved
    equal: bool


class TrainingTraffic:
    """Counts what training moved in the ledger: evaluations and checkpoints are taken out.

    gathers  parameter gathers per unit and step, from the tokens of the first step
    """

    def __init__(self, engine: Engine) -> None:
        self.gathers: Mapping[str, int] = {}
        self._ledger, self._tokens = engine.traffic, engine.gathers
        self._dispatches = engine.experts.dispatches
        self._excluded: Counter[tuple[str, str, str, str]] = Counter()
        self._begun, self._last = self._all_passed(), 0
        engine.traffic.reset()
        engine.gathers.events = []

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave what is moved inside out of the count: it is no training."""
        before, passed = self._rows(), self._all_passed()
        yield
        for name, now in self._all_passed().items():
            self._begun[name] = self._begun[name].plus(now.plus(passed[name], -1))
        self._excluded.update({key: figure - before[key] for key, figure in self._rows().items()})

    def _all_passed(self) -> dict[str, Passed]:
        return {name: dispatch.passed for name, dispatch in self._dispatches.items()}

    @property
    def passed(self) -> dict[str, Passed]:
        """What training's expert layers have sent to other ranks."""
        return {name: now.plus(self._begun[name], -1) for name, now in self._all_passed().items()}

    def last_step(self) -> int:
        """Return bytes since this was called last."""
        if self._tokens.events is not None:
            self.gathers, self._tokens.events = count_gathers(self._tokens.events), None
        total = sum(entry.moved.bytes for entry in self.entries())
        self._last, last = total, self._last
        return total - last

    def entries(self) -> list[LedgerRow]:
        """Return training's traffic by axis, operation and unit."""
        training = self._rows() - self._excluded
        names = dict.fromkeys(key[:3] for key in training)
        return [LedgerRow(*key, Moved(*(training[*key, f] for f in Moved._fields))) for key in names]

    def _rows(self) -> Counter[tuple[str, str, str, str]]:
        rows: Counter[tuple[str, str, str, str]] = Counter()
        for entry in self._ledger:
            for name in Moved._fields:
                rows[entry.axis, entry.op, entry.unit, name] += getattr(entry, name)
        return rows


class LedgerRow(NamedTuple):
    """Holds what one operation moved on one unit."""

    axis: str
    op: str
    unit: str
    moved: Moved


class SessionCounts(NamedTuple):
    """Counts a session: steps applied and skipped, of so many micro-batches each; tokens this rank trained on."""

    applied: int
    skipped: int
    micro_batches: int
    tokens: int

    @property
    def steps(self) -> int:
        return self.applied + self.skipped


def traffic_rows(engine: Engine, traffic: TrainingTraffic, counts: SessionCounts) -> list[TrafficRow]:
    """Return measured and planned traffic of the whole session, per operation."""
    measured = {(_on(entry.axis, entry.op), entry.unit): entry.moved for entry in traffic.entries()}
    planned = planned_traffic(engine, traffic.gathers, counts)
    if counts.steps:
        planned |= (
            planned_pipeline(engine, counts)
            | planned_tensor(engine, counts)
            | planned_model_group(engine, counts.steps)
            | planned_experts(engine, traffic.passed)
            | planned_features(engine, counts.applied)
        )
    rows = []
    for op in dict.fromkeys(op for op, _ in [*planned, *measured]):
        actual = {unit: moved for (kind, unit), moved in measured.items() if kind == op}
        formula = {unit: moved for (kind, unit), moved in planned.items() if kind == op}
        rows.append(TrafficRow(op, _total(formula.values()), _total(actual.values()), actual == formula))
    return rows


def planned_traffic(engine: Engine, gathers: Mapping[str, int], counts: SessionCounts) -> dict[tuple[str, str], Moved]:
    """Return by (operation, unit): step_traffic times steps, each mean loss, once the order of reductions.

    A skipped step (fp16 overflow) updates nothing, so stages 1 and 2 gather nothing after it.
    """
    n = engine.dp.size
    if n == 1:
        return {}
    policy, units = engine.policy, engine.traffic_units
    exact = engine.summands is not None
    step = step_traffic(
        engine.stage, units, n, gathers, counts.micro_batches, policy.reduce, exact, engine.experts.anywhere
    )
    calls, values, size = step["exchange", "-"]
    more = LOSS_VALUES * (n - 1) * (counts.micro_batches if exact else 1)
    more += engine.expert_load.values * (n - 1)  # of experts' tokens, with the norm
    step["exchange", "-"] = Moved(calls + 1, values + more, size + 8 * more)
    planned = {}
    for (op, unit), moved in step.items():
        every = op != "all_gather" or policy.stage.shards_parameters or not policy.stage.shards_optimizer
        steps = counts.steps if every else counts.applied
        planned[op, unit] = Moved(*(steps * figure for figure in moved))
    trainable = sum(unit.trainable for unit in units)
    planned["broadcast", "-"] = Moved(1, trainable, 8 * trainable)
    return planned


def planned_pipeline(engine: Engine, counts: SessionCounts) -> dict[tuple[str, str], Moved]:
    """Return by (operation, chunk or unit) on the pp axis: hidden states and tied gradients."""
    if engine.pipeline is None:
        return {}
    step = engine.pipeline.traffic(counts.micro_batches)
    for unit in engine.model_group.traded:
        shard = unit.gradients.shard
        step["trade", unit.name] = Moved(1, shard.numel(), shard.numel() * shard.element_size())
    return {
        (_on("pp", op), unit): Moved(*(counts.steps * figure for figure in moved)) for (op, unit), moved in step.items()
    }


def planned_tensor(engine: Engine, counts: SessionCounts) -> dict[tuple[str, str], Moved]:
    """Return by (operation, module) on the tp axis: activations and their gradients."""
    width, micro_batches = engine.precision.dtype.itemsize, counts.steps * counts.micro_batches
    moved = tensor_traffic(engine.regions, counts.tokens, micro_batches, engine.mesh.tp, width)
    return {(_on("tp", op), module): figures for (op, module), figures in moved.items()}


def planned_experts(engine: Engine, passed: Mapping[str, Passed]) -> dict[tuple[str, str], Moved]:
    """Return by (operation, layer) on the ep axis: rows, results and their gradients; the counts of all layers."""
    planned: dict[tuple[str, str], Moved] = {}
    for name, dispatch in engine.experts.dispatches.items() if engine.mesh.ep > 1 else ():
        width = engine.precision.dtype.itemsize
        moved = expert_traffic(passed[name], dispatch.hidden, width, dispatch.layer.experts, engine.mesh.ep)
        planned[_on("ep", "pass_rows"), name] = moved["pass_rows"]
        before = planned.get((_on("ep", "exchange"), "-"), NOTHING)
        planned[_on("ep", "exchange"), "-"] = Moved(*map(sum, zip(before, moved["exchange"], strict=True)))
    return planned


def planned_features(engine: Engine, steps: int) -> dict[tuple[str, str], Moved]:
    """Return by (operation, unit): what features send in applied steps, as Muon pieces of matrices."""
    planned: dict[tuple[str, str], Moved] = {}
    moved = [each for feature in engine.features for each in feature.traffic().items()]
    for (axis, op, unit), figures in moved:
        before = planned.get((_on(axis, op), unit), NOTHING)
        planned[_on(axis, op), unit] = Moved(*(a + steps * b for a, b in zip(before, figures, strict=True)))
    return planned


def planned_model_group(engine: Engine, steps: int) -> dict[tuple[str, str], Moved]:
    """Return by (operation, "-"): what the ranks of a model-parallel group agree on.

    A step exchanges the weight with the verdict on orders, the norms and the mean loss, all float64; the first
    one also their places. Partial gradients are exchanged over tp.
    """
    group, mesh = engine.model_group, engine.mesh
    planned: dict[tuple[str, str], Moved] = {}
    if not group.alone:
        with_norms = steps if group.has_norms else 0
        values = steps * (2 + LOSS_VALUES) + with_norms * group.longest + 1 + group.longest
        values *= mesh.pp * mesh.tp - 1
        planned[_on(mesh.model_parallel.name, "exchange"), "-"] = Moved(2 * steps + with_norms + 2, values, 8 * values)
    if group.summed:
        values = steps * group.summed * (mesh.tp - 1)
        before = planned.get((_on("tp", "exchange"), "-"), NOTHING)
        added = Moved(steps, values, values * engine.policy.master.itemsize)
        planned[_on("tp", "exchange"), "-"] = Moved(*map(sum, zip(before, added, strict=True)))
    return planned


def _on(axis: str, op: str) -> str:
    return op if axis in ("dp", "edp") else f"{op} ({axis})"


def _total(moved: Iterable[Moved]) -> Moved:
    return Moved(*(sum(figures) for figures in zip(NOTHING, *moved, strict=True)))
