"""zero3d's own memory: the most that is alive at any instant of a step, on the fullest rank. No torch.

    instant                                   activations                                        windows
    ----------------------------------------  -------------------------------------------------  --------------------
    the loss                                  all kept, in flight; logits, their gradient        head
    the head's own backward                   the same; gradients of its weights                 head, 2 blocks ahead
    backward of the last blocks               all kept, in flight; the block's transient         its own, 2 moving
    the same, recomputed                      inputs; one segment's interiors and transient      the same
    the embedding's backward                  its gradient                                       what is reduced last
    the end of a backward of inputs           all kept, of the running one too; gradients for W  the same
    the end of a backward of weights          the same                                           the chunk's gradients
    forward of a vision tower                 all kept, in flight; what is alive of the tower's  its own, 2 moving
    optimizer step                            none                                               casts, or a bucket,
                                                                                                 or sums over copies,
                                                                                                 or matrices of Muon
    the end of it, records off the device     none                                               one record's scratch
    between two steps                         none                                               none

Gradients of model states are there in full from a step's second backward to its end; in the first, those of the units
that it has come to (`windows.Backward.gradients`). Between two steps there are none, or all where updates are deferred.

A peak is the maximum over these, never a sum of categories' maxima; `parts` are the bytes at that instant. Bytes of
activations come from `ModelSpec`'s operations (traced, or closed forms); all else from the engine's own arithmetic.

    reserved   1.05 x allocated: blocks of 2 MiB and fragments; an assumption until `calibrate` measures it
    device     0.6 GB context of CUDA and libraries; NCCL's communicators, by the process groups of the mesh's axes
    host       of a node: 3 GB per process, the slice that it reads, its records there, buffers of records, inputs of
               recomputed blocks (inputs.py), the copy of saves behind training (saves.py)
    tiers      of a node, those that take no memory of the host: records there, on a disk in two slots each
    ring       3 buffers of the longest record that is updated on the device and kept elsewhere: there all the time
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, reduce
from itertools import accumulate, compress
from math import inf
from operator import add, sub
from typing import NamedTuple

from zero3d.account.states import GradientBytes, gradient_bytes
from zero3d.account.transients import average_scratch, gradient_staging, master_scratch, record_scratch, ring_bytes
from zero3d.activations.policy import Policy
from zero3d.distributed.degrees import FEW_NUMBERS, Degrees
from zero3d.memory.blocks import padded
from zero3d.memory.scratch import update_scratch
from zero3d.pipeline.schedules import Schedule
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import OPTIMIZERS
from zero3d.spec.tiers import DEVICE, HOST, TIERS, is_buffered
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.decided import node_of, policy_of
from zero3d.tools.plan.footprint import Footprint, Run, run_of
from zero3d.tools.plan.in_flight import INPUTS, WEIGHTS, Rivals, Start, rivals
from zero3d.tools.plan.inputs import on_host, ring_here, share_here, slots_on_host
from zero3d.tools.plan.matrices import working as bytes_of_matrices
from zero3d.tools.plan.rank_model import (
    RankUnit,
    chunks_of_rank,
    first_alike,
    partition_key,
    pipeline_key,
    rank_model,
    unlike_stages,
)
from zero3d.tools.plan.saves import copy_bytes
from zero3d.tools.plan.spec import APART, ClusterSpec, Memory, ModelSpec, ParallelPlan, Part
from zero3d.tools.plan.states import States, check_rules, states, states_key
from zero3d.tools.plan.windows import NOTHING, Backward, Windows, backwards, seen_with, sums_bytes

IN_STEP = 18  # bytes for an element whose moments of 8 bits are read or written: one in fp32, scratch of the other

RESERVED = constant("zero3d", "reserved")
NORM = constant("zero3d", "norm")
NO_GRADIENTS = GradientBytes(0.0, 0.0)
CONTEXT = constant("zero3d", "context")
COMMUNICATOR, NARROW = constant("zero3d", "communicator"), constant("zero3d", "narrow communicator")
NOISE = 4 << 18  # bytes of the table by which moments are rounded to bf16
PROCESS = constant("zero3d", "process")


class Peak(NamedTuple):
    """Bytes at one instant of one rank, beside those that are there all the time.

    gradients  of model states, which come and go with a step; padding: of their storages
    """

    instant: str
    activations: float
    temporary: float
    passed: float
    gathered: float
    bucket: float
    wire: float
    gradients: float
    padding: float

    @property
    def total(self) -> float:
        """Return the sum of all of them."""
        moving = self.passed + self.gathered + self.bucket + self.wire
        return self.activations + self.temporary + moving + self.gradients + self.padding


def memory(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec | None = None) -> Memory:
    """Compute the bytes of the fullest rank (of dp ranks the first, which is never less full than the others).

    Raises ConfigError for what the engine refuses.
    """
    ranks = [ranks_of_stages(model, plan, stages) for stages in fullest_stages(model, plan)]
    rank, (peak, stage) = _fullest(ranks)
    parts = _parts(rank.base, peak)
    allocated = sum(parts.values())
    reserved = RESERVED * allocated
    device = shown_bytes(reserved, plan, cluster)
    on_node = min(plan.world, cluster.per_node if cluster is not None else plan.world)
    largest = max((unit.largest for units in rank.units for unit in units), default=0)
    fullest = max(ranks, key=lambda each: sum(held.total for held in each.shard.away.values())).shard
    on_host = {
        "process": PROCESS,
        "slice": 4.0 * largest,
        "records": sum(float(fullest.at(name).total) for name, row in TIERS.items() if row.on_host),
        "buffers": float(buffer_bytes(plan, fullest)[HOST]),
        "inputs": max(each.inputs() for each in ranks),
        "saves": max(float(copy_bytes(model, plan, each.stages[0])) for each in ranks),
    }
    return Memory(
        float(rank.shard.states.total),
        allocated,
        reserved,
        device,
        on_node * sum(on_host.values()),
        {name: size for name, size in parts.items() if size},
        peak.instant + (f", pipeline stage {stage} of {plan.pp}" if plan.pp > 1 else ""),
        {name: on_node * float(fullest.at(name).total) for name in APART},
        _away(fullest),
        {name: size for name, size in on_host.items() if size},
    )


def instants(model: ModelSpec, plan: ParallelPlan) -> list[tuple[str, dict[str, float]]]:
    """Return the bytes by category at each instant of a step, on the fullest rank; the last one is between two steps.

    There are gradients then where states are off the device, whose updates are made behind the next forward.
    Raises ConfigError for what the engine refuses.
    """
    rank, _ = _fullest([ranks_of_stages(model, plan, stages) for stages in fullest_stages(model, plan)])
    return [(peak.instant, _parts(rank.base, peak)) for peak in (*rank.instants(), rank.rest)]


def _parts(base: Mapping[str, float], peak: Peak) -> dict[str, float]:
    """Return the bytes at an instant by category."""
    return dict(base) | {name: base.get(name, 0.0) + getattr(peak, name) for name in Peak._fields[1:]}


def _fullest(ranks: Sequence[Ranks]) -> tuple[Ranks, _Fullest]:
    """Return the ranks that are the fullest, and when; of several the first. Those that cannot be are not looked at."""
    found: list[tuple[float, int, Ranks]] = []
    for rank in sorted(ranks, key=lambda rank: len(rank.stages)):
        base = sum(rank.base.values())
        if len(rank.stages) == 1 or base + rank.at_most() >= max(total for total, *_ in found):
            found.append((base + rank.fullest.peak.total, -rank.fullest.stage, rank))
    rank = max(found, key=lambda each: each[:2])[2]
    return rank, rank.fullest


def batch_bytes(model: ModelSpec, plan: ParallelPlan) -> float:
    """Return the bytes of a step's token ids, labels and what goes with them, and of the pixels of its images."""
    return float((16 * model.length + model.pixels) * plan.micro_batch * plan.accumulate)


