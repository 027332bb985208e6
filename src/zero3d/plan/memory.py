"""zero3d's own memory: the most that is alive at any instant of a step, on the fullest rank. No torch.

    instant                                   activations                                        windows
    ----------------------------------------  -------------------------------------------------  --------------------
    head and loss                             all kept, in flight; logits, their gradient        head, 2 blocks ahead
    backward of the last blocks               all kept, in flight; the block's transient         its own, 2 moving
    the same, recomputed                      inputs; one segment's interiors and transient      the same
    the embedding's backward                  its gradient                                       what is reduced last
    the end of a backward of inputs           all kept, of the running one too; gradients for W  the same
    the end of a backward of weights          the same                                           the chunk's gradients
    optimizer step                            none                                               casts, or a bucket,
                                                                                                 or sums over copies
    the end of it, records off the device     none                                               one record's scratch

A peak is the maximum over these, never a sum of categories' maxima; `parts` are the bytes at that instant. Bytes of
activations come from `ModelSpec`'s operations (traced, or closed forms); all else from the engine's own arithmetic.

    reserved   1.05 x allocated: blocks of 2 MiB and fragments; an assumption until `calibrate` measures it
    device     0.6 GB context of CUDA and libraries, 0.4 GB communicators where there is more than one rank
    host       of a node: 3 GB per process, the slice that it reads, its records there, buffers of records, inputs of
               recomputed blocks (inputs.py), the copy of saves behind training (saves.py)
    tiers      of a node, those that take no memory of the host: records there, on a disk in two slots each
    ring       3 buffers of the longest record that is updated on the device and kept elsewhere: there all the time
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from zero3d.account.optimizers import state_width
from zero3d.account.states import WIDTHS
from zero3d.account.transients import (
    CopySum,
    Reduction,
    average_scratch,
    gradient_staging,
    master_scratch,
    record_scratch,
    ring_bytes,
    sums_of_copies,
)
from zero3d.activations.policy import Policy
from zero3d.memory.blocks import padded
from zero3d.memory.scratch import update_scratch
from zero3d.pipeline.schedules import Schedule
from zero3d.plan.constants import constant
from zero3d.plan.footprint import Footprint, footprints
from zero3d.plan.in_flight import INPUTS, WEIGHTS, Moment, counted
from zero3d.plan.inputs import ring_here, share_here, slots_on_host
from zero3d.plan.matrices import held as matrices_held
from zero3d.plan.rank_model import RankUnit, chunks_of_rank, first_alike, rank_model, unlike_stages
from zero3d.plan.saves import copy_bytes
from zero3d.plan.spec import APART, ClusterSpec, Memory, ModelSpec, ParallelPlan, Part
from zero3d.plan.states import States, policies, sends_terms, states, states_key, wire_width
from zero3d.plan.windows import Backward, Windows, backwards
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.tiers import DEVICE, HOST, TIERS, is_buffered

IN_STEP = 18  # bytes for an element whose moments of 8 bits are read or written: one in fp32, scratch of the other

RESERVED = constant("zero3d", "reserved")
NORM = constant("zero3d", "norm")
NOTHING = Windows(0.0, 0.0, 0.0)
CONTEXT, COMMUNICATORS = constant("zero3d", "context"), constant("zero3d", "communicators")
NOISE = 4 << 18  # bytes of the table by which moments are rounded to bf16
PROCESS = constant("zero3d", "process")


class Peak(NamedTuple):
    """Bytes at one instant of one rank, beside those that are there all the time."""

    instant: str
    activations: float
    temporary: float
    passed: float
    gathered: float
    bucket: float
    wire: float

    @property
    def total(self) -> float:
        """Return the sum of all of them."""
        return self.activations + self.temporary + self.passed + self.gathered + self.bucket + self.wire


def memory(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec | None = None) -> Memory:
    """Compute the bytes of the fullest rank (of dp ranks the first, which is never less full than the others).

    Raises ConfigError for what the engine refuses.
    """
    ranks = [_rank(model, plan, stage) for stage in _stages(model, plan)]
    rank = max(ranks, key=lambda rank: sum(rank.base.values()) + rank.peak.total)
    peak = rank.peak
    parts = rank.base | {name: getattr(peak, name) for name in Peak._fields[1:]}
    allocated = sum(parts.values())
    reserved = RESERVED * allocated
    device = _shown(reserved, plan)
    on_node = min(plan.world, cluster.per_node if cluster is not None else plan.world)
    largest = max((unit.largest for units in rank.units for unit in units), default=0)
    fullest = max(ranks, key=lambda each: sum(held.total for held in each.shard.away.values())).shard
    on_host = {
        "process": PROCESS,
        "slice": 4.0 * largest,
        "records": sum(float(fullest.at(name).total) for name, row in TIERS.items() if row.on_host),
        "buffers": float(buffer_bytes(plan, fullest)[HOST]),
        "inputs": max(each.inputs for each in ranks),
        "saves": max(float(copy_bytes(model, plan, each.stage)) for each in ranks),
    }
    return Memory(
        float(rank.shard.states.total),
        allocated,
        reserved,
        device,
        on_node * sum(on_host.values()),
        {name: size for name, size in parts.items() if size},
        peak.instant + rank.name,
        {name: on_node * float(fullest.at(name).total) for name in APART},
        _away(fullest),
        {name: size for name, size in on_host.items() if size},
    )


def memory_at_least(model: ModelSpec, plan: ParallelPlan) -> float:
    """Return bytes that the fullest rank's device shows at least: those of the first pipeline stage's fullest instant.

    A part in 10^9 is left out, so that sums in another order are never below. Raises ConfigError as `memory` does.
    """
    rank = _rank(model, plan, 0)
    return (1 - 1e-9) * _shown(RESERVED * (sum(rank.base.values()) + rank.peak.total), plan)


def _shown(reserved: float, plan: ParallelPlan) -> float:
    """Return what a device shows where so many bytes are reserved."""
    return reserved + CONTEXT + (COMMUNICATORS if plan.world > 1 else 0)


def _away(shard: States) -> dict[str, dict[str, float]]:
    """Return the bytes of states off the device, by place and category."""
    return {
        name: {category: float(size) for category, size in held.by_category.items() if size}
        for name, held in shard.away.items()
        if held.total
    }


def buffer_bytes(plan: ParallelPlan, shard: States) -> dict[str, int]:
    """Return what buffers of records take on the device and on the host: rings, and staging of updates on the host.

    A ring is there for what is on a disk, or another tier that the host does not address, and for states that are
    updated on the device, with room for their gradients where those are on the host. Its buffers are where records are
    used, weights and updates on the host there; those on the device have as many on the host beside them, where they
    are of such a tier.
    """
    rings = {kind: ring_bytes(longest) for kind, longest in shard.longest.items()}
    weights = sum(size for kind, size in rings.items() if kind != "optimizer")
    on_host = weights if is_buffered(plan.offload.params) else 0
    own = rings.get("optimizer", 0)
    on_device = own + (NOISE if plan.offload.moments == "bf16" else 0)
    staging = 0
    if plan.offload.gradients_leave and (plan.offload.executor != HOST or plan.offload.fraction < 1):
        wide = WIDTHS[plan.precision].reduced
        staging = gradient_staging(shard.bucket, state_width(wide, plan.offload.gradient_dtype))
    if plan.offload.executor == HOST:
        weight = WIDTHS[plan.precision].weight
        on_device, on_host = 0, on_host + padded((4 + weight) * shard.bucket)
    return {DEVICE: on_device + staging, HOST: on_host + (own if is_buffered(plan.offload.optimizer) else 0)}


def _stages(model: ModelSpec, plan: ParallelPlan) -> list[int]:
    """Return the pipeline stages that may be the fullest.

    Where backwards are whole, a stage whose chunks are like those of the one before holds less than that.
    """
    splits = plan.pp > 1 and Schedule.of(plan.schedule).splits_backward
    return list(range(plan.pp)) if splits else unlike_stages(model, plan)


class _Holding:
    """Computes what a pipeline stage's rank holds and moves, apart from the activations of its micro-batches.

    units     of each of its chunks, in their order
    shard     its model states
    matrices  bytes of those that travel in a step
    moving    buffers that come and go with units, by chunk; still: those where nothing is reduced before the end
    """

    def __init__(self, model: ModelSpec, plan: ParallelPlan, stage: int) -> None:
        self.plan = plan
        self.units = list(rank_model(model, plan, stage).units.values())
        self.shard: States = states(model, plan, stage)
        self.matrices = float(matrices_held(model, plan, stage))
        self.moving = list(backwards(model, plan, stage).values())
        self.still = [_without_wire(moving) for moving in self.moving]
        self.ring = float(buffer_bytes(plan, self.shard)[DEVICE])
        self.held = {category: float(nbytes) for category, nbytes in self.shard.device.by_category.items()}

    @cached_property
    def step(self) -> Peak:
        """Return the instant in which shards are summed over copies, masters cast to weights, or a bucket updated."""
        if self.plan.offload.states:
            return _step(max(self._bucket_scratch(), self.matrices, self._copies))
        width = WIDTHS[self.plan.precision].weight
        units = [unit for units in self.units for unit in units if unit.trainable]
        share = [unit.layout.shard if self.plan.zero.stage > 0 else unit.layout.total for unit in units]
        elements = sum(size for unit, size in zip(units, share, strict=True) if unit.itemsize == width)
        rounds, splits = self.plan.precision == "bf16", self.plan.zero.master == "split"
        scratch = float(rounds * master_scratch(elements, "cuda", splits))
        if OPTIMIZERS[self.plan.optimizer].coded:
            decoded = IN_STEP * update_scratch(sum(share), "cuda")
            scratch = scratch + decoded if splits else max(scratch, decoded)
        if self.plan.averages:
            longest = max(share, default=0)
            scratch = max(scratch, average_scratch(longest, "cuda", WIDTHS[self.plan.precision].reduced))
        return _step(max(scratch, self.matrices, self._copies))

    @property
    def _copies(self) -> float:
        """Return the bytes in which a step's shards are summed over copies; an exact sum's are a reduction's."""
        plan, wide = self.plan, WIDTHS[self.plan.precision].reduced
        if plan.zero.exact or plan.replicate == 1:
            return 0.0
        units = [unit for units in self.units for unit in units if unit.trainable]
        travels = max((wire_width(plan, unit.itemsize, summed=True) for unit in units), default=wide)
        plain = Reduction(plan.replicate, travels, travels != wide, sends_terms(plan, travels), lands=True)
        how = CopySum(plan.replicate, plan.zero.slow_wire, plain, wide)
        return float(sums_of_copies([unit.layout.shard for unit in units], how, "cuda"))

    def _bucket_scratch(self) -> float:
        """Return the scratch in which the longest bucket is updated on the device, copies beside it among it."""
        plan = self.plan
        if plan.offload.executor == HOST and plan.offload.fraction == 1:
            return 0.0
        copies = WIDTHS[plan.precision].weight if plan.offload.params != "none" else 0
        splits, casts = plan.zero.master == "split", plan.precision == "bf16" and plan.zero.master == "fp32"
        narrow = plan.offload.gradient_dtype == "bf16"
        scratch = record_scratch(self.shard.bucket, "cuda", splits, plan.offload.moments == "bf16", casts, narrow)
        return float(scratch + copies * self.shard.bucket)


