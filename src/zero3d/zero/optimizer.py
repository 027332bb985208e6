"""One step over all shards: exchange, unscale, global norm, clip, update, refresh.

    1. exchange     token weight, order hashes          3 numbers per rank
    2. unscale      gradients *= 1 / (loss scale x sum of weights)
    3. norm         of every piece, stacked in model order, then of the stack: torch's own
                    `clip_grad_norm_`; partial norms are exchanged and combined in rank order
    4. one host read: norm, weight, orders. A non-finite norm or no weight skips the step, and `reason` says so
    5. clip         gradients *= clip / (norm + 1e-6), at most 1
    6. update       a torch optimizer on 1-D pieces of the masters, states in flat buffers
    7. refresh      masters to weights; stages 1 and 2 all-gather them, and `wait` ends it

Stage 0 has gathered the gradient shards (the second half of an all-reduce) before 2: each when it was reduced, or here
where tied and partial gradients had to be summed first. Factors then multiply all of them: the same bits.

Factors are multiplied in two steps and skipped when exactly 1: one combined factor, a fused
kernel's `grad_scale` or a norm per unit gives other bits than plain PyTorch. Pieces are per
parameter for the same reason: one flat fused update differs in its vector tails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm, same_memory
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena
from zero3d.zero.layout import Piece
from zero3d.zero.model_group import NONE, ModelGroup, Norms, PieceNorm
from zero3d.zero.param_groups import NOT_ELEMENTWISE, refuse_kind
from zero3d.zero.unit import Unit

NO_NORM = -1.0  # no norm is negative
APPLIED, OVERFLOW, NO_TARGETS, NOT_DUE = "applied", "overflow", "no targets", "not due"


class StepResult(NamedTuple):
    """What a step did; device tensors, so that reading them is the caller's choice.

    applied     bool; false off the boundary and for skipped steps
    grad_norm   fp32 (fp64 under fp64), before clipping, equal on all ranks and stages; NaN off the boundary
    loss_scale  fp32, the scale of the next step
    lr          fp64, of the first parameter group as used in this step
    reason      on the host: "applied", "overflow" (a norm that is not finite), "no targets" (all weights 0), "not due"
    """

    applied: Tensor
    grad_norm: Tensor
    loss_scale: Tensor
    lr: Tensor
    reason: str


class Outcome(NamedTuple):
    """What came of a boundary, on the host; `reason` as in `StepResult`."""

    reason: str
    norm: Tensor


@dataclass(frozen=True)
class MasterPiece:
    """A piece of a parameter that this rank updates: `master` and all its states are 1-D views."""

    unit: Unit
    name: str
    shape: tuple[int, ...]
    order: int  # position in model.parameters()
    group: int
    piece: Piece
    master: Tensor


class ShardedOptimizer:
    """Owns the torch optimizer over this rank's pieces and the flat buffers of its states.

    build    groups of pieces -> torch optimizer
    groups   options per parameter group; None: the pieces are passed as a plain list
    """

    def __init__(
        self, units: Sequence[Unit], order: dict[str, int], build: Callable[[list[list[Tensor]]], Optimizer],
        groups: int, comm: Comm, arena: Arena, clip_norm: float | None, model_group: ModelGroup,
    ) -> None:  # fmt: skip
        self._units = [unit for unit in units if unit.grads is not None]
        self._comm, self._arena, self._clip, self._model_group = comm, arena, clip_norm, model_group
        self._wide = self._units[0].weights.master.dtype if self._units else torch.float32  # of norms, too
        self.pieces = sorted(self._own(order), key=lambda piece: piece.order)
        self._names = {place: name for name, place in reversed(order.items())}
        self._flat: dict[tuple[str, str], Tensor] = {}
        self.torch = build([[p.master for p in self.pieces if p.group == g] for g in range(groups)])
        if type(self.torch).__name__ in NOT_ELEMENTWISE:
            refuse_kind(self.torch)
        self._prefill()

    def _own(self, order: dict[str, int]) -> Iterator[MasterPiece]:
        for unit in self._units:
            master = unit.weights.master
            for piece in unit.weights.update_pieces(self._comm.rank):
                slot = unit.layout.slots[piece.slot]
                view = master[piece.offset : piece.offset + piece.stop - piece.start]
                yield MasterPiece(unit, slot.name, slot.shape, order[slot.name], slot.group, piece, view)

    # --- states ---------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Make Adam's states at the start, so that memory does not grow at the first step."""
        kind = type(self.torch)
        if kind not in (torch.optim.Adam, torch.optim.AdamW) or any(g["amsgrad"] for g in self.torch.param_groups):
            return
        fused = {id(p): group["fused"] for group in self.torch.param_groups for p in group["params"]}
        wide = torch.get_default_dtype() == torch.float64
        for owned in self.pieces:
            dtype = torch.float64 if wide and not fused[id(owned.master)] else torch.float32
            device = owned.master.device if fused[id(owned.master)] else "cpu"
            self.torch.state[owned.master] = {
                "step": torch.zeros((), dtype=dtype, device=device),
                "exp_avg": self.state_view(owned, "exp_avg", owned.master.dtype),
                "exp_avg_sq": self.state_view(owned, "exp_avg_sq", owned.master.dtype),
            }

    def state_view(self, owned: MasterPiece, key: str, dtype: torch.dtype) -> Tensor:
        """Return the piece's view of its unit's flat buffer for this state, which is made on first use."""
        master = owned.unit.weights.master
        if (owned.unit.name, key) not in self._flat:
            used = owned.unit.weights.used
            self._flat[owned.unit.name, key] = self._arena.allocate("optimizer", master.numel(), used, dtype)
        start = owned.piece.offset
        return self._flat[owned.unit.name, key][start : start + owned.master.numel()]

    def adopt(self) -> None:
        """Move states that an optimizer made at its first step into flat buffers."""
        for owned in self.pieces:
            state = self.torch.state[owned.master]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.shape == owned.master.shape and value.dim() == 1:
                    view = self.state_view(owned, key, value.dtype)
                    if not same_memory(value, view):
                        state[key] = view.copy_(value)

    def state_bytes(self, unit: Unit) -> int:
        """Return a unit's optimizer bytes per parameter: of its master (when that is a copy) and its states."""
        weights = unit.weights
        copy = 0 if weights.master is weights.shard_or_full else weights.master.dtype.itemsize
        return copy + sum(flat.dtype.itemsize for (name, _), flat in self._flat.items() if name == unit.name)

    # --- the step -------------------------------------------------------------------------------

    def step(self, weight: float | Tensor, scale: float) -> Outcome:
        """Apply what has been reduced. `weight`: this rank's sum of weights, `scale`: the loss scale.

        Raises OrderError before the update when ranks used units in different orders.
        """
        self.wait()
        total, ordered = self._exchange(weight)
        self._model_group.sum_ties()
        self._model_group.sum_partial((owned.name, grad) for owned, grad in self.shard_grads())
        for unit in self._units:
            unit.gradients.gather()
        grads = [unit.gradients.owned for unit in self._units]
        multiply(grads, 1.0 / (scale * total) if isinstance(total, Tensor) or total else 1.0)
        norms = self._norms()
        norm, even = self._over_dp(norms)
        clip = torch.clamp(self._clip / (norm + 1e-6), max=1.0) if self._clip is not None else torch.ones_like(norm)
        values = norm, torch.as_tensor(total, dtype=torch.float64, device=norm.device), ordered, even, clip
        at_once = torch.stack([value.to(norm.device, torch.float64) for value in values])
        host_norm, host_total, in_order, all_even, host_clip = self._comm.read(at_once, [1.0] * 5)
        if not in_order:
            raise self._comm.order_error()
        if not all_even:
            agree(self._comm, partial(self._check_even, norms.uneven))
        reason = NO_TARGETS if not host_total else APPLIED if isfinite(host_norm) else OVERFLOW
        if reason == APPLIED:
            multiply(grads, clip if host_clip != 1.0 else 1.0)
            self._update()
        return Outcome(reason, norm)

    def _check_even(self, uneven: Tensor) -> None:
        """Raise ConfigError where the tp ranks of this model-parallel group differ on a parameter's norm."""
        place = self._comm.read(uneven[None], [NONE])[0]
        if place == NONE:
            return
        name = self._names[place]
        raise ConfigError(
            f"{name} is whole on all tp ranks, and its gradients there differ: the model uses it, or what it gives, on "
            "what each rank has for itself, between colwise and rowwise matrices. If it is used there itself, add "
            f"{name.rpartition('.')[0] or name!r}: 'replicated_with_grad_allreduce' to the tensor-parallel plan; else "
            "leave the matrices around it out with 'none'."
        )

    def _exchange(self, weight: float | Tensor) -> tuple[float | Tensor, Tensor]:
        """Return the sum of all ranks' weights, and whether all used units in one order."""
        if self._comm.size == 1 and self._model_group.alone:
            return weight, torch.ones((), dtype=torch.bool)
        return self._sum_weights(torch.as_tensor(weight, dtype=torch.float64, device=self._arena.device).view(1))

    def _sum_weights(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Sum [k] weights of every rank; the hashes of their orders come with them."""
        orders = torch.tensor(self._comm.order_values(), dtype=torch.float64, device=weights.device)
        rows = self._comm.exchange(torch.cat([weights, orders]))
        hashes = rows[:, len(weights) :]
        total, differ = self._total(rows[:, : len(weights)]), (hashes != hashes[0]).any()
        stages = self._model_group.exchange(torch.stack([total, differ.double()]))
        return self._model_group.count_once(stages)[:, 0].sum(), stages[:, 1].sum() == 0

    def _total(self, weights: Tensor) -> Tensor:
        """Add up [N, k] weights."""
        return weights.sum()

    def shard_grads(self) -> Iterator[tuple[MasterPiece, Tensor]]:
        """Yield this rank's pieces of the reduced gradients, in model order (also at stage 0)."""
        parts = []
        owner = {(p.unit.name, p.name): p for p in self.pieces}
        for unit in self._units:
            for piece in unit.layout.pieces(self._comm.rank):
                owned = owner[unit.name, unit.layout.slots[piece.slot].name]
                parts.append((owned, unit.gradients.shard[piece.offset : piece.offset + piece.stop - piece.start]))
        yield from sorted(parts, key=lambda part: part[0].order)

    def _norms(self) -> Norms:
        """Return the norm of this dp rank's shards, over its model-parallel group."""
        grads = ((o, g) for o, g in self.shard_grads() if o.unit not in self._model_group.copies)
        pieces = [PieceNorm(0, o.order, o.name, torch.linalg.vector_norm(g)) for o, g in grads]
        return self._model_group.norms(pieces, 1, self._wide)

    def _over_dp(self, norms: Norms) -> tuple[Tensor, Tensor]:
        """Combine the norms of all dp ranks: the global norm, equal everywhere, and whether every group's are even.

        A rank that has no norm, since its group's are uneven, sends NO_NORM: the exchange is one number per rank.
        """
        even = norms.uneven == NONE
        partials = self._comm.exchange(torch.where(even, norms.values, NO_NORM).double()).flatten().to(self._wide)
        norm: Tensor = partials[0] if len(partials) == 1 else torch.linalg.vector_norm(partials)
        return norm, (partials != NO_NORM).all()

    def _update(self) -> None:
        for owned in self.pieces:
            start = owned.piece.offset
            owned.master.grad = owned.unit.gradients.owned[start : start + owned.master.numel()]
        self.torch.step()
        self.adopt()
        for owned in self.pieces:
            owned.master.grad = None
        for unit in self._units:
            unit.weights.refresh()

    def wait(self) -> None:
        """Wait until the new weights are here, which stages 1 and 2 gather."""
        for unit in self._units:
            unit.weights.ready()


def multiply(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply in place; skipped when the factor is exactly 1."""
    if isinstance(factor, float) and factor == 1.0:
        return
    for grad in grads:
        grad.mul_(factor)
