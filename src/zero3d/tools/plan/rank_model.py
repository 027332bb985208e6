"""The share of a model that one rank has: its model chunks, and their units as the engine makes them. No torch.

    ModelSpec.parts   embedding | block 0 | block 1 | block 2 | block 3 | head
    model chunk 0     embedding + block 0 + block 1          the cuts are balance.cut's, as in pipeline/split.py
    model chunk 1     block 2 + block 3 + head               with a copy of a tied head

Units of one owner in one chunk are one unit if they are alike in dtype and in being trained: a root unit has a share
of the embedding part and one of the head; weights kept in fp32 are a unit of their own in 16 bits only. So are experts
that tokens are sent to: each ep rank has some of them, whole on every tp rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from zero3d.blueprint.layout import ALIGN, GROUP, UnitLayout
from zero3d.blueprint.unit import Kind, UnitPlan, decide
from zero3d.blueprint.units import FoundUnit, Member, group_parameters, lay_out
from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.optim.matrices import Form
from zero3d.pipeline.balance import TOKENS, Weights, chain_costs, cut
from zero3d.pipeline.schedules import SCHEDULES, Schedule
from zero3d.spec.dtypes import BF16, FP32, FP64, Dtype
from zero3d.spec.mesh import Mesh
from zero3d.spec.optimizer import ADAMW, OPTIMIZERS
from zero3d.spec.zero import SAME, Zero
from zero3d.tools.plan.decided import policy_of, ranks_of
from zero3d.tools.plan.spec import PLAIN, ModelSpec, ParallelPlan, Part, Weight

BY_WIDTH = {1: Dtype("uint8", 1), 2: BF16, 4: FP32, 8: FP64}  # of weights in another dtype than the run's
BLOCKS = "the model's list"  # as messages name what pipelines cut

Nameless = tuple[tuple[Weight, ...], Kind]  # the weights of a unit, and what decides about it


class RankUnit(NamedTuple):
    """A unit of one rank's, as the planner needs it.

    name      as the engine names it
    owner     the module (or the root) whose parameters these are
    names     of its parameters, by the number of the slot
    deferred  its gradients may come in several parts (`blueprint.units`)
    layout    shared by units that are alike in all but names: its slots have numbers for names
    kind      what decides about it
    largest   elements of its largest parameter
    forms     numbers of slots that are matrices, and how each is seen
    degrees   of these, over how many tp ranks each is cut
    """

    name: str
    owner: str
    names: tuple[str, ...]
    deferred: bool
    layout: UnitLayout
    kind: Kind
    largest: int
    forms: tuple[tuple[int, Form], ...] = ()
    degrees: tuple[tuple[int, int], ...] = ()

    @property
    def trainable(self) -> bool:
        """Return whether it gets gradients."""
        return self.kind.trainable

    @property
    def itemsize(self) -> int:
        """Return the bytes of an element of its weights."""
        return self.kind.dtype.itemsize

    @property
    def alike(self) -> tuple[Any, ...]:
        """Return what units have in common that differ in names and in when they are used: the key of their bytes."""
        return self.layout.shape, *self[5:]

    def plan(self, plan: ParallelPlan) -> UnitPlan:
        """Return what the unit is under a plan."""
        return _decided(self.kind, plan)


def model_chunks(model: ModelSpec, plan: ParallelPlan) -> list[list[Part]]:
    """Return the parts of each model chunk, in order. Raises ConfigError for a model that cannot be cut so."""
    if plan.pp == 1:
        return [list(model.parts)]
    if not model.chain:
        raise ConfigError(f"{model.name} is not a chain of blocks, so that no pipeline can cut it: pass pp=1.")
    Schedule.of(plan.schedule).check(plan.accumulate, plan.pp)
    return _cut(model, plan.pp, plan.schedule)


@lru_cache(maxsize=1024)
def _cut(model: ModelSpec, pp: int, name: str) -> list[list[Part]]:
    schedule = Schedule.of(name)
    schedule.check_blocks(len(model.blocks), pp, BLOCKS)
    return chunks_of(model, pp * schedule.chunks_per_rank)


@lru_cache(maxsize=256)
def chunks_of(model: ModelSpec, count: int) -> list[list[Part]]:
    """Return the parts of so many model chunks, in order."""
    blocks = model.blocks
    before, after = ([p for p in model.parts if p.kind in kinds] for kinds in (("embedding", "tower"), ("head",)))
    weights = [Weights(_numel([block]), block.active) for block in blocks]
    costs = chain_costs(_numel(before), weights, _numel(after), TOKENS, model.hidden, model.vocab, model.tower)
    parts, start = [], 0
    for length in cut(costs.blocks, count, costs.before, costs.after):
        parts.append(list(blocks[start : start + length]))
        start += length
    return [before + parts[0], *parts[1:-1], parts[-1] + after]


def _numel(parts: Iterable[Part]) -> int:
    """Count the parameters of parts, copies among them."""
    return sum(weight.numel for part in parts for unit in part.units for weight in unit.weights)


def chunks_of_rank(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> dict[int, list[Part]]:
    """Return the model chunks of one rank of the pp axis, by number."""
    parts, pp = model_chunks(model, plan), plan.pp
    if pp == 1:
        return {0: parts[0]}
    return {number: parts[number] for number in Schedule.of(plan.schedule).chunks_of(pp_stage, pp)}


class RankModel(NamedTuple):
    """What one rank of the pp axis has of a model.

    chunks      parts of each of its model chunks, by the chunk's number
    units       the engine's units of each chunk
    part_units  units of each part of each chunk that its backward uses, in the order of parts
    unlike      one of all units that are alike, and how many they are
    """

    chunks: dict[int, list[Part]]
    units: dict[int, list[RankUnit]]
    part_units: dict[int, list[list[RankUnit]]]
    unlike: list[tuple[RankUnit, int]]


@lru_cache(maxsize=1 << 14)
def partition_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all that divide a model alike: the key under which a partition is computed once.

    Its schedule is the first one whose chunks are laid out as the plan's are.
    """
    zero, degrees, schedule = plan.zero, plan.degrees._replace(sp=1), _laid_out_as(plan.schedule)
    return _partition(zero.exact, zero.gather_wire, zero.slow_wire, degrees, schedule, plan.precision, plan.optimizer)