def _without_wire(moving: Backward) -> Backward:
    """Return the buffers of a backward in which nothing is reduced before its end."""
    return Backward(tuple(windows._replace(wire=0.0) for windows in moving.turns), NOTHING)


@lru_cache(maxsize=4096)
def _holding(model: ModelSpec, plan: ParallelPlan, stage: int) -> _Holding:
    """Return what all plans with this key have alike. plan: a `_holding_key`."""
    return _Holding(model, plan, stage)


@lru_cache(maxsize=1 << 14)
def _holding_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose ranks hold the same: states, and where they are."""
    return states_key(plan).replace(offload=replace(plan.offload, activations="none"))


@lru_cache(maxsize=256)
def _rank(model: ModelSpec, plan: ParallelPlan, stage: int) -> _Rank:
    """Return a rank; for a while, so that who asked for the first one's bytes does not compute them again."""
    return _Rank(model, plan, stage)


class _Rank:
    """A rank of the pp axis, with what its instants are made of.

    shard   its model states
    base    bytes that are there all the time
    """

    def __init__(self, model: ModelSpec, plan: ParallelPlan, stage: int) -> None:
        self.plan, self.stage = plan, stage
        self._holding = holding = _holding(model, _holding_key(plan), first_alike(model, plan, stage))
        self.chunks = chunks_of_rank(model, plan, stage)
        self.shard = holding.shard
        self._turns = {number: turn for turn, number in enumerate(self.chunks)}
        self.name = f", pipeline stage {stage} of {plan.pp}" if plan.pp > 1 else ""
        by_part = footprints(model, plan)
        self._footprints = {number: [by_part[part] for part in parts] for number, parts in self.chunks.items()}
        self._fullest: dict[tuple[int, bool], int] = {}  # by chunk, and whether it reduces
        self._every_micro_batch = policies(plan)[1] == "every_micro_batch"
        self._splits = plan.pp > 1 and Schedule.of(plan.schedule).splits_backward
        tokens = plan.tokens(model.length)
        self._hidden = float(tokens * model.hidden * WIDTHS[plan.precision].weight)
        self._norm = NORM * tokens * model.hidden / (plan.tp if plan.mesh.sequence_parallel else 1)
        self.inputs = slots_on_host(model, plan, stage, self.chunks)
        batch = 16.0 * plan.micro_batch * model.length * plan.accumulate
        self.base = holding.held | {"ring": holding.ring + ring_here(model, plan), "batch": batch}

    @property
    def units(self) -> Sequence[Sequence[RankUnit]]:
        """Return its units, by chunk."""
        return self._holding.units

    @cached_property
    def peak(self) -> Peak:
        """Return the fullest instant."""
        return max(self.peaks(), key=lambda peak: peak.total)

    def _between(self, number: int) -> float:
        """Return a micro-batch's bytes between a chunk's two backwards; chunk 0 has but one, that of weights."""
        footprints = self._footprints[number]
        kept = sum(footprint.kept for footprint in footprints)
        if number == 0:
            return kept
        again = sum(footprint.skipped for footprint in footprints)
        return kept + again + sum(footprint.for_weights - footprint.dropped for footprint in footprints)

    # --- instants -------------------------------------------------------------------------------

    def peaks(self) -> Iterator[Peak]:
        """Yield the instants that may be the fullest."""
        kept = {number: sum(f.kept for f in footprints) for number, footprints in self._footprints.items()}
        between = {number: self._between(number) for number in self.chunks} if self._splits else kept
        fullest: dict[tuple[int, str, bool], tuple[float, float, Moment]] = {}
        sizes, hidden = [(kept[number], between[number]) for number in self.chunks], self._hidden
        for moment, turn, flights, passed in counted(self.plan, self.stage, *self._passes()):
            others = -sizes[turn][0]
            for (whole, waiting), (forward, half) in zip(flights, sizes, strict=True):
                others += whole * forward + waiting * half
            key, bytes_ = (turn, moment.kind, moment.final or self._every_micro_batch), passed * hidden
            if key not in fullest or fullest[key][0] < others + bytes_:
                fullest[key] = others + bytes_, bytes_, moment
        for total, bytes_, moment in fullest.values():
            yield from self._of(moment, total - bytes_, bytes_)
        yield self._holding.step

    def _passes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Count, by chunk, hidden states beside what is kept of a micro-batch in flight, and gradients in its backward.

        That is what came in from another rank, unless it is the kept input of a recomputed block as it is, and what
        goes out to one. The gradient comes from there, too, in the running backward and where one of inputs is over; of
        each of a rank's further chunks a hidden state is early. Where a V turns, both chunks are here and nothing is
        passed on.
        """
        chunks, last = self.chunks, self.plan.pp * len(self.chunks) - 1
        recomputed = Policy.of(self.plan.activations).kind in ("full", "every") and share_here(self.plan) == 1
        receives = [number > 0 and number - 1 not in chunks and not recomputed for number in chunks]
        sends = [number < last and number + 1 not in chunks for number in chunks]
        states = tuple(came + goes for came, goes in zip(receives, sends, strict=True))
        return states, tuple(map(int, sends))

    def _of(self, moment: Moment, others: float, passed: float) -> Iterator[Peak]:
        """Yield the instants of one backward. Chunk 0 has none of inputs, so that of its weights is a whole one.

        others   bytes that other micro-batches keep
        passed   of hidden states and gradients beside what is kept
        """
        if moment.chunk > 0 and moment.kind == INPUTS:
            return self._backward_of_inputs(moment, others, passed)
        if moment.chunk > 0 and moment.kind == WEIGHTS:
            return self._backward_of_weights(moment, others, passed)
        return iter(()) if moment.kind == INPUTS else self._whole(moment, others, passed)

    def _whole(self, moment: Moment, others: float, passed: float) -> Iterator[Peak]:
        """Yield the fullest instant of a backward that lets go of what it has used."""
        order = self._backwards(moment)
        alive = others + sum(footprint.kept for _, footprint, _ in order)
        for at, (part, footprint, windows) in enumerate(order):
            if at == self._fullest_part(moment.chunk, self._reduces(moment)):
                yield _backward(part, footprint, alive, passed, windows)
            alive -= footprint.kept
        yield Peak("end of the backward", others, 0.0, passed, *self._moving(moment).end)

    def _fullest_part(self, chunk: int, reduces: bool) -> int:
        """Return which part's backward is the fullest, whatever other micro-batches keep: all have that."""
        if (chunk, reduces) not in self._fullest:
            moving = (self._holding.moving if reduces else self._holding.still)[self._turns[chunk]]
            footprints = self._footprints[chunk][::-1]
            alive, totals = sum(footprint.kept for footprint in footprints), []
            for footprint, windows in zip(footprints, moving.turns, strict=True):
                totals.append(alive + footprint.again + max(footprint.transients) + sum(windows))
                alive -= footprint.kept
            self._fullest[chunk, reduces] = totals.index(max(totals))
        return self._fullest[chunk, reduces]

    def _backward_of_inputs(self, moment: Moment, others: float, passed: float) -> Iterator[Peak]:
        """Yield the instants of a backward of inputs, which keeps all, and gradients for that of weights besides."""
        order = self._backwards(moment)
        alive = others + sum(footprint.kept for _, footprint, _ in order)
        for at, (part, footprint, windows) in enumerate(order):
            if part.kind == "head" or at + 1 == len(order):
                yield _backward(part, footprint, alive, passed, windows)
            alive += footprint.skipped + footprint.for_weights - footprint.dropped
        yield Peak("end of the backward of inputs", alive, self._norm, passed, *NOTHING)

    def _backward_of_weights(self, moment: Moment, others: float, passed: float) -> Iterator[Peak]:
        """Yield the fullest of a backward of weights: gradients pile up till its end, what they are made of goes."""
        order = self._backwards(moment)
        given = sum(footprint.for_weights for _, footprint, _ in order)
        grads = sum(u.layout.numel * u.itemsize for u in self.units[self._turns[moment.chunk]] if u.trainable)
        alive = others + self._between(moment.chunk) - given
        yield Peak("backward of weights", alive, max(given, grads), passed, *order[0][2])

    def _backwards(self, moment: Moment) -> list[tuple[Part, Footprint, Windows]]:
        """Return a chunk's parts in the order of backwards, with the buffers of units that move.

        Nothing is reduced before the last micro-batch where gradients are summed here.
        """
        parts, footprints = self.chunks[moment.chunk][::-1], self._footprints[moment.chunk][::-1]
        return list(zip(parts, footprints, self._moving(moment).turns, strict=True))

    def _moving(self, moment: Moment) -> Backward:
        moving = self._holding.moving if self._reduces(moment) else self._holding.still
        return moving[self._turns[moment.chunk]]

    def _reduces(self, moment: Moment) -> bool:
        return moment.final or self._every_micro_batch


def _backward(part: Part, footprint: Footprint, alive: float, passed: float, windows: Windows) -> Peak:
    """Return the fullest instant of a part's backward. alive: bytes of activations that are kept as it begins."""
    instant = _instant(part, footprint.again > 0)
    return Peak(instant, alive + footprint.again, max(footprint.transients), passed, *windows)


@lru_cache(maxsize=4096)
def _instant(part: Part, again: bool) -> str:
    """Name the instant. again: the part was recomputed for it."""
    names = {"embedding": "backward of the embedding", "head": "logits and loss"}
    after = " after its recomputation" if again else ""
    return names.get(part.kind) or f"backward of {part.units[0].name if part.units else 'a block'}{after}"


def _step(scratch: float) -> Peak:
    """Return the instant of the optimizer's step."""
    return Peak("optimizer step", 0.0, 0.0, 0.0, *NOTHING._replace(wire=scratch))