def shown_bytes(reserved: float, plan: ParallelPlan, cluster: ClusterSpec | None) -> float:
    """Return what a device shows where so many bytes are reserved."""
    measured = None if cluster is None else cluster.communicator
    on_node = plan.world if cluster is None else cluster.per_node
    return reserved + CONTEXT + communicators(plan, on_node, COMMUNICATOR if measured is None else measured)


def communicators(plan: ParallelPlan, on_node: int, usual: float = COMMUNICATOR) -> float:
    """Return the bytes of a rank's communicators: one for each process group that an engine makes.

    on_node  ranks of a node
    usual    bytes of one that carries tensors
    """
    return _communicators(plan.degrees, plan.zero.communicators or 2, node_of(plan, on_node), plan.replay > 0, usual)


@lru_cache(maxsize=1024)
def _communicators(degrees: Degrees, per_axis: int, node: int, replay: bool, usual: float) -> float:
    groups = degrees.process_groups(per_axis, node, replay=replay)
    return sum(count * (NARROW if name in FEW_NUMBERS else usual) for name, count in groups.items())


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
    if plan.offload.executor != HOST or plan.offload.fraction < 1:
        staging = gradient_staging(shard.bucket, policy_of(plan))
    if plan.offload.executor == HOST:
        on_device, on_host = 0, on_host + padded((4 + plan.compute.itemsize) * shard.bucket)
    return {DEVICE: on_device + staging, HOST: on_host + (own if is_buffered(plan.offload.optimizer) else 0)}


