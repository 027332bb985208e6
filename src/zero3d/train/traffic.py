"""The bytes that a run sent beside what the formulas say, by axis and operation, unit by unit.

rows                                        formula
------------------------------------------  ----------------------------------------------------------------
all_gather, reduce_scatter, exchange        step_traffic x steps (exact: all_to_all for reduce_scatter)
all_reduce                                  the same: sums over copies of shards, where mesh.shard makes such
send_forward (pp), send_backward (pp)       pipeline_traffic x steps
trade (pp)                                  gradients of tied parameters, once a step
all_reduce (tp), all_gather (tp), ...       tensor_traffic of all tokens trained on
pass_rows (dp), pass_rows (tp)              of Muon's matrices to their owners and back (optim/owners.py)
pass_rows (ep), exchange (ep)               expert_traffic of all rows that routers sent to other ranks' experts
pass_rows (sp), exchange (sp)               rows for others' heads and back, by the attentions' calls; losses of rows
exchange (pp), (tp) or (replica)            weight, norms and loss of a model-parallel group; partial
                                            gradients, once a step

Evaluations and checkpoints are taken out on both sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from zero3d.account.traffic import Levels, Moved, Sent, step_traffic
from zero3d.distributed.degrees import DATA
from zero3d.engine.engine import Engine
from zero3d.expert_parallel.traffic import Passed, expert_traffic
from zero3d.tensor_parallel.traffic import partial_traffic, tensor_traffic
from zero3d.zero.tokens import count_gathers

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
        self._dispatches, self._sequence = engine.experts.dispatches, engine.sequence
        self._excluded: Counter[tuple[str, str, str, str]] = Counter()
        self._begun, self._last = self._all_passed(), 0
        self._called = None if self._sequence is None else self._sequence.calls
        engine.traffic.reset()
        engine.gathers.events = []

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Leave what is moved inside out of the count: it is no training."""
        before, passed = self._rows(), self._all_passed()
        called = None if self._sequence is None else self._sequence.calls
        yield
        if self._sequence is not None and self._called is not None and called is not None:
            self._called = self._called.plus(self._sequence.calls.less(called))
        for name, now in self._all_passed().items():
            self._begun[name] = self._begun[name].plus(now.plus(passed[name], -1))
        self._excluded.update({key: figure - before[key] for key, figure in self._rows().items()})

    def _all_passed(self) -> dict[str, Passed]:
        return {name: dispatch.passed for name, dispatch in self._dispatches.items()}

    @property
    def passed(self) -> dict[str, Passed]:
        """What training's expert layers have sent to other ranks."""
        return {name: now.plus(self._begun[name], -1) for name, now in self._all_passed().items()}

    @property
    def sequence(self) -> list[Sent]:
        """Return what training has sent between ranks that share sequences, by formula."""
        if self._sequence is None or self._called is None:
            return []
        return list(self._sequence.traffic(self._sequence.calls.less(self._called)))

    def last_step(self) -> int:
        """Return bytes since this was called last."""
        if self._tokens.events is not None:
            self.gathers, self._tokens.events = count_gathers(self._tokens.events), None
        total = sum(entry.moved.bytes for entry in self.entries())
        self._last, last = total, self._last
        return total - last

    def entries(self) -> list[Sent]:
        """Return training's traffic by axis, operation and unit."""
        training = self._rows() - self._excluded
        names = dict.fromkeys(key[:3] for key in training)
        return [Sent(*key, Moved(*(training[*key, f] for f in Moved._fields))) for key in names]

    def _rows(self) -> Counter[tuple[str, str, str, str]]:
        rows: Counter[tuple[str, str, str, str]] = Counter()
        for entry in self._ledger:
            for name in Moved._fields:
                rows[entry.axis, entry.op, entry.unit, name] += getattr(entry, name)
        return rows


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
    entries = traffic.entries()
    planned = list(planned_traffic(engine, traffic.gathers, counts))
    if engine.second_shard_ranks > 1:
        planned = list(_over_node(engine, planned, entries, traffic.gathers, counts.steps))
    if counts.steps:
        planned += planned_pipeline(engine, counts)
        planned += planned_tensor(engine, counts)
        planned += planned_model_group(engine, counts.steps)
        planned += planned_experts(engine, traffic.passed)
        planned += traffic.sequence
        planned += planned_features(engine, counts.applied)
    formula, measured = by_operation(planned), by_operation(entries)
    return [
        TrafficRow(op, Moved.total(units.values()), Moved.total(actual.values()), actual == units)
        for op in formula | measured
        for units, actual in [(formula.get(op, {}), measured.get(op, {}))]
    ]


def by_operation(rows: Iterable[Sent]) -> dict[str, dict[str, Moved]]:
    """Add rows up, by operation (with its axis, but for those of the data) and unit."""
    found: dict[str, dict[str, Moved]] = {}
    for axis, op, unit, moved in rows:
        units = found.setdefault(op if axis in DATA else f"{op} ({axis})", {})
        units[unit] = Moved.total([units.get(unit, Moved()), moved])
    return found


