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
    recomputation      none, selective, full; every:2, every:4, every:8                one fits without the latter
    sequence parallel  off, on                                                         tp = 1, the length not whole
    schedule           1f1b, interleaved, zero-bubble                                  pp = 1
    reduce_scatter     auto, or what the links' formulas call faster than it           dp = 1
    sp_mixers          the same                                                        sp = 1, no recurrences
    compiled blocks    off, or on where formulas call them faster                      a caller says
    in a pipeline      stage 2 reduces every micro-batch, 3 also releases every use    (by default they are as 1)
    off the device     inputs of recomputed blocks on the host                         short sequences
                       optimizer states on the host or a disk, at stage 3 weights, too what is not asked for
    gradients          where states leave: on the device, on the host at stages 2, 3
    roundings          nf4-double, reductions in bf16, moments in 8 bits               one row fits without

Memory decides first: it grows with the micro-batch, so the first that does not fit ends its row. What fits is
timed by `evaluate`. Every rejected plan is counted under the reason, with the one that was nearest. What fits, and
lacks bytes of the margin beyond it, is a row behind all others: it says how many (`Row.lacks`).

Blocks are recomputed in segments where nothing fits otherwise. Then states leave the device, for the host before a
disk, or as far as the caller says; and before them the inputs of recomputed blocks of long sequences. What rounds more
than was asked is tried between the two, each by itself and then all of it: losses have other bits then, as the row and
a note say. The loss of long sequences is computed tile by tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import groupby, product
from math import inf
from types import MappingProxyType
from typing import Any, NamedTuple

from zero3d.errors import ConfigError
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.formats import NF4, NF4_DOUBLE
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import AUTO, Offload
from zero3d.spec.optimizer import ADAMW, OPTIMIZERS
from zero3d.spec.tiers import ACTIVATIONS as INPUTS, GRADIENTS, HOST, OPTIMIZER, PARAMS, TIERS, tiers_of
from zero3d.spec.zero import Zero
from zero3d.tools.plan.footprint import tiles_loss
from zero3d.tools.plan.kernels import faster_blocks
from zero3d.tools.plan.margin import Margin, margin_for, usable
from zero3d.tools.plan.sequence import masks_fit, sp_refused
from zero3d.tools.plan.spec import ClusterSpec, Estimate, Evaluate, Memory, ModelSpec, ParallelPlan
from zero3d.tools.plan.time import faster_mixers, faster_reduction

