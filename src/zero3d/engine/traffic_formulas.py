"""The bytes that an engine sends by formula, by axis, operation and unit: in a step, and in a session of them.

rows                                        formula
------------------------------------------  ----------------------------------------------------------------
all_gather, reduce_scatter, exchange        step_traffic x steps (exact: all_to_all for reduce_scatter)
all_gather of a tower's units               as often as they were gathered: that depends on which steps had images
all_reduce                                  the same: sums over copies of shards, where mesh.shard makes such
send_forward (pp), send_backward (pp)       pipeline_traffic x steps
trade (pp)                                  gradients of tied parameters, once a step
all_reduce (tp), all_gather (tp), ...       tensor_traffic of all tokens trained on
pass_rows (dp), pass_rows (tp)              of Muon's matrices to their owners and back (optim/owners.py)
pass_rows (ep), exchange (ep)               expert_traffic of all rows that routers sent to other ranks' experts
pass_rows (sp), exchange (sp)               rows for others' heads and back, by the attentions' calls; losses of rows
exchange (pp), (tp) or (replica)            weight, norms and loss of a model-parallel group; partial
                                            gradients, once a step
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from zero3d.account.traffic import Levels, Moved, Sent, step_traffic
from zero3d.distributed.ledger import Ledger
from zero3d.engine.expert_bias import ExpertBias
from zero3d.engine.features import required
from zero3d.engine.parts import Parts
from zero3d.expert_parallel.traffic import Passed, expert_traffic
from zero3d.models.bases import sees_images
from zero3d.models.images import tower_parameters
from zero3d.sequence.group import Calls
from zero3d.tensor_parallel.traffic import partial_traffic, tensor_traffic
from zero3d.zero.tokens import count_gathers

LOSS_VALUES = 2  # of train_batch's exchange: sum of losses, sum of weights


class SessionCounts(NamedTuple):
    """Counts a session: steps applied and skipped, of so many micro-batches each; tokens this rank trained on."""

    applied: int
    skipped: int
    micro_batches: int
    tokens: int

    @property
    def steps(self) -> int:
        return self.applied + self.skipped


class Routed(NamedTuple):
    """Counts what routers and attentions have made an engine send, on which the formulas of both depend.

    passed  rows of each expert layer
    calls   of attentions over sp; None where no sequence is shared out
    """

    passed: Mapping[str, Passed]
    calls: Calls | None

    def less(self, before: Routed) -> Routed:
        """Return what has come since then."""
        calls = None if self.calls is None or before.calls is None else self.calls.less(before.calls)
        return Routed({name: now.plus(before.passed[name], -1) for name, now in self.passed.items()}, calls)

    def plus(self, more: Routed) -> Routed:
        """Return the sum."""
        calls = None if self.calls is None or more.calls is None else self.calls.plus(more.calls)
        return Routed({name: now.plus(more.passed[name]) for name, now in self.passed.items()}, calls)


class TrafficFormulas:
    """Says what an engine sends by formula: `of_a_step` in one, `of_session` in many.

    gathers  of each unit in a step, once `end_count` has ended what `begin_count` began; None before
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self.gathers: Mapping[str, int] | None = None

    @property
    def routed(self) -> Routed:
        """Rows that this rank has passed to experts so far, and calls of attentions over shared sequences."""
        dispatches, sequence = self._parts.partition.experts.dispatches, self._parts.sequence
        passed = {name: dispatch.passed for name, dispatch in dispatches.items()}
        return Routed(passed, None if sequence is None else sequence.calls)

    def begin_count(self) -> None:
        """Begin to count the gathers of a step."""
        self._parts.gathers.events = []

    def end_count(self) -> None:
        """End the count behind that step; repeating it is harmless."""
        gathers = self._parts.gathers
        if gathers.events is not None:
            self.gathers, gathers.events = count_gathers(gathers.events), None

    def of_a_step(self, micro_batches: int, ledger: Ledger) -> dict[tuple[str, str], Moved] | None:
        """Return what the data axis sends in one applied step, by operation and unit.

        Gathers are as often as they were counted in a step, else as the ledger has them in whole steps. None where
        neither tells, and where second shards are kept: their gathers depend on when weights changed.
        """
        parts = self._parts
        if parts.axes.dp.size == 1:
            return {}
        second = parts.axes.node is not None
        gathers = self.gathers if self.gathers is not None else gathers_in(ledger, parts, micro_batches)
        return None if second or gathers is None else _of_a_step(parts, gathers, micro_batches)

    def of_session(self, counts: SessionCounts, sent: Sequence[Sent], routed: Routed) -> list[Sent]:
        """Return what all axes have sent in a session.

        sent    as the ledger has it: how often second shards were gathered anew, and units of towers at all
        routed  in it
        """
        parts, gathers = self._parts, self.gathers or {}
        planned = list(_with_towers(parts, planned_traffic(parts, gathers, counts), sent))
        if parts.axes.node is not None:
            planned = list(_over_node(parts, planned, sent, gathers, counts.steps))
        if counts.steps:
            planned += planned_pipeline(parts, counts)
            planned += planned_tensor(parts, counts)
            planned += planned_model_group(parts, counts.steps)
            planned += planned_experts(parts, routed.passed)
            if parts.sequence is not None and routed.calls is not None:
                planned += parts.sequence.traffic(routed.calls)
            planned += planned_features(parts, counts.applied)
        return planned


