"""zero3d's own memory: the most that is alive at any instant of a step, on the fullest rank. No torch.

    instant                                   activations                                        windows
    ----------------------------------------  -------------------------------------------------  --------------------
    head and loss                             all kept, in flight; logits, their gradient        head, 2 blocks ahead
    backward of the last blocks               all kept, in flight; the block's transient         its own, 2 moving
    the same, recomputed                      inputs; one segment's interiors and transient      the same
    the embedding's backward                  its gradient                                       what is reduced last
    optimizer step                            none                                               largest cast

A peak is the maximum over these, never a sum of categories' maxima; `parts` are the bytes at that instant. Bytes of
activations come from `ModelSpec`'s operations (traced, or closed forms); all else from the engine's own arithmetic.

    reserved   1.05 x allocated: blocks of 2 MiB and fragments; an assumption until `calibrate` measures it
    device     0.6 GB context of CUDA and libraries, 0.4 GB communicators where there is more than one rank
    host       of a node: 3 GB per process, the slice that it reads, and what is offloaded: 12 / dp bytes per parameter
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zero3d.plan.held import Held, itemsize, rank_of
from zero3d.plan.in_flight import in_flight
from zero3d.plan.recompute import Policy
from zero3d.plan.spec import ClusterSpec, Instant, Memory, ModelSpec, Operations, ParallelPlan, Part
from zero3d.plan.states import States, states
from zero3d.plan.windows import WINDOW, Windows, flush, windows
from zero3d.zero.stages import WIDTHS

RESERVED = 1.05
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
    ranks = [_Rank(model, plan, stage) for stage in range(plan.pp)]
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


class _Rank:
    """One rank of the pp axis."""

    def __init__(self, model: ModelSpec, plan: ParallelPlan, stage: int) -> None:
        self.model, self.plan, self.stage = model, plan, stage
        self.parts, self.units, self._own = rank_of(model, plan, stage)
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
            "batch": 16.0 * self.tokens * self.plan.accumulate, "received": self._received(),
        }  # fmt: skip

    def _received(self) -> float:
        """Pipelines hold a buffer for every micro-batch's hidden state and for its gradient, per part."""
        if self.plan.pp == 1:
            return 0.0
        last = self.plan.pp * len(self.parts) - 1
        ends = sum((number > 0) + (number < last) for number in self.parts)
        hidden = self.tokens * self.model.hidden * WIDTHS[self.plan.precision].weight
        return float(ends * hidden * self.plan.accumulate)

    # --- activations ----------------------------------------------------------------------------

    def _divided(self, cut: float, whole: float) -> float:
        """Bytes of one micro-batch's tokens on this rank."""
        plan = self.plan
        return self.tokens * (cut / plan.tp + whole / (plan.tp if plan.sequence_parallel else 1))

    def _interior(self, part: Part) -> float:
        """All that a part keeps for its backward."""
        operations = self._operations(part)
        scale = self.width if part.kind == "block" else 1.0
        return scale * self._divided(operations.kept_cut, operations.kept_whole)

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

    # --- instants -------------------------------------------------------------------------------

    def peaks(self) -> Iterator[Peak]:
        """Instants that may be the fullest."""
        flights = in_flight(self.plan, self.stage)
        last = max(self.parts)
        others = sum(flights[n] * sum(map(self._kept, parts)) for n, parts in self.parts.items() if n != last)
        order = list(reversed(self.parts[last]))
        units: list[Sequence[Held]] = [*reversed(self._own[last])]
        kept = [self._kept(part) for part in order]
        waiting = others + (flights[last] - 1) * sum(kept)
        for at, part in enumerate(order):
            if at > WINDOW + 2 and part.kind == "block" and part.operations == order[at - 1].operations:
                continue  # less is kept than one block before
            alive = waiting + sum(kept[at:])
            yield from self._backward(part, alive, windows(units, at, self.tied, self.plan))
        yield self._peak("end of the backward", waiting, 0.0, flush(units, self.tied, self.plan))
        yield self._step()

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
        return self._peak("optimizer step", 0.0, scratch, Windows(0.0, 0.0, 0.0))