Tiers = tuple[Offload, ...]
GOALS = ("fastest", "fewest-gpus", "largest-batch")
OFFLOADS = ("auto", "none", *tiers_of(OPTIMIZER))
NEAR: Tiers = (Offload(),)
SOONER = 0.005  # of a step's seconds, below which neither a plan nor a change is called faster
LONG = 16384  # tokens of a sequence from which it may be cut over sp
FINER = {NF4.name: NF4_DOUBLE.name}  # a format, and one that takes less
DEVICE_MEMORY = "the GPU's memory"
ACTIVATIONS = ("none", "selective", "full")
SEGMENTS = ("every:2", "every:4", "every:8")  # bits and seconds of full, fewer inputs and more interiors
PIPELINES = ("1f1b", "interleaved", "zero-bubble")


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
    """A plan that fits, and what it needs.

    said   why it stands where it does; "": as is seen beside the best
    lacks  bytes of the margin for which there is no room; 0 where it fits with the whole margin
    best   the estimate of the first row, beside which this one is explained; None: it is not
    """

    plan: ParallelPlan
    estimate: Estimate
    said: str = ""
    lacks: float = 0.0
    best: Estimate | None = None

    @property
    def reason(self) -> str:
        """Say why it stands where it does."""
        if self.said or self.best is None:
            return self.said
        return _strength(self.estimate) if self.estimate is self.best else _why(self.estimate, self.best)


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
    models  by the format of their frozen layers: the given one, and those that were made for other formats
    """

    rows: list[Row]
    rejected: list[Rejection]
    tried: int
    whole: bool = True
    models: Mapping[str | None, ModelSpec] = MappingProxyType({})


class Progress(NamedTuple):
    """Counts how far a search is: plans priced, rows done, rows in all, and the best plan so far."""

    priced: int
    done: int
    all: int
    best: Row | None


Watch = Callable[[Progress], None]
Packed = Callable[[str | None], ModelSpec]


class Bounds(NamedTuple):
    """What is known of a plan for less work than `evaluate` takes. It may not see that a plan is refused.

    settled   a plan as the bounds take it, of which other micro-batches may then be made
    at_least  bytes below which `evaluate` does not find the device's; the first bound above the given number will do
    at_most   bytes above which it does not find them; infinite where nobody knows, or other tiers may be too small
    later     what `evaluate` returns of a plan that fits, for less work until its memory is read
    """

    settled: Callable[[ModelSpec, ClusterSpec, ParallelPlan], ParallelPlan]
    at_least: Callable[[ModelSpec, ClusterSpec, ParallelPlan, float], float]
    at_most: Callable[[ModelSpec, ClusterSpec, ParallelPlan], float]
    later: Evaluate


class Target(NamedTuple):
    """What a plan must do.

    sequences  of a step over all ranks
    room       bytes of a GPU, in which a plan and its margin must fit
    offload    how far states may leave it: none, or as far as a tier; auto where nothing fits otherwise
    optimizer  the name of its row (spec/optimizer.py)
    quantize   the format of frozen linear layers, whose bytes the model says
    margin     share of planned bytes that must be there beyond them; None: as kinds of runs have it
    rounds     what rounds more than was asked is tried, too, where nothing fits otherwise
    linear     fp8 where linear layers multiply in it (model.linear)
    compile    blocks are compiled (train.compile); None: in plans that are faster by it
    """

    sequences: int
    room: float
    goal: str = "fastest"
    offload: str = "auto"
    optimizer: str = ADAMW
    quantize: str | None = None
    margin: float | None = None
    rounds: bool = True
    linear: str | None = None
    compile: bool | None = False

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
    bounds: Bounds | None = None,
    watch: Watch | None = None,
    packed: Packed | None = None,
) -> SearchResult:
    """Return all plans of the table that fit, ranked by the goal, those that lack some of the margin last.

    Sizes and places are tried in turn until one of their plans has the whole margin. Raises ConfigError for an unknown
    goal or offload.

    bounds  of plans' memory, by which fewer are priced, and the same are found
    watch   is told how far the search is. KeyboardInterrupt then ends it, if there is a plan that fits
    packed  returns the model with its frozen layers in another format; without it none is tried
    """
    for option, value, choices in (("--goal", target.goal, GOALS), ("--offload", target.offload, OFFLOADS)):
        if value not in choices:
            raise ConfigError(f"{option} {value!r} is unknown: pass one of {', '.join(choices)}.")
    account = _Account()
    models = {target.quantize: model}
    price = _Price(evaluate, bounds)
    sizes = list(_sizes(cluster)) if target.goal == "fewest-gpus" else [cluster.gpus]
    rows: list[Row] = []
    best: list[Row] = []  # the first of them, for who watches
    whole = True
    try:
        for turn, gpus in product(list(_turns(target, model, packed is not None, cluster.gpu.precision)), sizes):
            here = resized(cluster, gpus)
            known = models.get(turn.quantize) or models.setdefault(turn.quantize, _packed(packed, turn.quantize))
            groups = list(_groups(known, here, target, turn, account))
            for done, group in enumerate(groups, 1):
                before = len(rows)
                few = _Few(group, known, here, price, target, max(0.0, account.misses_by(DEVICE_MEMORY)))
                few.count(account)
                rows += few.rows()
                if watch is not None:
                    best = _ranked([*best, *rows[before:]], target.goal)[:1]
                    watch(Progress(account.priced, done, len(groups), next(iter(best), None)))
            if not all(row.lacks for row in rows):
                break
    except KeyboardInterrupt:
        if watch is None or not rows:
            raise
        whole = False
    ranked = _explained(_ranked(rows, target.goal))
    return SearchResult(ranked, account.rejected(), account.tried, whole, models)


class _Turn(NamedTuple):
    """What is tried at a time.

    tiers         what may leave the device
    activations   what may be recomputed
    quantize      the format of frozen layers
    optimizer     the name of its row
    reduce_dtype  in which gradients are reduced
    """

    tiers: Tiers
    quantize: str | None
    optimizer: str
    reduce_dtype: str = Zero.reduce_dtype
    activations: tuple[str, ...] = ACTIVATIONS

    @classmethod
    def of(cls, target: Target, tiers: Tiers) -> _Turn:
        """Return what a target asks for."""
        return cls(tiers, target.quantize, target.optimizer)

    def having(self, settings: Mapping[str, str]) -> _Turn:
        """Return the same with other settings."""
        return _Turn(**self._asdict() | dict(settings))

    def reduces_alone(self, target: Target) -> bool:
        """Return whether it differs from what was asked in reductions alone, of which a rank by itself has none."""
        asked = _Turn.of(target, self.tiers)
        return self != asked and self._replace(reduce_dtype=asked.reduce_dtype) == asked


def _turns(target: Target, model: ModelSpec, packs: bool, precision: str) -> Iterator[_Turn]:
    """Yield what is tried in turn: what may leave the device, the least first, and between two of these what rounds.

    Before any leaves, blocks are recomputed in segments. Of long sequences inputs of recomputed blocks leave first.
    """
    for tiers in ROUNDS[target.offload]:
        turns = [tiers]
        if model.length >= LONG:
            turns.append(tuple(replace(away, activations=place) for away in tiers for place in tiers_of(INPUTS)))
        for each in turns:
            yield _Turn.of(target, each)
            if each == NEAR:
                yield _Turn.of(target, each)._replace(activations=SEGMENTS)
        if tiers == NEAR and target.rounds:
            for each in turns:
                known = _Turn.of(target, each)
                yield from (known.having(settings) for settings in _roundings(target, packs, precision))


def _roundings(target: Target, packs: bool, precision: str) -> Iterator[Mapping[str, str]]:
    """Yield settings that round more than was asked, and save memory by that: each alone, then all."""
    every = {"quantize": FINER[target.quantize]} if packs and target.quantize in FINER else {}
    every |= {"reduce_dtype": "bf16"} if precision == "bf16" else {}
    coded = next((row.name for row in OPTIMIZERS.values() if row.codes == target.optimizer), None)
    every |= {} if coded is None else {"optimizer": coded}
    yield from ({key: value} for key, value in every.items())
    if len(every) > 1:
        yield every


def _packed(packed: Packed | None, quantize: str | None) -> ModelSpec:
    assert packed is not None  # else no turn has another format
    return packed(quantize)


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
    "fastest": lambda row: (row.estimate.seconds.mid,),
    "fewest-gpus": lambda row: (row.plan.world, row.estimate.seconds.mid),
    "largest-batch": lambda row: (-row.plan.micro_batch * row.plan.rows, row.estimate.seconds.mid),
}


def _ranked(rows: list[Row], goal: str) -> list[Row]:
    """Return the rows in their order, the fuller behind those that are as good: memory is read of these alone."""

    def key(row: Row) -> tuple[float, ...]:
        return float(row.lacks > 0), *_KEYS[goal](row)

    ranked: list[Row] = []
    for _, equals in groupby(sorted(rows, key=key), key):
        few = list(equals)
        ranked += few if len(few) == 1 else sorted(few, key=lambda row: row.estimate.memory.allocated)
    return ranked


class _Account:
    """Counts what is rejected, by reason."""

    def __init__(self) -> None:
        self.tried = 0
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


def _groups(model: ModelSpec, cluster: ClusterSpec, target: Target, turn: _Turn, account: _Account) -> Iterator[_Group]:
    """Yield groups of plans that differ in the micro-batch alone."""
    for pp, dp, tp in _degrees(model, cluster, target.sequences, target.linear, account):
        if dp == 1 and turn.reduces_alone(target):
            continue
        for stage, away in _stages(dp, turn.tiers):
            for schedule in PIPELINES if pp > 1 else ("1f1b",):
                for activations, (ep, sp, sliced) in product(turn.activations, _inside(model, dp, tp, schedule)):
                    if target.sequences % (dp // sp) or (away.activations_leave and activations != "full"):
                        continue
                    virtual = Schedule.of(schedule).chunks_per_rank
                    whole = ParallelPlan(
                        zero=_zero(stage, pp, turn.reduce_dtype),
                        offload=away,
                        mesh=_mesh(dp, tp, pp, ep, sp, schedule, sliced),
                        precision=cluster.gpu.precision,
                        activations=activations,
                        virtual=virtual,
                        tiled_loss=model.length >= LONG or AUTO,
                        optimizer=turn.optimizer,
                        quantize=turn.quantize,
                        linear=target.linear,
                        compile=bool(target.compile),
                    )
                    for shard in _shards(whole, cluster):
                        plan = whole if shard is None else whole.having(mesh=_sharded(whole.mesh, shard))
                        sizes = _micro_batches(plan, target.sequences // plan.rows, len(model.blocks), account)
                        yield from (_Group(plan, part) for part in _ascending(model, plan, sizes))


@lru_cache(maxsize=16)
def _zero(stage: int, pp: int, reduce_dtype: str) -> Zero:
    return Zero(stage, reduce_dtype=reduce_dtype, **pipeline_moments(stage, pp))


@lru_cache(maxsize=1024)
def _mesh(dp: int, tp: int, pp: int, ep: int, sp: int, schedule: str, sliced: bool) -> Mesh:
    """Return one mesh for all plans of these degrees, which caches then compare at a glance."""
    return Mesh(dp, tp, pp, ep, sp, schedule=schedule, sequence_parallel=sliced)


@lru_cache(maxsize=1024)
def _sharded(mesh: Mesh, shard: int) -> Mesh:
    return replace(mesh, shard=shard)


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
    model: ModelSpec, cluster: ClusterSpec, sequences: int, linear: str | None, account: _Account
) -> Iterator[tuple[int, int, int]]:
    """Yield (pp, dp, tp) that multiply to all ranks; the others are counted as rejected."""
    world = cluster.gpus
    for tp in divisors(world):
        why = tp_refused(model, tp, cluster.per_node)
        for pp in divisors(world // tp):
            dp = world // tp // pp
            if why is not None:
                account.reject(why)
            elif linear is not None and tp > 1:
                account.reject(f"model.linear={linear} does not work with tp yet")
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
    for size in _divisions(sequences):
        if _takes(plan.schedule, plan.pp, size[1], blocks):
            yield size
        else:
            account.reject(f"incompatible with {plan.schedule}: number of micro-batches or stages")


@lru_cache(maxsize=64)
def _divisions(sequences: int) -> list[tuple[int, int]]:
    """Return the powers of two that divide so many sequences, each with how many times."""
    return [(1 << at, sequences >> at) for at in range((sequences & -sequences).bit_length())]


@lru_cache(maxsize=4096)
def _takes(name: str, pp: int, micro_batches: int, blocks: int) -> bool:
    """Return whether a schedule takes so many micro-batches, and so many blocks."""
    if pp == 1:
        return True
    try:
        Schedule.of(name).check(micro_batches, pp)
        Schedule.of(name).check_blocks(blocks, pp, "the model")
    except ConfigError:
        return False
    return True


def divisors(number: int) -> list[int]:
    """Return the divisors of a number in ascending order."""
    small = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


# --- judgement ----------------------------------------------------------------------------------


class _Price(NamedTuple):
    """Prices plans on a cluster, or bounds their memory where that costs less."""

    evaluate: Evaluate
    bounds: Bounds | None


class _Few:
    """The plans of a group, priced as far as that is needed: more sequences at a time need more memory.

    sizes   of their micro-batches, and how many a step has
    priced  estimates by the place of a size
    sure    how many have the whole margin by what they take at most, the first of them
    fit     how many fit, these among them
    """

    def __init__(
        self, group: _Group, model: ModelSpec, cluster: ClusterSpec, price: _Price, target: Target, misses: float
    ) -> None:
        """Find out how many fit. misses: by how many bytes the nearest plan did not, so far."""
        first = group.plan.sized(*group.sizes[0])
        chosen = faster_reduction(model, first, cluster) if first.shard > 1 else first
        chosen = faster_mixers(model, chosen, cluster)  # all of a group have these alike
        self.sizes, self._chosen = group.sizes, chosen
        self._plans: dict[int, ParallelPlan] = {}
        self.priced: dict[int, Estimate] = {}
        self._model, self._cluster = model, cluster
        self._price, self._compiles = price, target.compile is None
        self._room, self._share = target.room, target.margin_for(model, chosen).share
        if price.bounds is None:
            many = len(self.sizes)
            self.sure, self.fit = 0, next((at for at in range(many) if not self._fits(at)), many)
        else:
            self.sure, self.fit = self._by_bounds(price.bounds, target.room + misses)

    def plan(self, at: int) -> ParallelPlan:
        """Return the plan of a size."""
        if at not in self._plans:
            self._plans[at] = self._chosen.sized(*self.sizes[at])
        return self._plans[at]

    def rows(self) -> list[Row]:
        """Return the plans that fit. Of those that have the whole margin for sure, memory is computed if it is read."""
        bounds = self._price.bounds
        rows = []
        for at in range(self.fit):
            plan = self._compiled(at)
            if at < self.sure and at not in self.priced and bounds is not None:
                rows.append(Row(plan, bounds.later(self._model, self._cluster, plan)))
            else:
                beyond = (1 + self._share) * self._estimate(at).memory.device - self._room
                rows.append(Row(plan, self._estimate(at), lacks=max(0.0, beyond)))
        return rows

    def count(self, account: _Account) -> None:
        """Count all of them: those that do not fit under what the first of them has too little of."""
        fit, many = self.fit, len(self.sizes)
        account.priced += min(fit + 1, many)
        account.tried += fit
        if fit == many:
            return
        if fit not in self.priced:  # by what it takes at least it is not the nearest
            account.reject(DEVICE_MEMORY, many - fit)
            return
        plan, memory = self.plan(fit), self.priced[fit].memory
        if memory.device > self._room:
            account.too_large(DEVICE_MEMORY, many - fit, plan, memory.device - self._room)
            return
        tier, more = next(iter(memory.lacks(self._cluster).items()))
        parts = _on_host(memory, self._cluster) if tier == HOST else ""
        account.too_large(memory_of(tier), many - fit, plan, more, parts)

    def _by_bounds(self, bounds: Bounds, above: float) -> tuple[int, int]:
        """Return how many have the whole margin for sure, and how many fit. above: bytes beyond which none is priced.

        Between the two the largest is priced first: what is smaller fits if it does.
        """
        model, cluster = self._model, self._cluster
        one = bounds.settled(model, cluster, self.plan(0))
        plans, least = [one], [bounds.at_least(model, cluster, one, above)]
        while least[-1] <= above and len(least) < len(self.sizes):
            plans.append(one.sized(*self.sizes[len(least)]))
            least.append(bounds.at_least(model, cluster, plans[-1], above))
        sure = fit = len(least) - (least[-1] > above)
        usable = self._room / (1 + self._share)
        while sure and (least[sure - 1] > usable or bounds.at_most(model, cluster, plans[sure - 1]) > usable):
            sure -= 1
        while fit > sure and not self._fits(fit - 1):
            fit -= 1
        return sure, fit

    def _estimate(self, at: int) -> Estimate:
        if at not in self.priced:
            self.priced[at] = self._price.evaluate(self._model, self._cluster, self._compiled(at))
        return self.priced[at]

    def _compiled(self, at: int) -> ParallelPlan:
        """Return a plan with compiled blocks where they are faster, if that is to be found out. Memory is the same."""
        if self._compiles:
            self._plans[at] = faster_blocks(self._model, self.plan(at), self._cluster)
        return self.plan(at)

    def _fits(self, at: int) -> bool:
        memory = self._estimate(at).memory
        return memory.device <= self._room and not memory.lacks(self._cluster)


def memory_of(tier: str) -> str:
    """Return a tier's memory as rejections name it."""
    return f"the {tier}'s memory"