def fullest_stages(model: ModelSpec, plan: ParallelPlan) -> list[tuple[int, ...]]:
    """Return the pipeline stages that may be the fullest, those together whose ranks differ in their micro-batches.

    Where backwards are whole, a stage whose chunks are like those of the one before holds less than that.
    """
    if plan.pp == 1 or not Schedule.of(plan.schedule).splits_backward:
        return [(stage,) for stage in unlike_stages(model, plan)]
    together: dict[tuple[bool, int], list[int]] = {}
    for stage in range(plan.pp):
        end = stage in (0, plan.pp - 1)  # from one side of which nothing comes
        together.setdefault((end, stage if end else first_alike(model, plan, stage)), []).append(stage)
    return [tuple(stages) for stages in together.values()]


class Holding:
    """Computes what a pipeline stage's rank holds and moves, apart from the activations of its micro-batches.

    units     of each of its chunks, in their order
    shard     its model states
    """

    def __init__(self, model: ModelSpec, plan: ParallelPlan, stage: int) -> None:
        self.plan, self._of = plan, (model, plan, stage)
        self.units = list(rank_model(model, plan, stage).units.values())
        self.shard: States = states(model, plan, stage)
        self.ring = float(buffer_bytes(plan, self.shard)[DEVICE])
        held = {category: float(nbytes) for category, nbytes in self.shard.device.by_category.items()}
        trained = [(unit, many) for unit, many in rank_model(model, plan, stage).unlike if unit.trainable]
        padding = sum(gradient_bytes(unit.plan(plan), unit.layout).padding * many for unit, many in trained)
        self.all = GradientBytes(held["gradients"], padding)
        self.held = held | {"gradients": 0.0, "padding": held["padding"] - self.all.padding}

    @cached_property
    def always(self) -> float:
        """Return the bytes that are there all the time."""
        return sum(self.held.values()) + self.ring

    @cached_property
    def at_most(self) -> float:
        """Return the bytes of gradients and of what moves that are there at most at any instant of backwards."""
        return sum(self.all) + max(max(*each.nbytes, sum(each.loss), sum(each.end)) for each in self.moving)

    @cached_property
    def matrices(self) -> float:
        """Return the bytes of matrices that travel in a step, or are made orthogonal."""
        return float(bytes_of_matrices(*self._of))

    @cached_property
    def moving(self) -> list[Backward]:
        """Return the buffers that come and go with units, by chunk."""
        return list(backwards(*self._of).values())

    @cached_property
    def gradients(self) -> list[int]:
        """Return the bytes of all gradients of a chunk's weights, by chunk."""
        return [sum(u.layout.numel * u.itemsize for u in units if u.trainable) for units in self.units]

    @cached_property
    def still(self) -> list[Backward]:
        """Return the same where nothing is reduced before the end."""
        return [moving.without_wire() for moving in self.moving]

    @cached_property
    def step(self) -> Peak:
        """Return the instant in which shards are summed over copies, masters cast to weights, or a bucket updated."""
        if self.plan.offload.states:
            return self._step(max(self._bucket_scratch(), self.matrices, self._copies))
        units = [unit for units in self.units for unit in units if unit.trainable]
        policy = policy_of(self.plan)
        share = [unit.layout.shard if policy.row.shards_optimizer else unit.layout.total for unit in units]
        cast = [unit.kind.dtype == policy.compute and not unit.plan(self.plan).from_masters for unit in units]
        elements = sum(compress(share, cast))
        splits = policy.splits
        scratch = float((splits or policy.casts) * master_scratch(elements, "cuda", splits))
        if OPTIMIZERS[self.plan.optimizer].coded:
            decoded = IN_STEP * update_scratch(sum(share), "cuda")
            scratch = scratch + decoded if splits else max(scratch, decoded)
        if self.plan.averages:
            longest = max(share, default=0)
            scratch = max(scratch, average_scratch(longest, "cuda", policy.master.itemsize))
        return self._step(max(scratch, self.matrices, self._copies))

    def _step(self, scratch: float) -> Peak:
        """Return the instant of the optimizer's step."""
        return Peak("optimizer step", 0.0, 0.0, 0.0, *NOTHING._replace(wire=scratch), *self.all)

    @property
    def _copies(self) -> float:
        """Return the bytes in which a step's shards are summed over copies."""
        return sums_bytes([unit for units in self.units for unit in units if unit.trainable], self.plan)

    def _bucket_scratch(self) -> float:
        """Return the scratch in which the longest bucket is updated on the device, copies beside it among it."""
        plan = self.plan
        if plan.offload.executor == HOST and plan.offload.fraction == 1:
            return 0.0
        policy = policy_of(plan)
        copies = policy.compute.itemsize * policy.params
        how = policy.splits, plan.offload.moments == "bf16", policy.casts, policy.narrow
        return float(record_scratch(self.shard.bucket, "cuda", *how) + copies * self.shard.bucket)


