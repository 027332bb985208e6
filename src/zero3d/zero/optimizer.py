"""One step over all shards: exchange, unscale, global norm, clip, update, refresh.

`measure` is 1 to 3, and may be called before the step; `update` is the rest.

    1. exchange     token weight, order hashes          3 numbers per rank; the hashes are of `clip_norm`, too
    2. unscale      gradients *= 1 / (loss scale x sum of weights), some pieces at a time (those on an accelerator's
                    host one by one, on this rank's threads), which are still in a cache in
    3. norm         of every piece, stacked in model order, then of the stack: torch's own
                    `clip_grad_norm_`; partial norms are exchanged and combined in rank order
    4. one host read: norm, weight, orders, and what the caller wants to know besides: nothing else of a step waits
       for the device. A non-finite norm or no weight skips the step, and `reason` says so
    5. clip         gradients *= clip / (norm + 1e-6), at most 1, those on the host as they are updated; then Muon's
                    become orthogonal momentum (optim/)
    6. update       a torch optimizer on 1-D pieces of the masters, states in flat buffers (updates.py)
    7. refresh      masters to weights, all units together; stages 1 and 2 all-gather them, and `wait` ends that
                    6 and 7 of units whose states are in records: one by one, behind the next forward
                    (offload/updates.py)

Stage 0 has gathered the gradient shards (the second half of an all-reduce) before 2: each when it was reduced, or here
where tied and partial gradients had to be summed first. Factors then multiply all of them: the same bits.

2, 3, 5, 6 and 7 are torch's multi-tensor calls, one launch for many pieces. On the CPU they are the single ones in a
row and give their bits; on an accelerator they are what torch's `clip_grad_norm_` and optimizers run there.
Factors are multiplied in two steps and skipped when exactly 1: one combined factor, a fused
kernel's `grad_scale` or a norm per unit gives other bits than plain PyTorch. Pieces are per
parameter for the same reason: one flat fused update differs in its vector tails.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.blueprint.units import in_turn
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.errors import ConfigError
from zero3d.memory.arena import Arena, device_values
from zero3d.memory.scratch import group_elements
from zero3d.zero.accumulation import poisoned
from zero3d.zero.model_group import NONE, ModelGroup, Norms, PieceNorm
from zero3d.zero.optimizer_states import OptimizerStates
from zero3d.zero.released_parameters import untold
from zero3d.zero.streams import ToHost, wait_for_device
from zero3d.zero.unit import Unit
from zero3d.zero.updates import MasterPiece, ResidentUpdates, cast_masters, frozen_options, groups_of

NO_NORM = -1.0  # no norm is negative
APPLIED, OVERFLOW, NO_TARGETS, NOT_DUE = "applied", "overflow", "no targets", "not due"
NAN_LOSS = "NaN loss"  # how the reason of an overflow begins that was there before the backward


def is_not_finite(reason: str) -> bool:
    """Return whether a step was skipped for a norm or a loss that is not finite."""
    return reason.startswith((OVERFLOW, NAN_LOSS))


class StepResult(NamedTuple):
    """What a step did; device tensors, so that reading them is the caller's choice. Results share them: never write.

    applied     bool; false off the boundary and for skipped steps
    grad_norm   fp32 (fp64 under fp64), before clipping, equal on all ranks and stages; NaN off the boundary
    loss_scale  fp32, the scale of the next step
    lr          fp64, of the first parameter group as used in this step
    reason      on the host: "applied", "overflow" (a norm that is not finite), "no targets" (all weights 0), "not due";
                "NaN loss on rank 1: ..." where the loss itself was NaN
    """

    applied: Tensor
    grad_norm: Tensor
    loss_scale: Tensor
    lr: Tensor
    reason: str

    def __str__(self) -> str:
        """Say what the step did: "step applied, gradient norm 1.23, lr 0.0003". Waits for the device."""
        if self.reason == NOT_DUE:
            return f"no step: {NOT_DUE}"
        told = self.as_dict()
        done = "step applied" if told["applied"] else f"step skipped ({self.reason})"
        scale = "" if told["loss_scale"] == 1.0 else f", loss scale {told['loss_scale']:g}"
        return f"{done}, gradient norm {told['grad_norm']:.3g}, lr {told['lr']:.3g}{scale}"

    def __repr__(self) -> str:
        """Return the same in brackets, as a prompt and a list show it."""
        return f"StepResult({self})"

    def as_dict(self) -> dict[str, bool | float | str]:
        """Return all of it as plain values, for logs; waits once for the device."""
        tensors = (self.applied, self.grad_norm, self.loss_scale, self.lr)
        applied, *numbers = torch.stack([each.double().to(self.grad_norm.device) for each in tensors]).tolist()
        named: dict[str, bool | float | str] = dict(zip(("grad_norm", "loss_scale", "lr"), numbers, strict=True))
        return {"applied": bool(applied), **named, "reason": self.reason}


class Outcome(NamedTuple):
    """What came of a boundary; `reason` as in `StepResult`.

    norm       on the device
    host_norm  the same on the host
    besides    on the host: what was to be read with it
    """

    reason: str
    norm: Tensor
    host_norm: float
    besides: list[float]


class Measured(NamedTuple):
    """The norm of a step's unscaled gradients, and the facts by which the step is applied or skipped.

    norm      before clipping, equal on all ranks
    scale     the loss scale that the gradients had
    total     all ranks' sum of weights
    in_order  whether all used units in one order, and clip alike
    even      whether tp ranks agree on the norms of parameters that they share; uneven: the place of one where they
              differ
    """

    norm: Tensor
    scale: float
    total: float | Tensor
    in_order: float | Tensor
    even: float | Tensor
    uneven: Tensor | None


class ShardedOptimizer(OptimizerStates):
    """Steps a torch optimizer over all shards.

    orthogonal turns final gradients into the input of the torch optimizer's step, where the two differ (optim/)
    tally      whole numbers of this rank, float64, that travel with its norm; `tallied` is all ranks' sum
    clip_norm  largest norm of a step's gradient, or None; may be set between steps
    build      groups of pieces -> torch optimizer
    groups     options per parameter group; None: the pieces are passed as a plain list
    missed     applied steps in which a parameter was frozen, by its name; the same on all ranks
    """

    orthogonal: Callable[[], None] | None = None
    tally: Callable[[], Tensor] | None = None

    def __init__(
        self,
        units: Sequence[Unit],
        order: dict[str, int],
        build: Callable[[list[list[Tensor]]], Optimizer],
        groups: int,
        comm: Comm,
        arena: Arena,
        clip_norm: float | None,
        model_group: ModelGroup,
    ) -> None:
        super().__init__(units, order, build, groups, arena)
        self._comm = comm
        self.clip_norm = clip_norm
        self._model_group = model_group
        self.tallied = torch.zeros(0, dtype=torch.float64, device=arena.device)
        across = [unit.across for unit in units[:1] if unit.across.size > 1]
        self._comms = list(dict.fromkeys([comm, *(unit.comm for unit in units), *across]))
        self._shards = comm.size // (units[0].across.size if units else 1)  # dp ranks that have all states once
        self._names = {place: name for name, place in reversed(order.items())}
        self.missed: Counter[str] = Counter()
        self._applied = self._left_out = 0
        self._clipped = NO_NORM  # where the last step was
        self._arrange()

    def _arrange(self) -> None:
        """Find what follows from units and their pieces."""
        self._wide = self._units[0].weights.masters.dtype if self._units else torch.float32  # of norms, too
        self._reduced = self._places_of_reduced()
        self._resident = ResidentUpdates(self._units, self.pieces, self._arena)

    def extend(
        self, new: Sequence[Unit], units: Sequence[Unit], order: dict[str, int], group_of: Callable[[str], int]
    ) -> None:
        """Update units that were frozen, too, and take their norms."""
        super().extend(new, units, order, group_of)
        for unit in new:
            self.missed.update({slot.name: self._applied for slot in unit.layout.slots if self._applied})
        self._model_group.forget()
        self._arrange()

    def _places_of_reduced(self) -> list[tuple[MasterPiece, int]]:
        """Return, in model order, where the piece of each reduced gradient stands in its unit's shard."""
        owner = {(p.unit.name, p.name): p for p in self.pieces}
        places = [
            (owner[unit.name, unit.layout.slots[piece.slot].name], place)
            for unit in self._units
            for place, piece in enumerate(unit.layout.pieces(unit.comm.rank))
        ]
        return sorted(places, key=lambda entry: entry[0].order)

    # --- the step -------------------------------------------------------------------------------

    def measure(self, weight: float | Tensor, scale: float, nan: Tensor | None = None) -> Measured:
        """Unscale the reduced gradients, and return their norm for `update`; nothing is read on the host.

        weight   this rank's sum of weights
        scale    the loss scale
        nan      whether a loss of this rank is NaN, on its device: its gradients may be zeros, and would count for the
                 mean. No rank then applies the step
        """
        total, in_order = self._exchange(weight if self._is_alone else poisoned(weight, nan))
        if self._to_host is not None:
            wait_for_device(self._arena.device)  # what goes to the host is there
        self._model_group.sum_ties()
        self._model_group.sum_partial((owned.name, grad) for owned, grad in self.shard_grads())
        for unit in self._units:
            unit.gradients.gather()
        norms = self._norms(1.0 / (scale * total) if isinstance(total, Tensor) or total else 1.0)
        norm, even = self._over_dp(norms)
        if self._is_alone:  # a weight that the host knows stays a number there, and nothing is multiplied by 1
            norm = torch.as_tensor(poisoned(norm, nan))
        return Measured(norm, scale, total, in_order, even, norms.uneven)

    def update(self, measured: Measured, besides: Tensor | None = None) -> Outcome:
        """Apply the step whose norm was measured, and leave new weights on their way (`wait`).

        besides  [k] float64, read on the host together with what the step must know there

        Raises OrderError before the update when ranks used units in different orders; ConfigError when they clip at
        different norms, or some have left out a step that others took.
        """
        norm, scale = measured.norm, measured.scale
        clip = 1.0 if self.clip_norm is None else torch.clamp(self.clip_norm / (norm + 1e-6), max=1.0)
        known = {"norm": norm, "total": measured.total, "in order": measured.in_order, "even": measured.even}
        read, read_besides = self._read(known | {"clip": clip}, besides)
        if not read["in order"]:
            self._check_decisions()
            raise self._comm.order_error()
        if not read["even"]:
            agree(self._comm, partial(self._check_even, measured.uneven))
        self._clipped = self._decisions()[0]
        if self.updates is not None:
            self.updates.confirm()  # who came here has ended its last step
        reason = NO_TARGETS if not read["total"] else APPLIED if isfinite(read["norm"]) else OVERFLOW
        if reason == APPLIED:
            factors = [1.0 / (scale * read["total"])] if self._are_narrow else []
            if factors or (self._to_host is not None and self.updates is not None and self.orthogonal is None):
                factors.append(read["clip"])
            else:
                multiply([unit.gradients.reduced.owned for unit in self._units], clip if read["clip"] != 1.0 else 1.0)
            if self.orthogonal is not None:
                self.orthogonal()
            self._update(factors)
        return Outcome(reason, norm, read["norm"], read_besides)

    def leave_out(self, measured: Measured) -> float:
        """Note that a measured step is not taken, for ranks to compare later; return its norm, read from the device."""
        self._left_out += 1
        return self._read({"norm": measured.norm}, None)[0]["norm"]

    def _decisions(self) -> list[float]:
        """Return the decisions that ranks must share: the clip norms now and of the last step, and steps left out."""
        return [NO_NORM if self.clip_norm is None else float(self.clip_norm), self._clipped, float(self._left_out)]

    def _check_decisions(self) -> None:
        """Raise ConfigError where ranks clip at different norms, or have not left out the same steps."""
        rows = self._comm.exchange(device_values(self._decisions(), self._arena.device), recorded=False)
        rows = self._model_group.exchange(rows.flatten()).view(-1, 3)
        flat = self._comm.read(rows.flatten(), self._decisions() * len(rows))
        *clipped, left_out = (sorted(set(flat[i::3])) for i in range(3))
        for limits in (found for found in clipped if len(found) > 1):
            told = " and ".join("not at all" if limit == NO_NORM else f"at {limit:g}" for limit in limits)
            raise ConfigError(
                f"ranks clip the norm of one step {told}: every rank must set the same clip_norm, and call "
                "clip_grad_norm_ where one does, outside of branches such as `if is_main_process`."
            )
        if len(left_out) > 1:
            raise ConfigError(
                f"some ranks have left out {left_out[0]:g} steps whose norm was known and others {left_out[-1]:g}, so "
                "their shards are of different steps: decide by that norm, which is the same on all ranks, and not by "
                "a loss of one rank."
            )

    def _read(self, values: dict[str, float | Tensor], besides: Tensor | None) -> tuple[dict[str, float], list[float]]:
        """Read numbers on the host, those on the device at once, and a vector with them."""
        on_device = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        packed = torch.stack(list(on_device.values()))
        packed = packed if besides is None else torch.cat([packed, besides])
        read = self._comm.read(packed, [1.0] * len(packed))
        known = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
        return known | dict(zip(on_device, read, strict=False)), read[len(on_device) :]

    def _check_even(self, uneven: Tensor | None) -> None:
        """Raise ConfigError where the tp ranks of this model-parallel group differ on a parameter's norm."""
        place = NONE if uneven is None else self._comm.read(uneven[None], [NONE])[0]
        if place == NONE:
            return
        name = self._names[place]
        raise ConfigError(
            f"{name} is whole on all tp ranks, and its gradients there differ: the model uses it, or what it gives, on "
            "what each rank has for itself, between colwise and rowwise matrices. If it is used there itself, add "
            f"{name.rpartition('.')[0] or name!r}: 'replicated_with_grad_allreduce' to the tensor-parallel plan; else "
            "leave the matrices around it out with 'none'."
        )

    def in_order(self, result: Tensor) -> Tensor:
        """Return what units have computed, if all ranks have used the same ones so far. Raises OrderError if not.

        On accelerators, where to read that would be to wait, it is NaN instead, and the next step raises the error. All
        ranks call it; 16 bytes of each of their axes to each other rank, apart from the ledger.
        """
        for comm in self._comms:
            if comm.size > 1:
                in_order = comm.in_order(recorded=False)
                if comm.device.type != "cpu":
                    result = result.masked_fill(~in_order, math.nan)
                elif not comm.read(in_order[None], [1.0])[0]:
                    raise comm.order_error()
        return result

    @property
    def _is_alone(self) -> bool:
        return self._comm.size == 1 and self._model_group.alone

    def _exchange(self, weight: float | Tensor) -> tuple[float | Tensor, float | Tensor]:
        """Return the sum of all ranks' weights, and whether all used units in one order."""
        if self._is_alone:
            return weight.to(self._arena.device) if isinstance(weight, Tensor) else weight, 1.0
        return self._sum_weights(weight)

    def _sum_weights(self, weights: float | Tensor) -> tuple[Tensor, Tensor]:
        """Sum [k] weights of every rank; the hashes of their orders come with them, and of what they have decided."""
        decided = self._comm.note_step(self._decisions())
        orders, device = [value for comm in self._comms for value in comm.order_values()], self._arena.device
        if isinstance(weights, Tensor):
            row = torch.cat([weights.to(device, torch.float64).view(-1), device_values(orders, device)])
        else:
            row = device_values([weights, *orders], device)
        rows = self._comm.exchange(row)
        hashes = rows[:, -len(orders) :]
        total, in_order = self._total(rows[:, : -len(orders)]), (hashes == hashes[0]).all()
        if self._model_group.alone:
            return total, in_order
        stages = self._model_group.exchange(torch.stack([total, torch.where(in_order, decided, math.nan)]))
        return self._model_group.count_once(stages)[:, 0].sum(), (stages[:, 1] == decided).all()

    def _total(self, weights: Tensor) -> Tensor:
        """Add up [N, k] weights."""
        return weights.sum()

    def shard_grads(self) -> Iterator[tuple[MasterPiece, Tensor]]:
        """Yield this rank's pieces of the reduced gradients, in model order (also at stage 0)."""
        for owned, place in self._reduced:
            yield owned, owned.unit.gradients.reduced.pieces()[place]

    @property
    def _to_host(self) -> ToHost | None:
        """The copier of gradients to an accelerator's host; None where they are on the device."""
        away = (unit.gradients for unit in self._units if unit.gradients.shard.device.type != self._arena.device.type)
        return next((gradients.to_host for gradients in away), None)

    @property
    def _are_narrow(self) -> bool:
        """Whether gradients are kept in fewer bits than they are reduced in: they stay as they are until the update."""
        return any(unit.gradients.shard.dtype.itemsize < self._wide.itemsize for unit in self._units)

    def _norms(self, factor: float | Tensor) -> Norms:
        """Unscale all gradients, and return the norm of this dp rank's shards, over its model-parallel group."""
        pieces = [(0, owned, grad) for owned, grad in self.shard_grads() if owned.unit not in self._model_group.copies]
        return self._model_group.norms(self._unscaled_norms(pieces, factor), 1, self._wide)

    def _unscaled_norms(
        self, pieces: Sequence[tuple[int, MasterPiece, Tensor]], factor: float | Tensor
    ) -> list[PieceNorm]:
        """Unscale all gradients, and return the norms of pieces; they are all of this rank's, but for copies.

        On the host a piece is multiplied while it is in a core's cache, by this rank's threads; narrow ones are left,
        and their norms multiplied.
        """
        to_host, narrow = self._to_host, self._are_narrow
        if (narrow or to_host is not None) and isinstance(factor, Tensor):
            factor = factor.to(self._arena.device if to_host is None else "cpu", self._wide)
        if not narrow:
            multiply([part for unit in self._units for part in self._not_normed(unit)], factor)
        if to_host is None and not narrow:
            return unscaled_norms(pieces, factor, group_elements(self._arena.device.type))

        def norm(grad: Tensor) -> Tensor:
            if narrow:
                return torch._foreach_norm([grad], 2, self._wide)[0] * factor
            multiply([grad], factor)
            return torch._foreach_norm([grad])[0]

        grads = [grad for *_, grad in pieces]
        norms = list(map(norm, grads)) if to_host is None else to_host.of_each(norm, grads)
        return [
            PieceNorm(cell, owned.order, owned.name, value)
            for (cell, owned, _), value in zip(pieces, norms, strict=True)
        ]

    def _not_normed(self, unit: Unit) -> list[Tensor]:
        """Return what this rank updates of a unit, and takes no norms of: a copy, and at stage 0 the others' shards."""
        whole, shard = unit.gradients.owned, unit.gradients.shard
        if unit in self._model_group.copies:
            return [whole]
        begin = int(shard.storage_offset() - whole.storage_offset())
        return [part for part in (whole[:begin], whole[begin + shard.numel() :]) if part.numel()]

    def _over_dp(self, norms: Norms) -> tuple[Tensor, float | Tensor]:
        """Combine the norms of all dp ranks: the global norm, equal everywhere, and whether every group's are even.

        A rank that has no norm, since its group's are uneven, sends NO_NORM: the exchange is one number per rank.
        """
        own = norms.values if norms.uneven is None else torch.where(norms.uneven == NONE, norms.values, NO_NORM)
        row = own.double().view(-1)
        rows = self._comm.exchange(row if self.tally is None else torch.cat([row, self.tally()]))
        if self.tally is not None:
            rows, counts = rows[:, : len(row)], rows[:, len(row) :]
            self.tallied = counts.sum(0)
        rows = rows[: self._shards]  # others have copies of the same shards
        partials = self._in_order(rows).to(self._wide)
        norm: Tensor = partials[0] if len(partials) == 1 else torch.linalg.vector_norm(partials)
        return norm, 1.0 if norms.uneven is None else (partials != NO_NORM).all()

    def _in_order(self, norms: Tensor) -> Tensor:
        """Return the norms of all dp ranks [N, k] in the order in which they are combined."""
        return norms.flatten()

    @property
    def applied(self) -> int:
        """Return how many steps have been applied."""
        return self._applied

    def count_from(self, applied: int, missed: Mapping[str, int]) -> None:
        """Go on after so many applied steps, of which parameters have missed some."""
        self._applied, self.missed = applied, Counter(missed)

    def _count(self) -> None:
        self._applied += 1
        for unit in self._units:
            if unit.trained < len(unit.weights.params):
                with untold():
                    frozen = zip(unit.layout.slots, unit.weights.params, strict=True)
                    self.missed.update(slot.name for slot, p in frozen if not p.requires_grad)

    def _update(self, factors: Sequence[float]) -> None:
        """Update, or leave it for when weights are used. factors: multiply gradients on the host, one by one."""
        self._count()
        self.wait()  # masters may be what is sent
        if self.updates is not None:
            self.updates.begin(frozen_options(self.torch), factors)
            units = list(self.updates.buckets)
            for unit, following in zip(units, [*units[1:], units[-1]], strict=True):
                sent = not (unit.weights.sharded or unit.weights.updates_all)  # one ahead, behind a unit's compute
                unit.weights.defer(partial(self.updates.through, following if sent else unit))
            return
        self._resident.make(self.torch)
        self.adopt_new()
        casts = (unit.weights.masters.cast for unit in self._units)
        cast_masters([cast for cast in casts if cast is not None], self._arena)
        for unit in in_turn(self._units):
            self.send(unit)
        for unit in self._units:
            unit.weights.leave()

    def send(self, unit: Unit) -> None:
        """Begin to send a unit's new weights, which stages 1 and 2 gather."""
        unit.comm.leave_under_way([unit.weights.send()])

    def wait(self) -> None:
        """Wait for new weights below stage 3; whatever touches one of their parameters waits, too."""
        for unit in self._units:
            if unit.weights.pending:
                unit.weights.ready()

    def flush(self) -> None:
        """Complete the last step: updates that are due are made, also at stage 3, and new weights are there."""
        if self.updates is not None:
            self.updates.finish()
            wait_for_device(self._arena.device)  # some of it goes to the host
        self.wait()


