"""Activations of one micro-batch in one part of a model, on one rank. No torch.

    forward      | kept: all of it, without attention's, or a block's input in `every` blocks
    backward     | recomputed: what was not kept comes back (again), then instants of the backward beside it
    of inputs    | its end: gradients of weights' outputs (for weights); while these wait, the head's logits are dropped

Every number is bytes, linear in the micro-batch but for gradients that autograd holds. They come from `Operations`
(traced, or closed forms).
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from zero3d.account.transients import LOGITS_BUDGET, logits_bytes
from zero3d.activations.policy import Policy
from zero3d.spec.dtypes import Dtype
from zero3d.spec.offload import AUTO
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.inputs import share_here
from zero3d.tools.plan.kernels import multiplies_in_fp8
from zero3d.tools.plan.rank_model import dtype_of
from zero3d.tools.plan.sequence import kept_more
from zero3d.tools.plan.spec import Instant, ModelSpec, Operations, ParallelPlan, Part

KEPT_NORM, TILE = constant("zero3d", "kept norm"), constant("zero3d", "tile")


class Footprint(NamedTuple):
    """Bytes of one micro-batch in one part.

    kept         from its forward to its backward
    again        what recomputation brings back
    loss         beyond those, in the loss's backward: the head alone, before its own begins
    transient    beyond those, at the fullest instant of the part's own backward
    for_weights  gradients of weights' outputs, which a backward of inputs leaves for that of weights
    dropped      of what is kept, what a backward of inputs lets go at its end: the head's logits in fp32
    skipped      of what the part would keep, what recomputation leaves out
    """

    kept: float
    again: float
    loss: float
    transient: float
    for_weights: float
    dropped: float
    skipped: float


@lru_cache(maxsize=64)
def run_of(model: ModelSpec, plan: ParallelPlan) -> Run:
    """Return what footprints depend on: plans that differ in ZeRO alone have one."""
    return Run(
        model,
        plan.tp,
        plan.mesh.sequence_parallel,
        Policy.of(plan.activations),
        plan.compute,
        plan.tokens(model.length),
        plan.micro_batch * model.length,
        share_here(plan),
        plan.dispatches,
        kept_more(model, plan),
        tiles_loss(model, plan),
        plan.pp == 1,
        plan.tp == plan.sp == 1,
        plan.linear is not None,
    )


def footprints(model: ModelSpec, plan: ParallelPlan) -> dict[Part, Footprint]:
    """Return the footprint of one micro-batch of `plan` in every part of the model."""
    return run_of(model, plan).footprints


def tiles_loss(model: ModelSpec, plan: ParallelPlan, micro_batch: int | None = None) -> bool:
    """Return whether a plan's loss is computed in tiles: as it says, or as a run decides (train/setup/losses.py).

    micro_batch  in the place of the plan's
    """
    if plan.tiled_loss != AUTO:
        return plan.tiled_loss is True
    tokens = (micro_batch or plan.micro_batch) * model.length
    return model.tiles and plan.tp == 1 and logits_bytes(tokens, model.vocab, plan.compute.itemsize) > LOGITS_BUDGET


def tied_bytes(model: ModelSpec, tp: int, compute: Dtype) -> float:
    """Return the bytes of tied parameters' gradients of the head, which wait to be summed at the embedding."""
    weights = (w for part in model.parts for unit in part.units if unit.copy_of for w in unit.weights)
    return float(sum(w.numel // tp * dtype_of(w.itemsize, compute).itemsize for w in weights if w.trainable))


class Run(NamedTuple):
    """A model and the settings that a part's bytes depend on.

    whole     tokens of whole sequences, whose images every rank of tp and sp has
    share     of an input that is kept here
    attended  bytes that an attention keeps of sequences that are shared out, beyond those of its own rows
    tiled     the loss is computed tile by tile
    uncut     no pipeline cuts the model
    fuses     kernels that do all of a mixer run: a rank has all heads and whole sequences
    linear    linear layers of blocks multiply in fp8
    """

    model: ModelSpec
    tp: int
    sequence_parallel: bool
    policy: Policy
    compute: Dtype
    tokens: int
    whole: int
    share: float
    dispatches: bool
    attended: float
    tiled: bool
    uncut: bool
    fuses: bool
    linear: bool = False

    @property
    def width(self) -> float:
        """Return the factor to figures, which are of a 2-byte run."""
        return max(1.0, self.compute.itemsize / 2)

    @property
    def footprints(self) -> dict[Part, Footprint]:
        """Return the footprint of every part of the model."""
        return _footprints(self)

    def footprint(self, part: Part, outputs: float, waiting: float) -> Footprint:
        """Compute a part's footprint. outputs: of `_outputs`; waiting: of `tied_bytes`."""
        interior, kept = self._interior(part), self._kept(part)
        recomputed = part.recomputes and self.policy.kind != "none"
        # whole blocks run again beside their kept input, which autograd saves none of
        skipped = interior if self._runs_again(part) else interior - kept
        again = skipped * (self.policy.every or 1) if recomputed else 0.0
        if recomputed and self.policy.kind == "selective" and self._share(part) < 1:
            again += self._share(part) * self._input(part)  # all of it comes back beside the part that is here
        logits = 4.0 * self.tokens * self.model.vocab / self.tp
        return Footprint(
            kept,
            again,
            *self._transients(part, waiting),
            for_weights=outputs * self._rows(part) * self.compute.itemsize,
            dropped=min(logits, kept) if part.kind == "head" and not self.tiled else 0.0,
            skipped=skipped,
        )

    def _runs_again(self, part: Part) -> bool:
        """Return whether all of a part runs again in its backward."""
        return part.recomputes and self.policy.kind in ("full", "every")

    def slices(self, part: Part) -> int:
        """Count the slices that tp ranks have of a part's sequences: they are whole around the blocks."""
        return self.tp if self.sequence_parallel and part.kind == "block" else 1

    def _divided(self, part: Part, cut: float, whole: float) -> float:
        """Return the bytes of one micro-batch's tokens on this rank."""
        if part.kind == "tower":
            return self.whole * (cut + whole)
        return self.tokens * (cut / self.tp + whole / self.slices(part))

    def _rows(self, part: Part) -> float:
        """Return the rows that a part's weights are multiplied with: a tower's are of patches."""
        return self.tokens if part.kind != "tower" else self.whole * self.model.patches / self.model.length

    def _share(self, part: Part) -> float:
        """Return the share of an input that is kept here: ranks share no tower's."""
        return self.share if part.kind == "block" else 1.0

    def operations(self, part: Part) -> Operations:
        """Return what a part does in this run."""
        operations = part.operations if part.dispatched is None or not self.dispatches else part.dispatched
        if self.fuses and operations.fused is not None:
            return operations.fused
        return operations.over_tp if self.tp > 1 and operations.over_tp is not None else operations

    def _interior(self, part: Part) -> float:
        """Return all that a part keeps where nothing is recomputed."""
        operations = self.operations(part)
        if part.kind == "tower":
            return self.width * self._divided(part, operations.kept_cut, operations.kept_whole)
        if part.kind != "block":
            kept = self._divided(part, operations.kept_cut, operations.kept_whole)
            if part.kind == "head" and self.tiled:
                without = max(0.0, kept - 4.0 * self.tokens * self.model.vocab / self.tp)
                return min(without, KEPT_NORM * self.tokens * self.model.hidden)
            return kept
        gathered = 4.0 * self.model.hidden if self.sequence_parallel else 0.0  # inputs of attention and MLP
        whole = max(0.0, operations.kept_whole - gathered)
        return self.width * (self._divided(part, operations.kept_cut, whole) + self.tokens * gathered) + self._attended(
            part
        )

    def _attended(self, part: Part) -> float:
        return self.attended if part.attends and part.kind == "block" else 0.0

    def _kept(self, part: Part) -> float:
        whole = self._interior(part)
        if not part.recomputes or self.policy.kind == "none":
            return whole
        if self.policy.kind == "selective":
            attention = self.width * self._divided(part, self.operations(part).attention, 0.0) + self._attended(part)
            return whole - attention - (1 - self._share(part)) * self._input(part)
        return self._share(part) * self._input(part) / (self.policy.every or 1)

    def _input(self, part: Part) -> float:
        """Return the bytes of a recomputed module's input."""
        return self.width * self._divided(part, 0.0, self.operations(part).input)

    def _transients(self, part: Part, waiting: float) -> tuple[float, float]:
        """Return the most bytes beyond what is kept: in the loss's backward, and in the part's own.

        Of whole sequences even under sequence parallelism: they are gathered inside. A head's own backward has begun
        where gradients of its weights are there, and in tiles, which go through both.
        """
        operations = self.operations(part)
        scale = self.width if part.kind in ("block", "tower") else 1.0
        tokens, tp = (self.whole, 1) if part.kind == "tower" else (self.tokens, self.tp)
        instants = operations.instants or (Instant(operations.transient, 0.0),)
        instants += operations.rerun if self._runs_again(part) and _is_frozen_mostly(part) else ()
        tiled = part.kind == "head" and self.tiled
        if tiled:
            gradients = max(at.gradients for at in instants)
            instants = (Instant(0.0, TILE * self.model.hidden, gradients),)
        tied = waiting * {"head": 0, "block": 1, "tower": 1, "embedding": 2}[part.kind]
        loss, own = 0.0, 0.0
        for at in instants:
            nbytes = scale * tokens * (at.cut / tp + at.whole) + at.gradients * self.width / tp + tied
            if part.kind == "head" and not tiled and not at.gradients:
                loss = max(loss, nbytes)
            else:
                own = max(own, nbytes)
        return loss, own + (_copies(part, self.tokens) if self.linear else 0.0)


@lru_cache(maxsize=1024)
def _is_frozen_mostly(part: Part) -> bool:
    """Return whether a part's backward has few gradients of weights: else they are more than its second forward has."""
    weights = [weight for unit in part.units for weight in unit.weights]
    return 2 * sum(weight.numel for weight in weights if weight.trainable) < sum(weight.numel for weight in weights)


@lru_cache(maxsize=1024)
def _copies(part: Part, tokens: int) -> float:
    """Return the bytes of the factors of a block's largest product in 8 bits, beside those in 16 that they are of."""
    if part.kind != "block":
        return 0.0
    shapes = [weight.shape for unit in part.units for weight in unit.weights if len(weight.shape) == 2]
    return float(max((n * k + tokens * max(n, k) for n, k in shapes if multiplies_in_fp8(n, k)), default=0))


@lru_cache(maxsize=1024)
def _footprints(run: Run) -> dict[Part, Footprint]:
    waiting = tied_bytes(run.model, run.tp, run.compute) if run.uncut else 0.0
    alike: dict[tuple[int, float], Footprint] = {}  # blocks share their operations
    by_part = {}
    for part in run.model.parts:
        outputs = _outputs(part, run.tp, run.slices(part))
        key = id(run.operations(part)), outputs
        if key not in alike:
            alike[key] = run.footprint(part, outputs, waiting)
        by_part[part] = alike[key]
    return by_part


@lru_cache(maxsize=4096)
def _outputs(part: Part, tp: int, slices: int) -> float:
    """Count the elements that a token has behind a part's trained weights, biases left out: of slices behind norms."""
    elements = 0.0
    for weight in (weight for unit in part.units for weight in unit.weights if weight.trainable):
        if weight.name.endswith("bias"):
            continue
        rows = float(weight.local(tp)[0])
        if len(weight.shape) > 2:  # experts: those that a token meets
            rows *= weight.local(tp)[1] * (part.active or part.numel) / part.numel
        elements += rows / (slices if len(weight.shape) == 1 else 1)
    return elements