@lru_cache(maxsize=4096)
def _holding(model: ModelSpec, plan: ParallelPlan, stage: int) -> Holding:
    """Return what all plans with this key have alike. plan: a `_holding_key`."""
    return Holding(model, plan, stage)


def holding_of(model: ModelSpec, plan: ParallelPlan, stage: int) -> Holding:
    """Return what a stage's rank holds and moves. stage: the first of those that are alike."""
    return _holding(model, _holding_key(plan), stage)


@lru_cache(maxsize=1 << 14)
def _holding_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all whose ranks hold the same: states, and where they are."""
    key = states_key(plan).having(offload=_without_inputs(plan.offload))
    if not Schedule.of(plan.schedule).splits_backward:
        return key
    check_rules(plan)  # which know such schedules, and states do not
    return key.having(mesh=_mesh_under(key.mesh, partition_key(plan).schedule))


@lru_cache(maxsize=1024)
def _mesh_under(mesh: Mesh, schedule: str) -> Mesh:
    return replace(mesh, schedule=schedule)


@lru_cache(maxsize=256)
def _without_inputs(offload: Offload) -> Offload:
    return replace(offload, activations="none")


class _Activations:
    """Adds up what a micro-batch keeps in a rank's model chunks: alike where these differ in names alone.

    Lists are by the place of a chunk among the rank's.
    footprints  of its parts, in the order of backwards
    kept        bytes from a micro-batch's forward to its backward, in the order of forwards
    alive       the same, added up in the order of backwards
    begins      of each part, the place of the one with which the backward of its recomputed segment begins: what has
                been recomputed is all there then, and gradients of its other blocks are not
    """

    def __init__(self, run: Run, chunks: Sequence[Sequence[Part]]) -> None:
        """Look up what each part keeps. chunks: their parts."""
        by_part = run.footprints
        self._forwards = [[by_part[part] for part in parts] for parts in chunks]
        self.footprints = [footprints[::-1] for footprints in self._forwards]
        self.kept = [sum([each.kept for each in footprints]) for footprints in self._forwards]
        self.alive = [sum([each.kept for each in footprints]) for footprints in self.footprints]
        self.begins = [_begins(parts, run.policy.every or 1) for parts in chunks]

    @cached_property
    def between(self) -> list[float]:
        """Return the bytes between a micro-batch's two backwards, of inputs and of weights."""
        return [
            kept
            + sum(each.skipped for each in footprints)
            + sum(each.for_weights - each.dropped for each in footprints)
            for kept, footprints in zip(self.kept, self._forwards, strict=True)
        ]

    @cached_property
    def with_interiors(self) -> list[list[float]]:
        """Return the bytes of this micro-batch as each part's backward begins, with what recomputation brings back."""
        return [
            [
                before + footprint.again
                for before, footprint in zip(
                    accumulate([each.kept for each in footprints[:-1]], sub, initial=alive), footprints, strict=True
                )
            ]
            for alive, footprints in zip(self.alive, self.footprints, strict=True)
        ]

    @cached_property
    def with_transients(self) -> list[list[float]]:
        """Return the bytes of this micro-batch at the fullest instant of each part's backward."""
        return [
            [before + footprint.transient for before, footprint in zip(nbytes, footprints, strict=True)]
            for nbytes, footprints in zip(self.with_interiors, self.footprints, strict=True)
        ]

    def before(self, turn: int, at: int, alive: float) -> float:
        """Return what is kept as a part's backward begins, of so many bytes as the chunk's begins."""
        return reduce(sub, [each.kept for each in self.footprints[turn][:at]], alive)

    def fullest(self, turn: int, moving: Backward, first: bool) -> int:
        """Return which part's backward is the fullest, whatever other micro-batches keep: all have that.

        first  it is a step's first one, in which gradients come
        """
        nbytes = list(map(add, self.with_transients[turn], moving.nbytes))
        nbytes[0] = max(nbytes[0], self.alive[turn] + self.footprints[turn][0].loss + sum(moving.loss))
        if first:
            come = [sum(gradients) for gradients in moving.gradients]
            nbytes = [there + come[at] for there, at in zip(nbytes, self.begins[turn], strict=True)]
        return nbytes.index(max(nbytes))


