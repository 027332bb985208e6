"""Transient buffers of units, as the engine has them in one backward. No torch.

    gathered   stage 3, released after every use: the root, the unit in use, and AHEAD gathered ahead of it, but for the
               loss, whose backward comes before the head's; in blocks of 8 bits these are messages, on the wire
    bucket     stages 2 and 3, in exact mode all of them: local gradients of the unit in its backward, of IN_FLIGHT
               being reduced, of those that are reduced last (root and tied units); in the dtype in which they travel.
               Shards that go to the host come here first
    wire       IN_FLIGHT reductions: the gradients as they travel, if that is another dtype, and what arrives: in 16
               bits the terms of all ranks; else a shard, if it is added to what is there or of another dtype. Behind
               them IN_FLIGHT sums over copies of shards, without a pipeline

The order is that of the second micro-batch on: head, last block, .. first block. `zero/gathers.py` has the engine's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

from zero3d.account.states import GradientBytes, gradient_bytes
from zero3d.account.transients import (
    arriving_bytes,
    local_bytes,
    reduction_of,
    sum_of_sources,
    sum_over_copies,
    sums_of_copies,
)
from zero3d.blueprint.unit import Kind
from zero3d.distributed.block_bytes import CODE_BITS, message_bytes
from zero3d.distributed.unit_order import AHEAD, IN_FLIGHT, ROOT
from zero3d.tools.plan.decided import policy_of
from zero3d.tools.plan.rank_model import RankUnit, rank_model
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan
from zero3d.tools.plan.states import states_key


class Windows(NamedTuple):
    """Bytes alive at an instant."""

    gathered: float
    bucket: float
    wire: float


NOTHING = Windows(0.0, 0.0, 0.0)


class Backward:
    """Has the buffers of one model chunk's backward.

    turns   in that of each of its parts, in the order of backwards
    loss    in that of the loss before them
    nbytes  of each turn in all
    """

    def __init__(self, turns: Sequence[Windows], loss: Windows, end: Windows, chunk: _Chunk) -> None:
        """Add up what each turn has. chunk: computes gradients where they are asked for, which most plans' are not."""
        self.turns, self.loss = turns, loss
        self.end = end
        self._chunk = chunk
        self.nbytes = [sum(windows) for windows in turns]

    def without_wire(self) -> Backward:
        """Return the buffers of a backward in which nothing is reduced before its end."""
        turns = [windows._replace(wire=0.0) for windows in self.turns]
        return Backward(turns, self.loss._replace(wire=0.0), NOTHING, self._chunk)

    @property
    def gradients(self) -> Sequence[GradientBytes]:
        """Return the gradients that have come by each turn's fullest instant in a step's first backward."""
        return self._chunk.gradients[:-1]

    @property
    def all(self) -> GradientBytes:
        """Return those that a later one has throughout."""
        return self._chunk.gradients[-1]