def gathers_in(ledger: Ledger, parts: Parts, micro_batches: int) -> Mapping[str, int] | None:
    """Return how often a step gathers each unit, by a ledger of whole steps; None where it has others, too."""
    policy = parts.policy
    if not policy.row.shards_parameters:
        return {}
    reduced = [entry.calls for entry in ledger if entry.op in ("reduce_scatter", "all_to_all")]
    steps, rest = divmod(max(reduced, default=0), micro_batches if policy.often else 1)
    gathered = {entry.unit: entry.calls for entry in ledger if entry.op == "all_gather" and entry.axis != "tp"}
    if not steps or rest or any(calls % steps for calls in gathered.values()):
        return None
    return {unit: calls // steps for unit, calls in gathered.items()}


def _of_a_step(parts: Parts, gathers: Mapping[str, int], micro_batches: int) -> dict[tuple[str, str], Moved]:
    policy, ranks = parts.policy, parts.blueprint.ranks
    levels, experts = Levels(ranks.shard.size, ranks.copies.size), parts.partition.experts.anywhere
    units, stage = parts.accounts.traffic_units, policy.row.number
    return step_traffic(stage, units, levels, gathers, micro_batches, policy.reduce, policy.exact, experts)


def planned_traffic(parts: Parts, gathers: Mapping[str, int], counts: SessionCounts) -> Iterator[Sent]:
    """Yield what the data axis sends: step_traffic times steps, each mean loss, once the order of reductions.

    A skipped step (fp16 overflow) updates nothing, so stages 1 and 2 gather nothing after it.
    """
    n = parts.axes.dp.size
    if n == 1:
        return
    policy, exact = parts.policy, parts.policy.exact
    step = _of_a_step(parts, gathers, counts.micro_batches)
    more = LOSS_VALUES * (n - 1) * (counts.micro_batches if exact else 1)
    more += required(parts.features, ExpertBias).load.values * (n - 1)  # of experts' tokens, with the norm
    step["exchange", "-"] = Moved.total([step["exchange", "-"], Moved(1, more, 8 * more)])
    for (op, unit), moved in step.items():
        every = op != "all_gather" or policy.row.shards_parameters or not policy.row.shards_optimizer
        yield Sent("dp", op, unit, moved.times(counts.steps if every else counts.applied))
    trainable = sum(unit.trainable for unit in parts.accounts.traffic_units)
    yield Sent("dp", "broadcast", "-", Moved(1, trainable, 8 * trainable))


def _of_towers(parts: Parts) -> frozenset[str]:
    """Return the names of units that are gathered as often as images make their tower run."""
    if parts.blanks is None:
        return frozenset()
    roots = [root for root in parts.partition.chunks.values() if sees_images(root)]
    tower = {p for root in roots for p in tower_parameters(root)}
    return frozenset(unit.name for unit in parts.units if not tower.isdisjoint(unit.weights.params))


def _with_towers(parts: Parts, planned: Iterable[Sent], entries: Iterable[Sent]) -> Iterator[Sent]:
    """Yield planned rows; gathers of a tower's units as often as they were made, each with the bytes of the formula."""
    names, ranks = _of_towers(parts), parts.blueprint.ranks.shard.size
    yield from (row for row in planned if row.op != "all_gather" or row.unit not in names)
    gathered = {row.unit: row.moved.calls for row in entries if row.op == "all_gather" and row.unit in names}
    for unit in parts.accounts.traffic_units:
        if calls := gathered.get(unit.name, 0):
            elements, width = unit.as_gathered
            sent = calls * (elements * (ranks - 1) // ranks)
            yield Sent("dp", "all_gather", unit.name, Moved(calls, sent, sent * width))


def _over_node(
    parts: Parts, planned: Iterable[Sent], entries: Iterable[Sent], gathers: Mapping[str, int], steps: int
) -> Iterator[Sent]:
    """Yield planned rows with gathers as second shards share them out between all ranks and neighbours.

    A gather is over all ranks if weights have changed since the last one. Evaluations gather too, and skipped steps
    change no weights: so the number of such gathers is the measured one, and the bytes of all gathers follow the
    formula. Units of towers are gathered as often as images made them run: so all of theirs are measured.
    """
    over, towers = parts.mesh.degrees.group("shard"), _of_towers(parts)
    entries = list(entries)
    near = {row.unit: row.moved.calls for row in entries if (row.axis, row.op) == ("node", "all_gather")}
    crossed = {row.unit: row.moved.calls for row in entries if (row.axis, row.op) == (over, "all_gather")}
    units = [unit for unit in parts.accounts.traffic_units if unit.node > 1]
    names = {unit.name for unit in units}
    yield from (row for row in planned if row.op != "all_gather" or row.unit not in names)
    for unit in units:
        elements, width = unit.as_gathered
        across = crossed.get(unit.name, 0)
        within = near.get(unit.name, 0) if unit.name in towers else gathers.get(unit.name, 0) * steps - across
        for axis, ranks, calls in ((over, parts.mesh.shard, across), ("node", unit.node, within)):
            if calls:
                sent = calls * (elements * (ranks - 1) // ranks)
                yield Sent(axis, "all_gather", unit.name, Moved(calls, sent, sent * width))


def planned_pipeline(parts: Parts, counts: SessionCounts) -> Iterator[Sent]:
    """Yield what the pp axis sends: hidden states of a chunk, gradients of tied units."""
    if parts.pipeline is None:
        return
    for (op, part), moved in parts.pipeline.traffic(counts.micro_batches).items():
        yield Sent("pp", op, part, moved.times(counts.steps))
    for unit in parts.model_group.traded:
        shard = unit.gradients.shard
        moved = Moved(1, shard.numel(), shard.numel() * shard.element_size())
        yield Sent("pp", "trade", unit.name, moved.times(counts.steps))


def planned_tensor(parts: Parts, counts: SessionCounts) -> Iterator[Sent]:
    """Yield what the tp axis sends for a module: activations and their gradients."""
    width, micro_batches = parts.precision.dtype.itemsize, counts.steps * counts.micro_batches
    sent = tensor_traffic(parts.partition.regions, counts.tokens, micro_batches, parts.mesh.tp, width)
    for (op, module), moved in sent.items():
        yield Sent("tp", op, module, moved)


def planned_experts(parts: Parts, passed: Mapping[str, Passed]) -> Iterator[Sent]:
    """Yield what the ep axis sends: a layer's rows, results and their gradients; the counts of all layers."""
    for name, dispatch in parts.partition.experts.dispatches.items() if parts.mesh.ep > 1 else ():
        width = parts.precision.dtype.itemsize
        sent = expert_traffic(passed[name], dispatch.hidden, width, dispatch.layer.experts, parts.mesh.ep)
        yield Sent("ep", "pass_rows", name, sent["pass_rows"])
        yield Sent("ep", "exchange", "-", sent["exchange"])


def planned_features(parts: Parts, steps: int) -> Iterator[Sent]:
    """Yield what features send in applied steps, as Muon pieces of matrices."""
    for row in (row for feature in parts.features for row in feature.traffic()):
        yield row._replace(moved=row.moved.times(steps))


def planned_model_group(parts: Parts, steps: int) -> Iterator[Sent]:
    """Yield what the ranks of a model-parallel group agree on, and partial gradients, exchanged over tp.

    A step exchanges the weight with the verdict on orders, the norms and the mean loss, all float64; the first
    one also their places.
    """
    group, mesh = parts.model_group, parts.mesh
    if not group.alone:
        with_norms = steps if group.has_norms else 0
        values = steps * (2 + LOSS_VALUES) + with_norms * group.longest + 1 + group.longest
        values *= mesh.pp * mesh.tp - 1
        agreed = Moved(2 * steps + with_norms + 2, values, 8 * values)
        yield Sent(mesh.model_parallel.name, "exchange", "-", agreed)
    if group.summed:
        partial = partial_traffic(group.summed, mesh.tp, parts.policy.master.itemsize)
        yield Sent("tp", "exchange", "-", partial.times(steps))