def _begins(parts: Sequence[Part], length: int) -> Sequence[int]:
    """Return the places of `_Activations.begins`, in the order of backwards. length: blocks of a segment."""
    places = range(len(parts))
    if length == 1:
        return places
    blocks = [place for place in places if parts[place].kind == "block"]
    last = {place: blocks[min(len(blocks), (number // length + 1) * length) - 1] for number, place in enumerate(blocks)}
    return [len(parts) - 1 - last.get(place, place) for place in reversed(places)]


@lru_cache(maxsize=1024)
def _activations(run: Run, pipeline: ParallelPlan, stage: int) -> _Activations:
    """Return what ranks have alike whose chunks are like those of this one. pipeline: of rank_model's key."""
    return _Activations(run, list(chunks_of_rank(run.model, pipeline, stage).values()))


@lru_cache(maxsize=256)
def ranks_of_stages(model: ModelSpec, plan: ParallelPlan, stages: tuple[int, ...]) -> Ranks:
    """Return ranks; for a while, so that who asked for the first one's bytes does not compute them again."""
    return Ranks(model, plan, stages)


def _sizes(activations: _Activations, numbers: Sequence[int], plan: ParallelPlan) -> list[tuple[float, float]]:
    """Return a micro-batch's bytes before its backward, and between its two, by chunk. numbers: of these chunks.

    Chunk 0 has but one, that of weights.
    """
    splits = plan.pp > 1 and Schedule.of(plan.schedule).splits_backward
    halves = activations.between if splits else activations.kept
    whole = [
        kept if number == 0 else half for number, kept, half in zip(numbers, activations.kept, halves, strict=True)
    ]
    return list(zip(activations.kept, whole, strict=True))


class _Fullest(NamedTuple):
    """The fullest instant of ranks, and the pipeline stage of the one that has it."""

    peak: Peak
    stage: int


class Span(NamedTuple):
    """Bounds of the bytes of activations at an instant, gradients of weights left out.

    least    that there are at the fullest one; later: at the fullest one when all gradients are there
    most     than which there are no more
    weights  than which there are no more beside all gradients of a chunk's weights, in a backward of weights
    """

    least: float
    later: float
    most: float
    weights: float


class _Running(NamedTuple):
    """A backward that begins.

    turn     of which of a rank's chunks
    reduces  gradients are reduced in it
    start    when
    others   bytes that other micro-batches keep
    passed   those of hidden states and gradients beside what is kept
    """

    turn: int
    reduces: bool
    start: Start
    others: float
    passed: float


class Ranks:
    """Ranks of the pp axis whose chunks differ in names alone, with what their instants are made of.

    stages  of a pipeline; where a schedule's backwards are whole it is one
    """

    def __init__(self, model: ModelSpec, plan: ParallelPlan, stages: tuple[int, ...]) -> None:
        self.model, self.plan = model, plan
        self.stages = stages
        self._alike = first_alike(model, plan, stages[0])
        self._chunks = {stages[0]: chunks_of_rank(model, plan, stages[0])}
        self._numbers = list(self._chunks[stages[0]])
        self._every_micro_batch = policy_of(plan).often
        tokens = plan.tokens(model.length)
        self._hidden = float(tokens * model.hidden * plan.compute.itemsize)
        self._norm = NORM * tokens * model.hidden / (plan.tp if plan.mesh.sequence_parallel else 1)

    @cached_property
    def _holding(self) -> Holding:
        return holding_of(self.model, self.plan, self._alike)

    @property
    def shard(self) -> States:
        """Return the model states of each."""
        return self._holding.shard

    @cached_property
    def base(self) -> dict[str, float]:
        """Return the bytes that are there all the time."""
        ring = self._holding.ring + ring_here(self.model, self.plan)
        return self._holding.held | {"ring": ring, "batch": batch_bytes(self.model, self.plan)}

    @property
    def units(self) -> Sequence[Sequence[RankUnit]]:
        """Return the units of each, by chunk."""
        return self._holding.units

    @cached_property
    def _activations(self) -> _Activations:
        """Return what a micro-batch keeps."""
        return _activations(run_of(self.model, self.plan), pipeline_key(self.plan), self._alike)

    def inputs(self) -> float:
        """Return the bytes of inputs on the host, of the rank that has most there."""
        model, plan = self.model, self.plan
        if not on_host(plan):
            return 0.0
        return max(slots_on_host(model, plan, stage, chunks_of_rank(model, plan, stage)) for stage in self.stages)

    @cached_property
    def _sizes(self) -> list[tuple[float, float]]:
        """Return a micro-batch's bytes before its backward, and between its two, by chunk."""
        return _sizes(self._activations, self._numbers, self.plan)

    # --- instants -------------------------------------------------------------------------------

    @cached_property
    def fullest(self) -> _Fullest:
        """Return the fullest instant; of several the first stage's."""
        instants = [_Fullest(peak, running.start.stage) for running in self._backwards() for peak in self._of(running)]
        instants += [_Fullest(peak, self.stages[0]) for peak in (*self._seeing, self._holding.step)]
        return max(instants, key=lambda each: (each.peak.total, -each.stage))

    def instants(self) -> Iterator[Peak]:
        """Yield the instants of the fullest backward, in their order, then the optimizer's step."""
        running = max(self._backwards(), key=lambda each: max((peak.total for peak in self._of(each)), default=0.0))
        yield from self._seeing
        if running.start.moment.chunk > 0 and running.start.moment.kind in (INPUTS, WEIGHTS):
            yield from self._of(running)
        else:
            for at in range(len(self._parts(running))):
                yield from self._of_part(running, at)
            yield self._end_of_whole(running)
        yield self._holding.step

    @cached_property
    def _seeing(self) -> tuple[Peak, ...]:
        """Return the fullest instant of a vision tower's forward, where it is on these ranks; others' inputs wait."""
        model, plan = self.model, self.plan
        if not model.patches or 0 not in self.stages:
            return ()
        waiting = (min(plan.pp, plan.accumulate) - 1) * self._sizes[0][0]
        alive = model.seeing * plan.micro_batch * model.length * max(1.0, plan.compute.itemsize / 2)
        gradients = self._holding.all if plan.accumulate > 1 else NO_GRADIENTS
        return (Peak("forward of the vision tower", waiting, alive, 0.0, *seen_with(model, plan), *gradients),)

    @property
    def rest(self) -> Peak:
        """Return the instant between two steps."""
        gradients = self._holding.all if self.plan.offload.states else NO_GRADIENTS
        return Peak("between two steps", 0.0, 0.0, 0.0, *NOTHING, *gradients)

    def _backwards(self) -> Iterable[_Running]:
        """Return the backwards than whose beginnings none alike has more bytes.

        A group has at most what it would have were all of its micro-batches of the chunk that keeps most.
        """
        sizes, hidden = self._sizes, self._hidden
        most, most_half = self._most
        fullest: dict[tuple[int, str, bool, tuple[bool, ...]], _Running] = {}
        for turn, kind, final, come, groups, _ in self._rivals:
            reduces, own = final or self._every_micro_batch, sizes[turn][0]
            key = turn, kind, reduces, come
            best = fullest.get(key)
            top, first = (-inf, 0) if best is None else (best.others + best.passed, best.start.number)
            bounds = [whole * most + waiting * most_half + passed * hidden for whole, waiting, passed, _ in groups]
            for place in sorted(range(len(groups)), key=bounds.__getitem__, reverse=True):
                if (1 + 1e-9) * bounds[place] - own < top:
                    break
                passed = groups[place].passed * hidden
                for start in groups[place].starts:
                    others = -own
                    for (alive, waits), (forward, half) in zip(start.flights, sizes, strict=True):
                        others += alive * forward + waits * half
                    total = others + passed
                    if total > top or (total == top and start.number < first):
                        top, first = total, start.number
                        fullest[key] = _Running(turn, reduces, start, others, passed)
        return fullest.values()

    @cached_property
    def _rivals(self) -> list[Rivals]:
        return rivals(self.plan, self.stages, *self._passes())

    @cached_property
    def _most(self) -> tuple[float, float]:
        """Return the most that a micro-batch has in any chunk, before its backward and between its two."""
        forward, half = zip(*self._sizes, strict=True)
        return max(forward), max(half)

    def at_most(self) -> float:
        """Return bytes that `fullest` has at most, for less work: were each kind of moment that of all maxima.

        A part in 10^9 is added, so that sums in another order are never above.
        """
        most, most_half = self._most
        found = [peak.total for peak in (*self._seeing, self._holding.step)]
        for turn, _, final, _, groups, (flights, waiting, passed) in self._rivals:
            others = flights * most + waiting * max(0.0, most_half - most) - self._sizes[turn][0]
            reduces, start = final or self._every_micro_batch, groups[0].starts[0]
            running = _Running(turn, reduces, start, others, passed * self._hidden)
            found += [peak.total for peak in self._of(running)]
        return (1 + 1e-9) * max(found)

    def span(self) -> Span:
        """Return bounds of the bytes of activations at the fullest instants, for less work than these take."""
        activations = self._activations
        least = later = most = weights = 0.0
        for turn, _, start, others, passed in self._backwards():
            footprints, moment, alive = activations.footprints[turn], start.moment, activations.alive[turn]
            low = high = self._sizes[turn][1]
            if moment.chunk > 0 and moment.kind == WEIGHTS:
                given = sum(each.for_weights for each in footprints)
                weights = max(weights, others + passed + low - given)
            elif moment.chunk > 0 and moment.kind == INPUTS:
                low = alive + sum(each.skipped + each.for_weights for each in footprints) + self._norm
                high = low + max(max(each.again + each.transient, each.loss) for each in footprints)
            else:
                loss = alive + footprints[0].loss
                low = max(loss, *activations.with_interiors[turn])
                high = max(loss, *activations.with_transients[turn])
            least, most = max(least, others + passed + low), max(most, others + passed + high)
            later = max(later, others + passed + low) if all(moment.come) else later
        return Span(least, later, most, weights)

    def _passes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Count, by chunk, hidden states beside what is kept of a micro-batch in flight, and gradients in its backward.

        That is what came in from another rank, unless it is the kept input of a recomputed block as it is, and what
        goes out to one. The gradient comes from there, too, in the running backward and where one of inputs is over; of
        each of a rank's further chunks a hidden state is early. Where a V turns, both chunks are here and nothing is
        passed on.
        """
        chunks, last = self._numbers, self.plan.pp * len(self._numbers) - 1
        recomputed = Policy.of(self.plan.activations).kind in ("full", "every") and share_here(self.plan) == 1
        receives = [number > 0 and number - 1 not in chunks and not recomputed for number in chunks]
        sends = [number < last and number + 1 not in chunks for number in chunks]
        states = tuple(came + goes for came, goes in zip(receives, sends, strict=True))
        return states, tuple(map(int, sends))

    def _of(self, running: _Running) -> Iterator[Peak]:
        """Yield the instants of one backward. Chunk 0 has none of inputs, so that of its weights is a whole one."""
        moment = running.start.moment
        if moment.chunk > 0 and moment.kind == INPUTS:
            return self._backward_of_inputs(running)
        if moment.chunk > 0 and moment.kind == WEIGHTS:
            return self._backward_of_weights(running)
        return iter(()) if moment.kind == INPUTS else self._whole(running)

    def _whole(self, running: _Running) -> Iterator[Peak]:
        """Yield the fullest instants of a backward that lets go of what it has used."""
        first = not running.start.moment.come[running.turn]
        at = self._activations.fullest(running.turn, self._moving(running), first)
        yield from self._of_part(running, at)
        yield self._end_of_whole(running)

    def _of_part(self, running: _Running, at: int) -> Iterator[Peak]:
        """Yield the instants of a part's backward, by its number in the order of backwards: a loss's comes first."""
        activations, turn, moving = self._activations, running.turn, self._moving(running)
        alive = activations.before(turn, at, running.others + activations.alive[turn])
        part, footprint = self._parts(running)[-1 - at], activations.footprints[turn][at]
        gradients = self._gradients(running, at)
        if footprint.loss:
            yield Peak("logits and loss", alive, footprint.loss, running.passed, *moving.loss, *gradients)
        if footprint.transient or not footprint.loss:
            yield _backward(part, footprint, alive, running.passed, moving.turns[at], gradients)

    def _gradients(self, running: _Running, at: int | None = None) -> GradientBytes:
        """Return the gradients of model states in a backward, of a part of it or where it is split.

        Torch gives those of weights when a backward of weights is over.
        """
        moment = running.start.moment
        if all(moment.come):
            return self._holding.all
        come = (moving.all for moving, there in zip(self._holding.moving, moment.come, strict=True) if there)
        if at is None or moment.come[running.turn]:
            return sum(come, NO_GRADIENTS)
        return sum(come, self._moving(running).gradients[self._activations.begins[running.turn][at]])

    def _end_of_whole(self, running: _Running) -> Peak:
        return Peak(
            "end of the backward", running.others, 0.0, running.passed, *self._moving(running).end, *self._holding.all
        )

    def _backward_of_inputs(self, running: _Running) -> Iterator[Peak]:
        """Yield the instants of a backward of inputs, which keeps all, and gradients for that of weights besides."""
        parts, moving = self._parts(running)[::-1], self._moving(running)
        footprints = self._activations.footprints[running.turn]
        alive, last = running.others + self._activations.alive[running.turn], len(parts) - 1
        gradients = self._gradients(running)
        for at, (part, footprint) in enumerate(zip(parts, footprints, strict=True)):
            if footprint.loss:
                yield Peak("logits and loss", alive, footprint.loss, running.passed, *moving.loss, *gradients)
            if part.kind == "head" or at == last:
                yield _backward(part, footprint, alive, running.passed, moving.turns[at], gradients)
            alive += footprint.skipped + footprint.for_weights  # the graph is kept till the end, logits with it
        yield Peak("end of the backward of inputs", alive, self._norm, running.passed, *NOTHING, *gradients)

    def _backward_of_weights(self, running: _Running) -> Iterator[Peak]:
        """Yield the fullest of a backward of weights: gradients pile up till its end, what they are made of goes."""
        given = sum(footprint.for_weights for footprint in self._activations.footprints[running.turn])
        alive = running.others + self._sizes[running.turn][1] - given
        temporary = max(given, self._holding.gradients[running.turn])
        windows = self._moving(running).turns[0]
        yield Peak("backward of weights", alive, temporary, running.passed, *windows, *self._gradients(running))

    def _parts(self, running: _Running) -> list[Part]:
        """Return the parts of a chunk, in the order of forwards."""
        stage = running.start.stage
        if stage not in self._chunks:
            self._chunks[stage] = chunks_of_rank(self.model, self.plan, stage)
        return self._chunks[stage][running.start.moment.chunk]

    def _moving(self, running: _Running) -> Backward:
        """Return the buffers of units that move: nothing is reduced before the end where gradients are summed here."""
        return (self._holding.moving if running.reduces else self._holding.still)[running.turn]


def _backward(
    part: Part, footprint: Footprint, alive: float, passed: float, windows: Windows, gradients: GradientBytes
) -> Peak:
    """Return the fullest instant of a part's backward. alive: bytes of activations that are kept as it begins."""
    instant = _instant(part, footprint.again > 0, footprint.loss > 0)
    return Peak(instant, alive + footprint.again, footprint.transient, passed, *windows, *gradients)


@lru_cache(maxsize=4096)
def _instant(part: Part, again: bool, after_loss: bool) -> str:
    """Name the instant. again: the part was recomputed for it; after_loss: it is a head's, whose loss is over."""
    head = "backward of the head" if after_loss else "logits and loss"  # one after the other, or in tiles
    names = {"embedding": "backward of the embedding", "head": head}
    after = " after its recomputation" if again else ""
    if part.kind == "tower" and not part.recomputes:
        return "backward of the vision tower"
    return names.get(part.kind) or f"backward of {part.units[0].name if part.units else 'a block'}{after}"