def planned_traffic(engine: Engine, gathers: Mapping[str, int], counts: SessionCounts) -> Iterator[Sent]:
    """Yield what the data axis sends: step_traffic times steps, each mean loss, once the order of reductions.

    A skipped step (fp16 overflow) updates nothing, so stages 1 and 2 gather nothing after it.
    """
    n = engine.dp.size
    if n == 1:
        return
    policy, ranks, units = engine.policy, engine.blueprint.ranks, engine.traffic_units
    levels, exact = Levels(ranks.shard.size, ranks.copies.size), policy.exact
    step = step_traffic(
        policy.row.number, units, levels, gathers, counts.micro_batches, policy.reduce, exact, engine.experts.anywhere
    )
    more = LOSS_VALUES * (n - 1) * (counts.micro_batches if exact else 1)
    more += engine.expert_load.values * (n - 1)  # of experts' tokens, with the norm
    step["exchange", "-"] = Moved.total([step["exchange", "-"], Moved(1, more, 8 * more)])
    for (op, unit), moved in step.items():
        every = op != "all_gather" or policy.row.shards_parameters or not policy.row.shards_optimizer
        yield Sent("dp", op, unit, moved.times(counts.steps if every else counts.applied))
    trainable = sum(unit.trainable for unit in units)
    yield Sent("dp", "broadcast", "-", Moved(1, trainable, 8 * trainable))


def _over_node(
    engine: Engine, planned: Iterable[Sent], entries: Iterable[Sent], gathers: Mapping[str, int], steps: int
) -> Iterator[Sent]:
    """Yield planned rows with gathers as second shards share them out between all ranks and neighbours.

    A gather is over all ranks where weights have changed since the last one, which evaluations make, too, and skipped
    steps do not: how many are is as measured, and what they and all others send by formula.
    """
    over = engine.mesh.degrees.group("shard")
    crossed = {row.unit: row.moved.calls for row in entries if (row.axis, row.op) == (over, "all_gather")}
    units = [unit for unit in engine.traffic_units if unit.node > 1]
    names = {unit.name for unit in units}
    yield from (row for row in planned if row.op != "all_gather" or row.unit not in names)
    for unit in units:
        elements, width = unit.as_gathered
        across = crossed.get(unit.name, 0)
        for axis, ranks, calls in (
            (over, engine.mesh.shard, across),
            ("node", unit.node, gathers.get(unit.name, 0) * steps - across),
        ):
            if calls:
                sent = calls * (elements * (ranks - 1) // ranks)
                yield Sent(axis, "all_gather", unit.name, Moved(calls, sent, sent * width))


def planned_pipeline(engine: Engine, counts: SessionCounts) -> Iterator[Sent]:
    """Yield what the pp axis sends: hidden states of a chunk, gradients of tied units."""
    if engine.pipeline is None:
        return
    for (op, part), moved in engine.pipeline.traffic(counts.micro_batches).items():
        yield Sent("pp", op, part, moved.times(counts.steps))
    for unit in engine.model_group.traded:
        shard = unit.gradients.shard
        moved = Moved(1, shard.numel(), shard.numel() * shard.element_size())
        yield Sent("pp", "trade", unit.name, moved.times(counts.steps))


def planned_tensor(engine: Engine, counts: SessionCounts) -> Iterator[Sent]:
    """Yield what the tp axis sends for a module: activations and their gradients."""
    width, micro_batches = engine.precision.dtype.itemsize, counts.steps * counts.micro_batches
    sent = tensor_traffic(engine.regions, counts.tokens, micro_batches, engine.mesh.tp, width)
    for (op, module), moved in sent.items():
        yield Sent("tp", op, module, moved)


def planned_experts(engine: Engine, passed: Mapping[str, Passed]) -> Iterator[Sent]:
    """Yield what the ep axis sends: a layer's rows, results and their gradients; the counts of all layers."""
    for name, dispatch in engine.experts.dispatches.items() if engine.mesh.ep > 1 else ():
        width = engine.precision.dtype.itemsize
        sent = expert_traffic(passed[name], dispatch.hidden, width, dispatch.layer.experts, engine.mesh.ep)
        yield Sent("ep", "pass_rows", name, sent["pass_rows"])
        yield Sent("ep", "exchange", "-", sent["exchange"])


def planned_features(engine: Engine, steps: int) -> Iterator[Sent]:
    """Yield what features send in applied steps, as Muon pieces of matrices."""
    for row in (row for feature in engine.features for row in feature.traffic()):
        yield row._replace(moved=row.moved.times(steps))


def planned_model_group(engine: Engine, steps: int) -> Iterator[Sent]:
    """Yield what the ranks of a model-parallel group agree on, and partial gradients, exchanged over tp.

    A step exchanges the weight with the verdict on orders, the norms and the mean loss, all float64; the first
    one also their places.
    """
    group, mesh = engine.model_group, engine.mesh
    if not group.alone:
        with_norms = steps if group.has_norms else 0
        values = steps * (2 + LOSS_VALUES) + with_norms * group.longest + 1 + group.longest
        values *= mesh.pp * mesh.tp - 1
        agreed = Moved(2 * steps + with_norms + 2, values, 8 * values)
        yield Sent(mesh.model_parallel.name, "exchange", "-", agreed)
    if group.summed:
        partial = partial_traffic(group.summed, mesh.tp, engine.policy.master.itemsize)
        yield Sent("tp", "exchange", "-", partial.times(steps))