def _on_host(memory: Memory, cluster: ClusterSpec) -> str:
    """Write what a node's memory would hold."""
    each = " + ".join(f"{name} {nbytes / 1e9:.2f}" for name, nbytes in memory.on_host.items())
    ranks = memory.host / (sum(memory.on_host.values()) or memory.host)
    return f"{ranks:.0f} x ({each}) = {memory.host / 1e9:.1f} GB of {cluster.host_memory / 1e9:.1f} GB" if each else ""


def _explained(rows: list[Row]) -> list[Row]:
    """Return the rows, each beside the first one, which sets it apart."""
    return [row._replace(best=rows[0].estimate) for row in rows]


def _strength(estimate: Estimate) -> str:
    seconds = estimate.seconds
    largest = sorted(seconds.parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {100 * value / seconds.mid:.0f} %" for name, value in largest if value > 0)


def _why(estimate: Estimate, best: Estimate) -> str:
    """Name the parts of the step that take longer than in the best plan, the greatest first."""
    ours, theirs = estimate.seconds, best.seconds
    more = {name: value - theirs.parts.get(name, 0.0) for name, value in ours.parts.items()}
    worst = [(name, excess) for name, excess in sorted(more.items(), key=lambda item: -item[1]) if excess > 0][:2]
    reasons = [f"{name} {_signed_seconds(excess)}" for name, excess in worst if excess > 0.002 * theirs.mid]
    saved = best.memory.allocated - estimate.memory.allocated
    if saved > 0.02 * best.memory.allocated:
        reasons.append(f"saves {saved / (1 << 30):.1f} GiB")
    if ours.mid < (1 - SOONER) * theirs.mid:
        reasons.insert(0, f"{100 * (1 - ours.mid / theirs.mid):.1f} % faster")
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
