"""zero3d's own memory: the most that is alive at any instant of a step, on the fullest rank. No torch.

    instant                                   activations                                        windows
    ----------------------------------------  -------------------------------------------------  --------------------
    head and loss                             all kept, in flight; logits, their gradient        head, 2 blocks ahead
    backward of the last blocks               all kept, in flight; the block's transient         its own, 2 moving
    the same, recomputed                      inputs; one segment's interiors and transient      the same
    the embedding's backward                  its gradient                                       what is reduced last
    the end of a backward of inputs           all kept, of the running one too; gradients for W  the same
    the end of a backward of weights          the same                                           the part's gradients
    optimizer step                            none                                               largest cast

A peak is the maximum over these, never a sum of categories' maxima; `parts` are the bytes at that instant. Bytes of
activations come from `ModelSpec`'s operations (traced, or closed forms); all else from the engine's own arithmetic.

    reserved   1.05 x allocated: blocks of 2 MiB and fragments; an assumption until `calibrate` measures it
    device     0.6 GB context of CUDA and libraries, 0.4 GB communicators where there is more than one rank
    host       of a node: 3 GB per process, the slice that it reads, and what is offloaded: 12 / dp bytes per parameter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

from zero3d.plan.held import Held, itemsize, rank_of
from zero3d.plan.in_flight import INPUTS, WEIGHTS, Moment, moments
from zero3d.plan.recompute import Policy
from zero3d.plan.spec import ClusterSpec, Instant, Memory, ModelSpec, Operations, ParallelPlan, Part
from zero3d.plan.states import States, policies, states
from zero3d.plan.windows import WINDOW, Windows, flush, windows
from zero3d.schedules import Schedule
from zero3d.zero.stages import WIDTHS

RESERVED = 1.05
NOTHING = Windows(0.0, 0.0, 0.0)
CONTEXT, COMMUNICATORS = 0.6e9, 0.4e9
PROCESS = 3e9


class Peak(NamedTuple):
    """Bytes by category at one instant of one rank."""

    instant: str
    parts: Mapping[str, float]

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.parts.values())


def memory(model: ModelSpec, plan: ParallelPlan, cluster: ClusterSpec | None = None) -> Memory:
    """Bytes of the fullest rank (of dp ranks the first, which is never less full than the others).

    Raises ConfigError for what the engine refuses.
    """
    ranks = [_Rank(model, plan, stage) for stage in _stages(model, plan)]
    rank, peak = max(((rank, peak) for rank in ranks for peak in rank.peaks()), key=lambda found: found[1].total)
    allocated = peak.total
    reserved = RESERVED * allocated
    device = reserved + CONTEXT + (COMMUNICATORS if plan.world > 1 else 0)
    on_node = min(plan.world, cluster.per_node if cluster is not None else plan.world)
    largest = max((unit.largest for units in rank.units.values() for unit in units), default=0)
    offloaded = float(rank.held.states.optimizer) if plan.offload == "host" else 0.0
    host = on_node * (PROCESS + 4 * largest + offloaded)
    return Memory(
        float(rank.held.states.total) - offloaded, allocated, reserved, device, host,
        {name: size for name, size in peak.parts.items() if size}, peak.instant,
    )  # fmt: skip


def _stages(model: ModelSpec, plan: ParallelPlan) -> list[int]:
    """Pipeline stages that may be the fullest: where backwards are whole, a later one like its neighbour holds less."""
    shapes = [rank_of(model, plan, stage).shape for stage in range(plan.pp)]
    splits = plan.pp > 1 and Schedule.of(plan.schedule).splits_backward
    return [stage for stage in range(plan.pp) if splits or stage == 0 or shapes[stage] != shapes[stage - 1]]


class _Rank:
    """One rank of the pp axis."""

    def __init__(self, model: ModelSpec, plan: ParallelPlan, stage: int) -> None:
        self.model, self.plan, self.stage = model, plan, stage
        self.parts, self.units, self._own, _ = rank_of(model, plan, stage)
        self.held: States = states(model, plan, stage)
        self.tokens = plan.micro_batch * model.length
        self.width = max(1.0, WIDTHS[plan.precision].weight / 2)  # figures are of a 2-byte run
        self.policy = Policy.of(plan.activations)
        copies = {unit.copy_of for part in model.parts for unit in part.units} - {None}
        weights = [w for part in model.parts for unit in part.units if unit.copy_of for w in unit.weights]
        tied = sum(w.numel // plan.tp * itemsize(w, plan.precision) for w in weights if w.trainable)
        self.waiting = tied if plan.pp == 1 else 0  # autograd sums a tied parameter's gradients at the embedding
        self.tied = frozenset(str(name).partition("/")[0] for name in copies) if plan.pp == 1 else frozenset()

    # --- what is there all the time -------------------------------------------------------------

    def _base(self) -> dict[str, float]:
        bytes_ = self.held.states
        offloaded = self.plan.offload == "host"
        return {
            "parameters": float(bytes_.parameters), "gradients": float(bytes_.gradients),
            "optimizer": 0.0 if offloaded else float(bytes_.optimizer), "padding": float(self.held.padding),
            "batch": 16.0 * self.tokens * self.plan.accumulate,
        }  # fmt: skip

    def _received(self, moment: Moment) -> float:
        """A hidden state for every micro-batch that is held, a gradient for each in its backward, one that is early.

        Where a V turns, both parts are here and nothing is received.
        """
        numbers = list(self.parts)
        last = self.plan.pp * len(numbers) - 1
        found = len(numbers) - 1
        for number, held, waiting in zip(numbers, moment.held, moment.waiting, strict=True):
            if number > 0 and number - 1 not in numbers:
                found += held
            if number < last and number + 1 not in numbers:
                found += waiting + (number == moment.part)
        return float(found * self.tokens * self.model.hidden * WIDTHS[self.plan.precision].weight)

    # --- activations ----------------------------------------------------------------------------

    def _divided(self, cut: float, whole: float) -> float:
        """Bytes of one micro-batch's tokens on this rank."""
        plan = self.plan
        return self.tokens * (cut / plan.tp + whole / (plan.tp if plan.sequence_parallel else 1))

    def _interior(self, part: Part) -> float:
        """All that a part keeps for its backward."""
        operations = self._operations(part)
        if part.kind != "block":
            return self._divided(operations.kept_cut, operations.kept_whole)
        gathered = 4.0 * self.model.hidden if self.plan.sequence_parallel else 0.0  # inputs of attention and MLP
        whole = max(0.0, operations.kept_whole - gathered)
        return self.width * (self._divided(operations.kept_cut, whole) + self.tokens * gathered)

    def _operations(self, part: Part) -> Operations:
        own = part.operations
        return own.over_tp if self.plan.tp > 1 and own.over_tp is not None else own

    def _kept(self, part: Part) -> float:
        """What is left of it between forward and backward."""
        whole = self._interior(part)
        if part.kind != "block" or self.policy.kind == "none":
            return whole
        operations = self._operations(part)
        if self.policy.kind == "selective":
            return whole - self.width * self._divided(operations.attention, 0.0)
        return self.width * self._divided(0.0, operations.input) / (self.policy.every or 1)

    def _again(self, part: Part) -> float:
        """What recomputation brings back in the backward of a part."""
        if part.kind != "block" or self.policy.kind == "none":
            return 0.0
        return (self._interior(part) - self._kept(part)) * (self.policy.every or 1)

    def _transients(self, part: Part) -> Iterator[float]:
        """Bytes beyond what is kept, at the instants of its backward that may be the fullest."""
        operations = self._operations(part)
        scale = self.width if part.kind == "block" else 1.0
        instants = operations.instants or (Instant(operations.transient, 0.0),)
        waiting = self.waiting * {"head": 0, "block": 1, "embedding": 2}[part.kind]
        for at in instants:
            yield scale * self._divided_whole(at) + at.gradients * self.width / self.plan.tp + waiting

    def _divided_whole(self, at: Instant) -> float:
        """Whole sequences even under sequence parallelism: they are gathered inside."""
        return self.tokens * (at.cut / self.plan.tp + at.whole)

    # --- split backwards ------------------------------------------------------------------------

    def _for_weights(self, part: Part) -> float:
        """Gradients of weights' outputs, which a backward of inputs leaves for that of weights."""
        plan = self.plan
        return _outputs(part, plan.tp, plan.sequence_parallel) * self.tokens * WIDTHS[plan.precision].weight

    def _dropped(self, part: Part) -> float:
        """Of what a part keeps, what lies behind its last weight: the head's logits in fp32."""
        logits = 4.0 * self.tokens * self.model.vocab / self.plan.tp
        return min(logits, self._kept(part)) if part.kind == "head" else 0.0

    def _between(self, number: int) -> float:
        """Bytes of a micro-batch of a part between its two backwards; part 0 has but one, that of weights."""
        parts = self.parts[number]
        kept = sum(map(self._kept, parts))
        if number == 0:
            return kept
        again = sum(self._interior(part) - self._kept(part) for part in parts)
        return kept + again + sum(self._for_weights(part) - self._dropped(part) for part in parts)

    # --- instants -------------------------------------------------------------------------------

    def peaks(self) -> Iterator[Peak]:
        """Instants that may be the fullest."""
        kept = {number: sum(map(self._kept, parts)) for number, parts in self.parts.items()}
        split = self.plan.pp > 1 and Schedule.of(self.plan.schedule).splits_backward
        between = {number: self._between(number) for number in self.parts} if split else kept
        fullest: dict[tuple[int, str, bool], tuple[float, float, Moment]] = {}
        for moment in moments(self.plan, self.stage):
            others, received = -kept[moment.part], self._received(moment)
            for number, held, waiting in zip(self.parts, moment.held, moment.waiting, strict=True):
                others += (held - waiting) * kept[number] + waiting * between[number]
            key, found = (moment.part, moment.kind, self._reduces(moment)), (others + received, received, moment)
            if key not in fullest or fullest[key][0] < found[0]:
                fullest[key] = found
        for total, received, moment in fullest.values():
            for peak in self._of(moment, total - received):
                yield peak._replace(parts={**peak.parts, "received": received})
        yield self._step()

    def _of(self, moment: Moment, others: float) -> Iterator[Peak]:
        """Part 0 has no backward of inputs, so that of its weights is a whole one."""
        if moment.part > 0 and moment.kind == INPUTS:
            return self._of_inputs(moment, others)
        if moment.part > 0 and moment.kind == WEIGHTS:
            return self._of_weights(moment, others)
        return iter(()) if moment.kind == INPUTS else self._whole(moment, others)

    def _whole(self, moment: Moment, others: float) -> Iterator[Peak]:
        """Of a backward that lets go of what it has used. others: bytes that other micro-batches keep."""
        order, units = self._backwards(moment)
        kept = [self._kept(part) for part in order]
        for at, part in enumerate(order):
            if at > WINDOW + 2 and part.kind == "block" and part.operations == order[at - 1].operations:
                continue  # less is kept than one block before
            yield from self._backward(part, others + sum(kept[at:]), self._windows(units, at, moment))
        held = flush(units, self.tied, self.plan) if self._reduces(moment) else NOTHING
        yield self._peak("end of the backward", others, 0.0, held)

    def _of_inputs(self, moment: Moment, others: float) -> Iterator[Peak]:
        """Of a backward that keeps all, and gradients for that of weights besides."""
        order, units = self._backwards(moment)
        alive = others + sum(map(self._kept, order))
        for at, part in enumerate(order):
            if part.kind == "head" or at + 1 == len(order):
                yield from self._backward(part, alive, self._windows(units, at, moment))
            alive += self._interior(part) - self._kept(part) + self._for_weights(part) - self._dropped(part)
        yield self._peak("end of the backward of inputs", alive, 0.0, NOTHING)

    def _of_weights(self, moment: Moment, others: float) -> Iterator[Peak]:
        """Its gradients pile up, and are handed on at its end; what they are made of goes."""
        order, units = self._backwards(moment)
        given = sum(map(self._for_weights, order))
        grads = sum(u.layout.numel * u.itemsize for u in self.units[moment.part] if u.trainable)
        alive = others + self._between(moment.part) - given
        yield self._peak("backward of weights", alive, max(given, grads), self._windows(units, 0, moment))

    def _backwards(self, moment: Moment) -> tuple[list[Part], list[Sequence[Held]]]:
        return list(reversed(self.parts[moment.part])), [*reversed(self._own[moment.part])]

    def _reduces(self, moment: Moment) -> bool:
        return moment.final or policies(self.plan)[1] == "every_micro_batch"

    def _windows(self, units: Sequence[Sequence[Held]], at: int, moment: Moment) -> Windows:
        """What moves; nothing is reduced before the last micro-batch where gradients are summed here."""
        held = windows(units, at, self.tied, self.plan)
        return held if self._reduces(moment) else held._replace(wire=0.0)

    def _backward(self, part: Part, alive: float, held: Windows) -> Iterator[Peak]:
        names = {"embedding": "backward of the embedding", "head": "logits and loss"}
        again = " after its recomputation" if self._again(part) else ""
        name = names.get(part.kind) or f"backward of {part.units[0].name if part.units else 'a block'}{again}"
        for transient in self._transients(part):
            yield self._peak(name, alive + self._again(part), transient, held)

    def _peak(self, name: str, kept: float, transient: float, held: Windows) -> Peak:
        where = f", pipeline stage {self.stage} of {self.plan.pp}" if self.plan.pp > 1 else ""
        moving = {"gathered": held.gathered, "bucket": held.bucket, "wire": held.wire}
        return Peak(name + where, self._base() | {"activations": kept, "temporary": transient} | moving)

    def _step(self) -> Peak:
        """Masters are cast to weights, the largest unit at once."""
        width = WIDTHS[self.plan.precision].weight
        units = [unit for units in self.units.values() for unit in units if unit.trainable]
        share = self.plan.dp if self.plan.stage > 0 else 1
        largest = max((unit.layout.total // share for unit in units), default=0)
        scratch = 4.0 * largest if width == 2 and self.plan.offload == "none" else 0.0
        return self._peak("optimizer step", 0.0, scratch, NOTHING)


@lru_cache(maxsize=4096)
def _outputs(part: Part, tp: int, sequence_parallel: bool) -> float:
    """Elements that a token has behind a part's trained weights, biases left out."""
    found = 0.0
    for weight in (weight for unit in part.units for weight in unit.weights if weight.trainable):
        if weight.name.endswith("bias"):
            continue
        rows = float(weight.local(tp)[0])
        if len(weight.shape) > 2:  # experts: those that a token meets
            rows *= weight.local(tp)[1] * (part.active or part.numel) / part.numel
        found += rows / (tp if sequence_parallel and len(weight.shape) == 1 else 1)
    return found