def pipeline_key(plan: ParallelPlan) -> ParallelPlan:
    """Return one plan for all that cut a model into the same chunks, whatever a rank has of them."""
    return _partition(False, SAME, SAME, Degrees(plan.pp, 1, 1), _laid_out_as(plan.schedule), BF16.name, ADAMW)


@lru_cache(maxsize=64)
def _laid_out_as(schedule: str) -> str:
    layout = Schedule.of(schedule)[2:]
    return next(name for name in SCHEDULES if Schedule.of(name)[2:] == layout)


@lru_cache(maxsize=4096)
def _partition(
    exact: bool, gather_wire: str, slow_wire: str, degrees: Degrees, schedule: str, precision: str, optimizer: str
) -> ParallelPlan:
    pp, dp, tp, ep, _, shard = degrees
    return PLAIN.having(
        zero=Zero(exact=exact, gather_wire=gather_wire, slow_wire=slow_wire),
        mesh=Mesh(dp, tp, pp, ep, 1, shard=shard, schedule=schedule),
        accumulate=pp,
        precision=precision,
        optimizer=optimizer,
    )


def rank_model(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> RankModel:
    """Return the chunks and units of one rank of the pp axis. Raises ConfigError for what cannot be cut so."""
    if plan.pp > 1:
        schedule = Schedule.of(plan.schedule)
        schedule.check(plan.accumulate, plan.pp)
        if model.chain:
            schedule.check_blocks(len(model.blocks), plan.pp, BLOCKS)
    return _rank_model(model, partition_key(plan), pp_stage)


@lru_cache(maxsize=4096)
def _rank_model(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> RankModel:
    """Build what all plans of these degrees, schedule and precision have alike, once."""
    _check_cuts(model, plan.tp, plan.ep, plan.dispatches)
    chunks = chunks_of_rank(model, plan, pp_stage)
    units = {number: units_of(parts, plan) for number, parts in chunks.items()}
    part_units = {}
    for number, parts in chunks.items():
        by_owner: dict[str, list[RankUnit]] = {}
        for unit in units[number]:
            by_owner.setdefault(unit.owner, []).append(unit)
        owners = [dict.fromkeys(unit.name.partition("/")[0] for unit in part.units) for part in parts]
        part_units[number] = [
            [] if part.still else [unit for name in names for unit in by_owner.get(name, ())]
            for part, names in zip(parts, owners, strict=True)
        ]
    alike: dict[tuple[Any, ...], list[RankUnit]] = {}
    for unit in (unit for of_chunk in units.values() for unit in of_chunk):
        alike.setdefault(unit.alike, []).append(unit)
    return RankModel(chunks, units, part_units, [(same[0], len(same)) for same in alike.values()])


def unlike_stages(model: ModelSpec, plan: ParallelPlan) -> list[int]:
    """Return the ranks of the pp axis whose chunks are not like those of the one before."""
    return _unlike_stages(model, pipeline_key(plan))


def first_alike(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> int:
    """Return the first rank of the pp axis whose chunks differ from this one's in names alone."""
    return _first_alike(model, pipeline_key(plan))[pp_stage]


@lru_cache(maxsize=1024)
def _first_alike(model: ModelSpec, plan: ParallelPlan) -> list[int]:
    stages = [chunks_of_rank(model, plan, stage).values() for stage in range(plan.pp)]
    first: dict[tuple[tuple[int, ...], ...], int] = {}
    return [
        first.setdefault(tuple(tuple(part.likeness for part in parts) for parts in chunks), stage)
        for stage, chunks in enumerate(stages)
    ]


@lru_cache(maxsize=1024)
def _unlike_stages(model: ModelSpec, plan: ParallelPlan) -> list[int]:
    stages = [chunks_of_rank(model, plan, stage).values() for stage in range(plan.pp)]
    signatures = [[[(p.kind, p.numel, p.operations) for p in parts] for parts in chunks] for chunks in stages]
    return [stage for stage in range(plan.pp) if stage == 0 or signatures[stage] != signatures[stage - 1]]


def units_of(parts: Sequence[Part], plan: ParallelPlan) -> list[RankUnit]:
    """Return the units that the engine makes of one chunk."""
    found, kinds = _found(tuple(parts), plan.dispatches, plan.compute)
    laid_out = [_laid_out(weights, kind, plan) for weights, kind in kinds]
    return [_unit(each, *laid_out[number]) for each, number in found]


@lru_cache(maxsize=1024)
def _found(
    parts: tuple[Part, ...], apart: bool, compute: Dtype
) -> tuple[list[tuple[FoundUnit[Weight], int]], list[Nameless]]:
    """Return the units of a chunk with whole parameters, each with the number of what it is without names; and these.

    apart  experts that tokens are sent to are units of their own
    """
    names = {unit.name for part in parts for unit in part.units if unit.copy_of is None}
    tied = {unit.copy_of for part in parts for unit in part.units}
    members = [
        Member(
            weight,
            owner,
            _kind(weight.itemsize, weight.trainable, weight.stacked and apart, compute),
            tied=unit.name in tied,
        )
        for part in parts
        for unit in part.units
        if unit.copy_of not in names
        for owner in (unit.name.partition("/")[0],)
        for weight in unit.weights
    ]
    kinds: dict[Nameless, int] = {}
    found = [
        (unit, kinds.setdefault((tuple(weight.unnamed for weight in unit.parameters), unit.kind), len(kinds)))
        for unit in group_parameters(members)
    ]
    return found, list(kinds)


@lru_cache(maxsize=1 << 14)
def _decided(kind: Kind, plan: ParallelPlan) -> UnitPlan:
    return decide(kind, policy_of(plan), ranks_of(plan))


@lru_cache(maxsize=1024)
def _kind(itemsize: int | None, trainable: bool, experts: bool, compute: Dtype) -> Kind:
    return Kind(dtype_of(itemsize, compute), trainable, experts)


def _unit(found: FoundUnit[Weight], order: Sequence[int], unit: RankUnit) -> RankUnit:
    """Return a unit with its names. order: numbers of the weights in its slots."""
    names = tuple([found.parameters[number].name for number in order])
    return unit._replace(name=found.name, owner=found.owner, names=names, deferred=found.deferred)


@lru_cache(maxsize=1 << 14)
def _laid_out(weights: tuple[Weight, ...], kind: Kind, plan: ParallelPlan) -> tuple[list[int], RankUnit]:
    """Return a unit without names, and the numbers of the weights in its slots. Of experts each tp rank has the whole.

    Most blocks of a model differ in names alone.
    """
    tp = 1 if kind.experts else plan.tp
    local = [
        (str(number), weight.experts(plan.ep) if kind.experts else weight.local(tp), weight.group)
        for number, weight in enumerate(weights)
    ]
    block = ALIGN if OPTIMIZERS[plan.optimizer].coded else GROUP
    layout = lay_out(local, kind, policy_of(plan), ranks_of(plan), block)
    order = [int(slot.name) for slot in layout.slots]
    forms = tuple((slot, form) for slot, number in enumerate(order) if (form := weights[number].form) is not None)
    degrees = tuple((slot, tp) for slot, _ in forms if weights[order[slot]].cut is not None)
    return order, RankUnit("", "", (), False, layout, kind, max(slot.numel for slot in layout.slots), forms, degrees)


@lru_cache(maxsize=256)
def _check_cuts(model: ModelSpec, tp: int, ep: int, dispatches: bool) -> None:
    """Raise ConfigError where a degree does not divide a weight that it cuts."""
    for weight in (weight for part in model.parts for unit in part.units for weight in unit.weights):
        if weight.stacked and dispatches:
            _check_experts(weight, ep)
        else:
            _check_cut(weight, tp)


def dtype_of(width: int | None, run: Dtype) -> Dtype:
    """Return the dtype of a weight of so many bytes, or the run's; a 16-bit run alone keeps fp32 beside its own."""
    if width is None or width == run.itemsize or (width == FP32.itemsize and run.itemsize > BF16.itemsize):
        return run
    return BY_WIDTH[width]


def _check_cut(weight: Weight, tp: int) -> None:
    """Raise ConfigError where `tp` does not divide a weight."""
    if weight.cut is not None and weight.shape[weight.cut] % (weight.blocks * tp):
        size = weight.shape[weight.cut]
        parts = f"{weight.blocks} blocks x tp {tp}" if weight.blocks > 1 else f"tp {tp}"
        raise ConfigError(f"{parts} does not divide dimension {weight.cut} of {weight.name} {weight.shape}, {size}.")


def _check_experts(weight: Weight, ep: int) -> None:
    """Raise ConfigError where `ep` does not divide a stack of experts."""
    if weight.shape[0] % ep:
        raise ConfigError(
            f"ep {ep} does not divide the {weight.shape[0]} experts of {weight.name}: pass an ep that does."
        )