def backwards(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> dict[int, Backward]:
    """Return the buffers of each of a rank's model chunks, by number."""
    return _backwards(model, states_key(plan), pp_stage)


@lru_cache(maxsize=4096)
def _backwards(model: ModelSpec, plan: ParallelPlan, pp_stage: int) -> dict[int, Backward]:
    by_chunk = rank_model(model, plan, pp_stage).part_units
    return {number: _Chunk(part_units[::-1], plan).backward() for number, part_units in by_chunk.items()}


def seen_with(model: ModelSpec, plan: ParallelPlan) -> Windows:
    """Return the buffers in a vision tower's forward: the root, the part in use, and AHEAD gathered ahead of it."""
    return _seen_with(model, states_key(plan))


@lru_cache(maxsize=1024)
def _seen_with(model: ModelSpec, plan: ParallelPlan) -> Windows:
    if not policy_of(plan).gathers:
        return NOTHING
    rank = rank_model(model, plan, 0)
    names = [{unit.name.partition("/")[0] for unit in part.units} for part in rank.chunks[0] if part.kind == "tower"]
    units = [unit for unit in rank.units[0] if not unit.plan(plan).whole]
    roots = sum(_full_bytes(unit) for unit in units if unit.owner == ROOT)
    parts = [sum(_full_bytes(unit) for unit in units if unit.owner in own and unit.owner != ROOT) for own in names]
    together = (sum(parts[at : at + 1 + AHEAD]) for at in range(len(parts)))
    return Windows(float(roots + max(together, default=0)), 0.0, 0.0)


class _Chunk:
    """Sums up the buffers of one model chunk's backward.

    late    units that are deferred, which several parts have, each once
    turns   all others by part, in the order of backwards; those of as many bytes are one object
    early   of these the trainable ones, in the order of their reductions
    passed  how many of them come before each part
    """

    def __init__(self, order: Sequence[Sequence[RankUnit]], plan: ParallelPlan) -> None:
        """Sort units. order: by part, in the order of backwards."""
        self.plan, self.policy, alike = plan, policy_of(plan), dict[tuple[int, int, Kind], RankUnit]()
        self.late = list(dict.fromkeys(unit for units in order for unit in units if unit.deferred))
        self.turns = [[alike.setdefault(_sizes(u), u) for u in units if not u.deferred] for units in order]
        self._known: dict[tuple[int, bool], GradientBytes] = {}
        self._wires: dict[int, float] = {}
        self.early = [unit for units in self.turns for unit in units if unit.trainable]
        self.passed = [0, *accumulate(sum(unit.trainable for unit in units) for units in self.turns)]

    def backward(self) -> Backward:
        """Return the buffers of all turns; those whose units are alike are summed up once."""
        made: dict[tuple[int, ...], Windows] = {}
        turns = []
        for at in range(len(self.turns)):
            near = self._near(at)
            if near not in made:
                made[near] = self._turn(at)
            turns.append(made[near])
        return Backward(turns, self._turn(0, ahead=0), self._end(), self)

    @cached_property
    def gradients(self) -> list[GradientBytes]:
        """Gradients of model states at each turn of a step's first backward, then all of the chunk's."""
        late = (self._of_unit(unit, reduced=True) for unit in self.late if unit.trainable)
        *turns, early = self._gradients()
        return [*turns, sum(late, early)]

    def _gradients(self) -> Iterator[GradientBytes]:
        """Yield the gradients that have come by each turn's fullest instant in a step's first backward, then of all.

        In part 0 none have, whose logits come first. Those that are kept whole have memory from their first gradient
        on, shards from their reduction, which for all units of a block but the first is within its backward. In exact
        mode sums have memory when terms have come.
        """
        reduces = self.policy.often or self.plan.accumulate == 1
        reduced = [self._of_unit(unit, reduces) for unit in self.early]
        come = list(accumulate(reduced, initial=GradientBytes(0.0, 0.0)))
        for at, turn in enumerate(self.turns):
            if self.policy.exact:
                yield come[max(0, self.passed[at] - IN_FLIGHT)]
                continue
            trained = [unit for unit in turn if unit.trainable] if at else []
            within = (self._of_unit(unit, reduces and number > 0) for number, unit in enumerate(trained))
            late = (self._of_unit(unit, reduced=False) for unit in self._filling(at) if unit.trainable)
            yield sum((*within, *late), come[self.passed[at]])
        yield (
            come[-1] if reduces else sum((self._of_unit(u, reduced=True) for u in self.early), GradientBytes(0.0, 0.0))
        )

    def _filling(self, at: int) -> Sequence[RankUnit]:
        """Return the units of several parts that get gradients in a turn: in part 0 after its fullest instant."""
        if at == len(self.turns) - 1:
            return self.late
        return [unit for unit in self.late if unit.owner == ROOT] if at else []

    def _of_unit(self, unit: RankUnit, reduced: bool) -> GradientBytes:
        """Return a unit's gradients; of those of as many bytes, which are one object, once."""
        key = id(unit), reduced
        if key not in self._known:
            self._known[key] = gradient_bytes(unit.plan(self.plan), unit.layout, reduced)
        return self._known[key]

    def _wire(self, unit: RankUnit) -> float:
        """Return the bytes of a unit's reduction under way; of those of as many bytes once."""
        if id(unit) not in self._wires:
            self._wires[id(unit)] = _wire_bytes(unit, self.plan)
        return self._wires[id(unit)]

    def _near(self, at: int) -> tuple[int, ...]:
        """Return what the buffers of a turn depend on: its place where that counts, and the units around it."""
        units = [unit for turn in self.turns[at : at + 1 + AHEAD] for unit in turn]
        place = at == 0, at == len(self.turns) - 1, len(self.turns[at])
        reduced = self.passed[at] if self.policy.gradients else 0
        return *place, reduced, *map(id, units), -1, *map(id, self._moving(at)), -1, *map(id, self._summing(at))

    def _moving(self, at: int) -> list[RankUnit]:
        """Return the units whose reductions are under way in a turn."""
        return self.early[max(0, self.passed[at] - IN_FLIGHT) : self.passed[at]]

    def _summing(self, at: int) -> list[RankUnit]:
        """Return the units whose shards are being summed over copies in a turn of a step's last backward."""
        return _behind(self.early[: self.passed[at]])

    def _turn(self, at: int, ahead: int = AHEAD) -> Windows:
        """Return the buffers while part number `at` is in its backward, and so many are gathered ahead of it.

        Part 0's bucket opens after its fullest instant, at which autograd has its gradients.
        """
        plan, late, turns = self.plan, self.late, self.turns
        roots = [unit for unit in late if unit.owner == ROOT]
        gathered = bucket = messages = 0.0
        if self.policy.gathers:
            using = late if at == 0 else roots
            coming = [unit for units in turns[at + 1 : at + 1 + ahead] for unit in units if not unit.plan(plan).whole]
            shown = [unit for unit in (*using, *turns[at]) if not unit.plan(plan).whole]
            messages = sum(message_bytes(unit.layout.total, CODE_BITS) for unit in coming if unit.plan(plan).coded)
            whole = [unit for unit in coming if not unit.plan(plan).coded]
            gathered = sum(_full_bytes(unit) for unit in (*shown, *whole))
        moving, summing = self._moving(at), self._summing(at)
        if (self.policy.often or self.policy.exact) and at > 0:
            filling = late if at == len(turns) - 1 else roots
            summed = self.policy.exact and not self.policy.often and plan.accumulate > 1  # what moves is a sum then
            filled = (*(() if summed else moving), *turns[at], *filling)
            bucket = sum(_bucket_bytes(unit, plan) for unit in filled if unit.trainable)
            bucket += _incoming(self.early[: self.passed[at]], plan) + _near(summing, plan)
        wire = messages + sum([self._wire(unit) for unit in moving])
        return Windows(gathered, bucket, wire + _sums_in_backward(summing, plan))

    def _end(self) -> Windows:
        """Return the buffers at the end of the backward, when what is left is reduced."""
        plan, late = self.plan, [unit for unit in self.late if unit.trainable]
        reduced = [*self.early, *late]
        moving = reduced[-IN_FLIGHT:]
        bucket = 0.0
        if self.policy.often or self.policy.exact:
            filled = [*moving[: max(0, len(moving) - len(late))], *late]
            bucket = sum(_bucket_bytes(unit, plan) for unit in filled)
        summing = _behind(reduced)
        bucket += _incoming(reduced, plan) + _near(summing, plan)
        wire = sum([self._wire(unit) for unit in moving])
        return Windows(0.0, bucket, wire + _sums_in_backward(summing, plan))


def _sizes(unit: RankUnit) -> tuple[int, int, Kind]:
    """Return what a unit's buffers depend on."""
    return unit.layout.total, unit.layout.n, unit.kind


def _full_bytes(unit: RankUnit) -> int:
    return unit.layout.total * unit.itemsize


def _bucket_bytes(unit: RankUnit, plan: ParallelPlan) -> int:
    """Return the bytes of local gradients that come and go with a backward."""
    return local_bytes(unit.plan(plan), unit.layout.total)


def _incoming(reduced: Sequence[RankUnit], plan: ParallelPlan) -> int:
    """Return the bytes of shards that reductions come to, where they are kept on the host: under way, or leaving."""
    return arriving_bytes([unit.layout.shard for unit in reduced], policy_of(plan))


def _behind(reduced: Sequence[RankUnit]) -> list[RankUnit]:
    """Return the units whose sums over copies are under way behind the last of these reductions."""
    return list(reduced[-2 * IN_FLIGHT : -IN_FLIGHT])


def _sums_in_backward(units: Sequence[RankUnit], plan: ParallelPlan) -> float:
    """Return the bytes in which shards are summed over copies beside a backward; of a pipeline that is behind it."""
    return sums_bytes(units, plan) if plan.pp == 1 else 0.0


def _near(units: Sequence[RankUnit], plan: ParallelPlan) -> int:
    """Return the bytes of shards on their way over copies that are kept on the host."""
    policy = policy_of(plan)
    if not policy.gradients or plan.replicate == 1 or plan.pp > 1 or policy.exact:
        return 0
    return policy.held.itemsize * sum(unit.layout.shard for unit in units)


def sums_bytes(units: Sequence[RankUnit], plan: ParallelPlan) -> float:
    """Return the bytes in which these units' shards are summed over copies; an exact sum's are a reduction's."""
    if policy_of(plan).exact or plan.replicate == 1:
        return 0.0
    sums = [sum_over_copies(unit.plan(plan)) for unit in units]
    how = max(sums, key=lambda each: each.plain.travels, default=None)
    if how is None:
        return 0.0
    return float(sums_of_copies([unit.layout.shard for unit in units], how, "cuda"))


def _wire_bytes(unit: RankUnit, plan: ParallelPlan) -> float:
    """Return the bytes of one reduction under way. What several sources have is summed first, in the reduced dtype."""
    of, n, shard = unit.plan(plan), unit.layout.n, unit.layout.shard
    summed, how = float(sum_of_sources(of, unit.layout.total)), reduction_of(of, plan.accumulate)
    if n == 1:
        return summed
    if of.policy.exact:  # sums in the tree, beside others' terms: not all of them are there at the fullest instant
        tree = shard * of.policy.master.itemsize * n.bit_length() / IN_FLIGHT
        return summed + how._replace(slots=n - 1).nbytes(shard) + tree
    return summed + how.nbytes(shard)