def piece_norms(grads: Sequence[tuple[int, MasterPiece, Tensor]]) -> list[PieceNorm]:
    """Return the norms of pieces of gradients, each in its cell."""
    norms = torch._foreach_norm([grad for *_, grad in grads]) if grads else ()
    return [PieceNorm(cell, owned.order, owned.name, norm) for (cell, owned, _), norm in zip(grads, norms, strict=True)]


def unscaled_norms(
    grads: Sequence[tuple[int, MasterPiece, Tensor]], factor: float | Tensor, room: int
) -> list[PieceNorm]:
    """Unscale pieces and return their norms, in groups of at most `room` elements or one longer piece.

    What a group's product writes its norm reads from a cache: 8 bytes a parameter for 12.
    """
    if not grads:
        return []
    if isinstance(factor, Tensor):
        factor = factor.to(grads[0][2].device, grads[0][2].dtype)  # once for all groups
    elif factor == 1.0:
        return piece_norms(grads)
    found = []
    for group in groups_of(grads, [grad.numel() for *_, grad in grads], room):
        multiply([grad for *_, grad in group], factor)
        found += piece_norms(group)
    return found


def multiply(grads: Sequence[Tensor], factor: float | Tensor) -> None:
    """Multiply in place; skipped when the factor is exactly 1."""
    if isinstance(factor, Tensor) and grads:
        torch._foreach_mul_(list(grads), factor.to(grads[0].device, grads[0].dtype))
    elif grads and factor != 1.0:
        torch._foreach_mul_(list(grads), factor)
