"""The plan search: every way to train a model on a cluster that the planner prices, the best of them first.

    dimension          values                                                          left out where
    -----------------  --------------------------------------------------------------  -------------------------
    tp                 numbers that divide heads, key-value heads and every cut size   more than a node has
    pp                 divisors of ranks / tp                                          more chunks than blocks, no chain
    dp                 ranks / (tp x pp)                                               it divides no batch
    ep                 divisors of dp that divide a layer's experts                    no experts, sequence parallel,
                                                                                       backwards in two parts
    sp                 divisors of dp, tp x sp up to the heads                         short sequences,
                                                                                       sequence parallel
    shard              all of dp, its ranks on a node                                  one node, stage 0
    ZeRO stage         0, 1, 2, 3                                                      dp = 1: all are stage 0
    micro-batch        powers of two that divide a rank's sequences                    above one that does not fit
    recomputation      none, selective, full
    sequence parallel  off, on                                                         tp = 1, the length not whole
    schedule           1f1b, interleaved, zero-bubble                                  pp = 1
    reduce_scatter     auto, or what the links' formulas call faster than it           dp = 1
    sp_mixers          the same                                                        sp = 1, no recurrences
    in a pipeline      stage 2 reduces every micro-batch, 3 also releases every use    (by default they are as 1)
    off the device     inputs of recomputed blocks on the host                         short sequences
                       optimizer states on the host or a disk, at stage 3 weights, too what is not asked for
    gradients          where states leave: on the device, on the host at stages 2, 3

Memory decides first: it grows with the micro-batch, so the first that does not fit ends its row. What fits is
timed by `evaluate`. Every rejected plan is counted under the reason, with the one that was nearest. What fits, and
lacks bytes of the margin beyond it, is a row behind all others: it says how many (`Row.lacks`).

States leave the device where nothing fits otherwise, for the host before a disk; or as far as the caller says. So do
the inputs of recomputed blocks of long sequences, before them. The loss of long sequences is computed tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby, product
from math import inf
from typing import Any, NamedTuple

from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import AUTO, Offload
from zero3d.spec.optimizer import ADAMW
from zero3d.spec.tiers import ACTIVATIONS as INPUTS, GRADIENTS, HOST, OPTIMIZER, PARAMS, TIERS, tiers_of
from zero3d.spec.zero import Zero
from zero3d.tools.plan.footprint import tiles_loss
from zero3d.tools.plan.margin import Margin, margin_for, usable
from zero3d.tools.plan.sequence import masks_fit, sp_refused
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, Memory, ModelSpec, ParallelPlan
from zero3d.tools.plan.time import faster_mixers, faster_reduction

Tiers = tuple[Offload, ...]
GOALS = ("fastest", "fewest-gpus", "largest-batch")
OFFLOADS = ("auto", "none", *tiers_of(OPTIMIZER))
NEAR: Tiers = (Offload(),)
LONG = 16384  # tokens of a sequence from which it may be cut over sp
DEVICE_MEMORY = "the GPU's memory"
ACTIVATIONS = ("none", "selective", "full")
PIPELINES = ("1f1b", "interleaved", "zero-bubble")
AtLeast = Callable[[ModelSpec, ClusterSpec, ParallelPlan, float], float]


def _rounds() -> dict[str, tuple[Tiers, ...]]:
    """Return, by how far states may go, what is tried in turn: each if those before it have found nothing.

    Weights leave the device for no tier beyond that of the states.
    """
    names, turns = list(TIERS), [NEAR]
    up_to = {"none": NEAR}
    for tier in tiers_of(OPTIMIZER):
        near = [name for name in tiers_of(PARAMS) if names.index(name) <= names.index(tier)]
        turns.append(tuple(Offload(tier, name, to) for to in (AUTO, *tiers_of(GRADIENTS)) for name in ("none", *near)))
        up_to[tier] = sum(turns, ())
    return {"auto": tuple(turns), **{tier: (all_,) for tier, all_ in up_to.items()}}


ROUNDS = _rounds()


class Row(NamedTuple):
    """A plan that fits, what it needs, and why it stands where it does.

    lacks  bytes of the margin for which there is no room; 0 where it fits with the whole margin
    """

    plan: ParallelPlan
    estimate: Estimate
    reason: str = ""
    lacks: float = 0.0


class Rejection(NamedTuple):
    """Plans that were left out for one reason. nearest: the one that missed by the least, `excess` bytes, as `sum`."""

    reason: str
    plans: int
    nearest: ParallelPlan | None = None
    excess: float = 0.0
    sum: str = ""


class SearchResult(NamedTuple):
    """The outcome of a search: ranked rows, and all that was rejected.

    tried  plans looked at
    whole  nobody stopped it
    """

    rows: list[Row]
    rejected: list[Rejection]
    tried: int
    whole: bool = True


class Progress(NamedTuple):
    """Counts how far a search is: plans priced, rows done, rows in all, and the best plan so far."""

    priced: int
    done: int
    all: int
    best: Row | None


Watch = Callable[[Progress], None]


class Target(NamedTuple):
    """What a plan must do.

    sequences  of a step over all ranks
    room       bytes of a GPU, in which a plan and its margin must fit
    offload    how far states may leave it: none, or as far as a tier; auto where nothing fits otherwise
    optimizer  the name of its row (spec/optimizer.py)
    quantize   the format of frozen linear layers, whose bytes the model says
    margin     share of planned bytes that must be there beyond them; None: as kinds of runs have it
    """

    sequences: int
    room: float
    goal: str = "fastest"
    offload: str = "auto"
    optimizer: str = ADAMW
    quantize: str | None = None
    margin: float | None = None

    def margin_for(self, model: ModelSpec, plan: ParallelPlan) -> Margin:
        """Return the margin of a plan."""
        return margin_for(self.margin, model, plan)

    def usable(self, model: ModelSpec, plan: ParallelPlan) -> float:
        """Return the bytes that may be planned for such a plan, so that it fits with its margin."""
        return usable(self.room, self.margin_for(model, plan).share)


def search(
    model: ModelSpec,
    cluster: ClusterSpec,
    target: Target,
    evaluate: Evaluate,
    at_least: AtLeast | None = None,
    watch: Watch | None = None,
) -> SearchResult:
    """Return all plans of the table that fit, ranked by the goal, those that lack some of the margin last.

    Sizes and places are tried in turn until one of their plans has the whole margin. Raises ConfigError for an unknown
    goal or offload.

    at_least  returns bytes below which `evaluate` does not find the device's, for less work: the same plans are found.
              A bound above the number that it is given will do
    watch     is told how far the search is. KeyboardInterrupt then ends it, if there is a plan that fits
    """
    for option, value, choices in (("--goal", target.goal, GOALS), ("--offload", target.offload, OFFLOADS)):
        if value not in choices:
            raise ConfigError(f"{option} {value!r} is unknown: pass one of {', '.join(choices)}.")
    account = _Account(target.room)
    order = _order(target.goal)
    price = _Price(evaluate, at_least)
    sizes = list(_sizes(cluster)) if target.goal == "fewest-gpus" else [cluster.gpus]
    rows: list[Row] = []
    best: list[Row] = []  # the first of them, for who watches
    whole = True
    try:
        for tiers, gpus in product(list(_turns(target.offload, model)), sizes):
            here = resized(cluster, gpus)
            groups = list(_groups(model, here, target, tiers, account))
            for done, group in enumerate(groups, 1):
                before = len(rows)
                rows += _fitting(group, model, here, price, target, account)
                if watch is not None:
                    best = sorted([*best, *rows[before:]], key=order)[:1]
                    watch(Progress(account.priced, done, len(groups), next(iter(best), None)))
            if not all(row.lacks for row in rows):
                break
    except KeyboardInterrupt:
        if watch is None or not rows:
            raise
        whole = False
    return SearchResult(_explained(sorted(rows, key=order)), account.rejected(), account.tried, whole)


def _turns(offload: str, model: ModelSpec) -> Iterator[Tiers]:
    """Yield what may leave the device, the least first: of long sequences first inputs of recomputed blocks."""
    for tiers in ROUNDS[offload]:
        yield tiers
        if model.length >= LONG:
            yield tuple(replace(away, activations=place) for away in tiers for place in tiers_of(INPUTS))


def resized(cluster: ClusterSpec, gpus: int) -> ClusterSpec:
    """Return the same machines, fewer or more of them; less than a node is one node with fewer GPUs."""
    per_node = min(gpus, cluster.per_node)
    if gpus % per_node:
        raise ConfigError(f"{gpus} GPUs are not a whole number of nodes of {per_node}.")
    return cluster.sized(gpus // per_node, per_node)


def _sizes(cluster: ClusterSpec) -> Iterator[int]:
    """Count 1, 2, 4, ... GPUs of one node, then whole nodes in powers of two, up to the cluster."""
    gpus = 1
    while gpus < cluster.gpus:
        if gpus <= cluster.per_node or gpus % cluster.per_node == 0:
            yield gpus
        gpus *= 2
    yield cluster.gpus


_KEYS: dict[str, Callable[[Row], tuple[float, ...]]] = {
    "fastest": lambda row: (row.estimate.seconds.mid, row.estimate.memory.allocated),
    "fewest-gpus": lambda row: (row.plan.world, row.estimate.seconds.mid),
    "largest-batch": lambda row: (-row.plan.micro_batch * row.plan.rows, row.estimate.seconds.mid),
}


def _order(goal: str) -> Callable[[Row], tuple[float, ...]]:
    """Return the key of rows by which they are ranked."""
    return lambda row: (float(row.lacks > 0), *_KEYS[goal](row))


class _Account:
    """Counts what is rejected, by reason."""

    def __init__(self, room: float) -> None:
        self.room, self.tried = room, 0
        self.priced = 0
        self._count: dict[str, int] = {}
        self._nearest: dict[str, tuple[float, ParallelPlan, str]] = {}

    def reject(self, reason: str, count: int = 1) -> None:
        """Count plans that were left out."""
        self.tried += count
        self._count[reason] = self._count.get(reason, 0) + count

    def too_large(self, reason: str, count: int, plan: ParallelPlan, excess: float, arithmetic: str = "") -> None:
        """Count plans that need more than there is, of which `plan` misses by `excess` bytes."""
        self.reject(reason, count)
        if reason not in self._nearest or excess < self._nearest[reason][0]:
            self._nearest[reason] = excess, plan, arithmetic

    def misses_by(self, reason: str) -> float:
        """Return the bytes by which the nearest plan missed, infinite before there is one."""
        return self._nearest[reason][0] if reason in self._nearest else inf

    def rejected(self) -> list[Rejection]:
        """Return the reasons, the most frequent first."""
        rejections = []
        for reason, count in self._count.items():
            excess, plan, arithmetic = self._nearest.get(reason, (0.0, None, ""))
            rejections.append(Rejection(reason, count, plan, excess, arithmetic))
        return sorted(rejections, key=lambda rejection: -rejection.plans)


# --- enumeration --------------------------------------------------------------------------------


class _Group(NamedTuple):
    """Plans that differ in their micro-batch and in how many a step has, the smallest first, each with more memory."""

    plan: ParallelPlan
    sizes: list[tuple[int, int]]


def _groups(
    model: ModelSpec, cluster: ClusterSpec, target: Target, tiers: Tiers, account: _Account
) -> Iterator[_Group]:
    """Yield groups of plans that differ in the micro-batch alone."""
    for pp, dp, tp in _degrees(model, cluster, target.sequences, account):
        for stage, away in _stages(dp, tiers):
            for schedule in PIPELINES if pp > 1 else ("1f1b",):
                for activations, (ep, sp, sliced) in product(ACTIVATIONS, _inside(model, dp, tp, schedule)):
                    if target.sequences % (dp // sp) or (away.activations_leave and activations != "full"):
                        continue
                    virtual = Schedule.of(schedule).chunks_per_rank
                    whole = ParallelPlan(
                        zero=Zero(stage, **pipeline_moments(stage, pp)),
                        offload=away,
                        mesh=Mesh(dp, tp, pp, ep, sp, schedule=schedule, sequence_parallel=sliced),
                        precision=cluster.gpu.precision,
                        activations=activations,
                        virtual=virtual,
                        tiled_loss=model.length >= LONG or AUTO,
                        optimizer=target.optimizer,
                        quantize=target.quantize,
                    )
                    for shard in _shards(whole, cluster):
                        plan = whole.replace(shard=shard)
                        sizes = _micro_batches(plan, target.sequences // plan.rows, len(model.blocks), account)
                        yield from (_Group(plan, part) for part in _ascending(model, plan, sizes))


def _ascending(
    model: ModelSpec, plan: ParallelPlan, sizes: Iterator[tuple[int, int]]
) -> Iterator[list[tuple[int, int]]]:
    """Yield sizes in parts in which a larger micro-batch needs more memory.

    A part ends where the loss begins to be computed in tiles, and where a step has one forward, whose gradients need
    no sum beside them.
    """

    def regime(size: tuple[int, int]) -> tuple[bool, bool]:
        micro_batch, accumulate = size
        return tiles_loss(model, plan, micro_batch), accumulate == 1

    yield from (list(part) for _, part in groupby(sizes, regime))


def _shards(plan: ParallelPlan, cluster: ClusterSpec) -> Iterator[int | None]:
    """Yield over how many ranks states may be cut: all of dp, or those of a node, whose links are other ones."""
    yield None
    inside = cluster.per_node // plan.tp
    if plan.zero.stage and inside < plan.dp and shard_refused(plan.dp, plan.ep, plan.sp, inside) is None:
        yield inside


def shard_refused(dp: int, ep: int, sp: int, shard: int) -> str | None:
    """Return why states cannot be cut over this many neighbours on dp; None where they can."""
    if shard < 1 or dp % shard:
        return f"shard does not divide dp {dp}"
    if shard % ep:
        return f"ep {ep} does not divide shard, and its experts would have no shards"
    return f"neither of shard and sp {sp} divides the other" if shard % sp and sp % shard else None


def _inside(model: ModelSpec, dp: int, tp: int, schedule: str) -> Iterator[tuple[int, int, bool]]:
    """Yield (ep, sp, sequence parallelism) that go together with these degrees."""
    yield 1, 1, False
    if tp > 1 and model.length % tp == 0:
        yield 1, 1, True
    several = model.experts and not Schedule.of(schedule).splits_backward
    experts = [ep for ep in divisors(dp)[1:] if ep_refused(model, dp, ep) is None] if several else []
    yield from ((ep, sp, False) for ep in (1, *experts) for sp in shares(model, dp, tp) if (ep, sp) != (1, 1))


def shares(model: ModelSpec, dp: int, tp: int) -> list[int]:
    """Return the degrees of sp: short sequences are not cut, nor those whose masks would be too large."""
    fits = (sp for sp in divisors(dp)[1:] if model.length >= LONG and sp_refused(model, dp, tp, sp) is None)
    return [1, *(sp for sp in fits if masks_fit(model, tp, sp))]


def ep_refused(model: ModelSpec, dp: int, ep: int) -> str | None:
    """Say why an ep degree cannot be, None where it can."""
    if dp % ep:
        return f"ep does not divide dp {dp}"
    if not model.experts:
        return "the model has no experts that its plan names"
    return f"ep does not divide {model.experts} experts" if model.experts % ep else None


def _stages(dp: int, tiers: Tiers) -> Iterator[tuple[int, Offload]]:
    """Yield ZeRO stages with what leaves the device: weights do at stage 3, gradients from 2 on, even of one rank."""
    for away in tiers:
        least = 3 if away.params != "none" else 2 if away.gradients_leave else 0
        yield from ((stage, away) for stage in range(least, 4 if dp > 1 else least + 1))


def pipeline_moments(stage: int, pp: int) -> dict[str, Any]:
    """Return the keys of `zero` by which stages 2 and 3 save memory in a pipeline: by default they hold as stage 1."""
    if pp == 1 or stage < 2:
        return {}
    return {"reduce": "every_micro_batch"} | ({"release": "every_use"} if stage == 3 else {})


def _degrees(
    model: ModelSpec, cluster: ClusterSpec, sequences: int, account: _Account
) -> Iterator[tuple[int, int, int]]:
    """Yield (pp, dp, tp) that multiply to all ranks; the others are counted as rejected."""
    world = cluster.gpus
    for tp in divisors(world):
        why = tp_refused(model, tp, cluster.per_node)
        for pp in divisors(world // tp):
            dp = world // tp // pp
            if why is not None:
                account.reject(why)
            elif pp > len(model.blocks):
                account.reject(f"more pipeline stages than {len(model.blocks)} blocks")
            elif pp > 1 and not model.chain:
                account.reject("the model is not a chain of blocks, which no pipeline can cut")
            elif all(sequences % (dp // sp) for sp in shares(model, dp, tp)):
                account.reject(f"{sequences} sequences a step are not a multiple of dp")
            else:
                yield pp, dp, tp


def tp_refused(model: ModelSpec, tp: int, per_node: int) -> str | None:
    """Say why a tp degree cannot be, None where it can."""
    if tp > per_node:
        return f"tp beyond the {per_node} GPUs of a node"
    for what, heads in (("heads", model.heads), ("key-value heads", model.kv_heads)):
        if heads % tp:
            return f"tp does not divide {heads} {what}"
    uncut = not any(weight.cut is not None for part in model.blocks for unit in part.units for weight in unit.weights)
    if tp > 1 and uncut:
        return "the model has no tensor-parallel plan"
    for part in model.parts:
        for unit in part.units:
            for weight in unit.weights:
                if weight.cut is not None and weight.shape[weight.cut] % tp:
                    return f"tp does not divide the {weight.shape[weight.cut]} of {weight.name}"
    return None


def _micro_batches(plan: ParallelPlan, sequences: int, blocks: int, account: _Account) -> Iterator[tuple[int, int]]:
    """Yield each micro-batch that divides a rank's sequences and that the schedule takes, and how many they are."""
    schedule, micro = Schedule.of(plan.schedule), 1
    while sequences % micro == 0:
        try:
            if plan.pp > 1:
                schedule.check(sequences // micro, plan.pp)
                schedule.check_blocks(blocks, plan.pp, "the model")
        except ConfigError:
            account.reject(f"incompatible with {plan.schedule}: number of micro-batches or stages")
        else:
            yield micro, sequences // micro
        micro *= 2


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# --- judgement ----------------------------------------------------------------------------------


class _Price(NamedTuple):
    """Prices a plan, and bounds its memory from below where that costs less."""

    evaluate: Evaluate
    at_least: AtLeast | None


def _fitting(
    group: _Group, model: ModelSpec, cluster: ClusterSpec, price: _Price, target: Target, account: _Account
) -> Iterator[Row]:
    """Yield the plans that fit, up to the first that does not: more sequences at a time need more memory.

    One that does not fit by what it takes at least, and is not the nearest by that, is not priced.
    """
    for i, (micro, accumulate) in enumerate(group.sizes):
        account.priced += 1
        candidate = group.plan.replace(micro_batch=micro, accumulate=accumulate)
        plan = faster_reduction(model, candidate, cluster) if candidate.shard > 1 else candidate
        plan = faster_mixers(model, plan, cluster)
        above = account.room + max(0.0, account.misses_by(DEVICE_MEMORY))
        if price.at_least is not None and price.at_least(model, cluster, plan, above) > above:
            account.reject(DEVICE_MEMORY, len(group.sizes) - i)
            return
        estimate = price.evaluate(model, cluster, plan)
        excess = estimate.memory.device - account.room
        lacks = estimate.memory.lacks(cluster)
        if excess > 0 or lacks:
            if excess > 0:
                account.too_large(DEVICE_MEMORY, len(group.sizes) - i, plan, excess)
            else:
                tier, more = next(iter(lacks.items()))
                parts = _on_host(estimate.memory, cluster) if tier == HOST else ""
                account.too_large(memory_of(tier), len(group.sizes) - i, plan, more, parts)
            return
        account.tried += 1
        beyond = (1 + target.margin_for(model, plan).share) * estimate.memory.device - account.room
        yield Row(plan, estimate, lacks=max(0.0, beyond))


def memory_of(tier: str) -> str:
    """Return a tier's memory as rejections name it."""
    return f"the {tier}'s memory"


def _on_host(memory: Memory, cluster: ClusterSpec) -> str:
    """Write what a node's memory would hold."""
    each = " + ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in memory.on_host.items())
    ranks = memory.host / (sum(memory.on_host.values()) or memory.host)
    return f"{ranks:.0f} x ({each}) = {memory.host / 1e9:.1f} GB of {cluster.host_memory / 1e9:.1f} GB" if each else ""


def _explained(rows: list[Row]) -> list[Row]:
    """Return the rows, each with what sets it apart from the first."""
    return [row._replace(reason=_why(row, rows[0]) if i else _strength(row)) for i, row in enumerate(rows)]


def _strength(row: Row) -> str:
    seconds = row.estimate.seconds
    largest = sorted(seconds.parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {100 * value / seconds.mid:.0f} %" for name, value in largest if value > 0)


def _why(row: Row, best: Row) -> str:
    """Name the parts of the step that take longer than in the best plan, the greatest first."""
    ours, theirs = row.estimate.seconds, best.estimate.seconds
    more = {name: value - theirs.parts.get(name, 0.0) for name, value in ours.parts.items()}
    worst = [(name, excess) for name, excess in sorted(more.items(), key=lambda item: -item[1]) if excess > 0][:2]
    reasons = [f"{name} {_signed_seconds(excess)}" for name, excess in worst if excess > 0.002 * theirs.mid]
    saved = best.estimate.memory.allocated - row.estimate.memory.allocated
    if saved > 0.02 * best.estimate.memory.allocated:
        reasons.append(f"saves {saved / (1 << 30):.1f} GiB")
    return ", ".join(reasons) or "as fast"


def _signed_seconds(value: float) -> str:
    return f"{value:+.3g} s"


# --- experts ------------------------------------------------------------------------------------


def ways(rows: list[Row]) -> list[tuple[str, Row | None]]:
    """Return the best of these rows for each place of a mixture's experts; None where none fits."""
    kinds: dict[str, Callable[[ParallelPlan], bool]] = {
        "on all of dp": lambda plan: plan.ep == 1 and plan.tp == 1,
        "over ep": lambda plan: plan.ep > 1,
        "cut by tp": lambda plan: plan.ep == 1 and plan.tp > 1,
    }
    return [(name, next((row for row in rows if fits(row.plan)), None)) for name, fits in kinds.items()]


# --- sequences ----------------------------------------------------------------------------------


def sequence_ways(rows: list[Row]) -> list[tuple[str, Row | None]]:
    """Return the best of these rows for each way to have a long sequence on ranks; None where none fits."""
    kinds: dict[str, Callable[[ParallelPlan], bool]] = {
        "whole on a rank": lambda plan: plan.sp == 1 and plan.tp == 1,
        "over sp": lambda plan: plan.sp > 1 and plan.tp == 1,
        "cut by tp": lambda plan: plan.sp == 1 and plan.tp > 1,
        "over sp and tp": lambda plan: plan.sp > 1 and plan.tp > 1,
    }
    return [(name, next((row for row in rows if fits(row.plan)), None)) for name, fits in kinds.items()]
