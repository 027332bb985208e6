"""What one rank holds of a model: its pipeline parts, and their units as the engine makes them. No torch.

    ModelSpec.parts   embedding | block 0 | block 1 | block 2 | block 3 | head
    pipeline part 0   embedding + block 0 + block 1          the cuts are balance.cut's, as in pipeline/split.py
    pipeline part 1   block 2 + block 3 + head               with a copy of a tied head

Units of one owner in one pipeline part are one unit if they are alike in dtype and in being trained: a root unit
has a share of the embedding part and one of the head; weights kept in fp32 are a unit of their own in 16 bits only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

from zero3d.errors import ConfigError
from zero3d.pipeline.balance import TOKENS, Weights, chain_costs, cut
from zero3d.pipeline.schedules import Schedule
from zero3d.plan.spec import ModelSpec, ParallelPlan, Part, Weight
from zero3d.zero.layout import UnitLayout
from zero3d.zero.stages import WIDTHS


class Held(NamedTuple):
    """A unit on one rank. itemsize: bytes per element; largest: elements of its largest parameter."""

    owner: str
    layout: UnitLayout
    trainable: bool
    itemsize: int
    largest: int

    @property
    def used(self) -> int:
        """Elements up to the end of the last parameter."""
        last = self.layout.slots[-1]
        return last.start + last.numel


def pipeline_parts(model: ModelSpec, plan: ParallelPlan) -> list[list[Part]]:
    """The parts of each pipeline part, in order. Raises ConfigError for a model that cannot be cut so."""
    if plan.pp == 1:
        return [list(model.parts)]
    if not model.chain:
        raise ConfigError(f"{model.name} is no chain of blocks, so that no pipeline can cut it: pass pp=1.")
    Schedule.of(plan.schedule).check(plan.accumulate, plan.pp)
    return _cut(model, plan.pp, plan.schedule)


@lru_cache(maxsize=256)
def _cut(model: ModelSpec, pp: int, name: str) -> list[list[Part]]:
    schedule, blocks = Schedule.of(name), model.blocks
    schedule.check_blocks(len(blocks), pp, "the model's list")
    before, after = ([p for p in model.parts if p.kind == kind] for kind in ("embedding", "head"))
    weights = [Weights(_numel([block]), block.active) for block in blocks]
    costs = chain_costs(_numel(before), weights, _numel(after), TOKENS, model.hidden, model.vocab)
    counts = cut(costs.blocks, pp * schedule.chunks_per_rank, costs.before, costs.after)
    parts, start = [], 0
    for count in counts:
        parts.append(list(blocks[start : start + count]))
        start += count
    return [before + parts[0], *parts[1:-1], parts[-1] + after]


def _numel(parts: Iterable[Part]) -> int:
    """Parameters, copies among them."""
    return sum(weight.numel for part in parts for unit in part.units for weight in unit.weights)


def parts_of_rank(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> dict[int, list[Part]]:
    """Pipeline parts of one rank of the pp axis, by number."""
    parts = pipeline_parts(model, plan)
    if plan.pp == 1:
        return {0: parts[0]}
    return {number: parts[number] for number in Schedule.of(plan.schedule).chunks_of(pp_stage, plan.pp)}


class Rank(NamedTuple):
    """What one rank of the pp axis has.

    parts   of each of its pipeline parts, by number
    units   the engine's units of each
    own     units of each of the parts, in their order
    shape   the same number for ranks whose parts are alike
    """

    parts: dict[int, list[Part]]
    units: dict[int, list[Held]]
    own: dict[int, list[list[Held]]]
    shape: int


def rank_of(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> Rank:
    """Parts and units on one rank of the pp axis. Raises ConfigError for what cannot be cut so."""
    if plan.pp > 1:
        Schedule.of(plan.schedule).check(plan.accumulate, plan.pp)
    skeleton = ParallelPlan(
        plan.dp, plan.tp, plan.pp, schedule=plan.schedule, accumulate=plan.pp, precision=plan.precision
    )
    return _rank(model, skeleton, pp_stage)


@lru_cache(maxsize=4096)
def _rank(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> Rank:
    parts = parts_of_rank(model, plan, pp_stage)
    units = {number: units_of(inside, plan) for number, inside in parts.items()}
    own = {}
    for number, inside in parts.items():
        by_owner: dict[str, list[Held]] = {}
        for held in units[number]:
            by_owner.setdefault(held.owner, []).append(held)
        names = [dict.fromkeys(unit.name.partition("/")[0] for unit in part.units) for part in inside]
        own[number] = [[held for name in owners for held in by_owner.get(name, ())] for owners in names]
    shape = hash(tuple(tuple((p.kind, p.numel, p.operations) for p in inside) for inside in parts.values()))
    return Rank(parts, units, own, shape)


def units_of(parts: Sequence[Part], plan: ParallelPlan) -> list[Held]:
    """The units that the engine makes of one pipeline part. Raises ConfigError where tp does not divide a weight."""
    names = {unit.name for part in parts for unit in part.units if unit.copy_of is None}
    groups: dict[tuple[str, bool, int], list[Weight]] = {}
    for part in parts:
        for unit in part.units:
            if unit.copy_of not in names:
                for weight in unit.weights:
                    key = (unit.name.partition("/")[0], weight.trainable, itemsize(weight, plan.precision))
                    groups.setdefault(key, []).append(weight)
    return [_held(*key, weights, plan) for key, weights in groups.items()]


def _held(owner: str, trainable: bool, width: int, weights: Sequence[Weight], plan: ParallelPlan) -> Held:
    for weight in weights:
        check_cut(weight, plan.tp)
    layout = UnitLayout([(weight.name, weight.local(plan.tp), weight.group) for weight in weights], plan.dp)
    return Held(owner, layout, trainable, width, max(slot.numel for slot in layout.slots))


def itemsize(weight: Weight, precision: str) -> int:
    """Bytes per element of a weight in a run. What 16-bit runs keep in fp32 is of the run's dtype in others."""
    run = WIDTHS[precision].weight
    return run if weight.itemsize is None or (weight.itemsize == 4 and run > 2) else weight.itemsize


def check_cut(weight: Weight, tp: int) -> None:
    """Raise ConfigError where `tp` does not divide a weight."""
    if weight.cut is not None and weight.shape[weight.cut] % (weight.blocks * tp):
        size = weight.shape[weight.cut]
        parts = f"{weight.blocks} blocks x tp {tp}" if weight.blocks > 1 else f"tp {tp}"
        raise ConfigError(f"{parts} does not divide dimension {weight.cut} of {weight.name} {weight.shape}, {size}.")
