"""Which engine a parameter belongs to, and its fp32 master, states and gradient as whole tensors.

    parameter -> engine, unit -> this rank's pieces -> whole tensor [shape]      read: summed over dp, fp32
                                                    <- each rank's range of it   write: nothing moves

All ranks call each of these together. Reading moves 4 (N-1) bytes per element and rank.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn

from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.precision import joined
from zero3d.zero.unit import Unit
from zero3d.zero.updates import MasterPiece

Part = tuple[int, Tensor]  # where in the parameter it begins, and its values [n]
CHUNK = 1 << 20  # elements that travel at once

_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def register(engine: Engine) -> None:
    """Let the parameters of an engine be found."""
    _engines.add(engine)


def forget(engine: Engine) -> None:
    """Let the parameters of an engine no longer be found."""
    _engines.discard(engine)


def engine_of(parameter: nn.Parameter) -> Engine | None:
    """Return the engine that has a parameter, or None."""
    return next((engine for engine in _engines if _unit(engine, parameter) is not None), None)


class Owned:
    """A trained parameter's pieces on this rank. Raises ConfigError where they cannot be read as whole tensors.

    state  the name of a state of the optimizer, in place of the master
    """

    def __init__(self, engine: Engine, parameter: nn.Parameter, call: str) -> None:
        unit = _unit(engine, parameter)
        assert unit is not None
        if engine.optimizer.updates is not None:
            raise ConfigError(
                f"{call}: states leave the device here (offload), and are read by zero3d ckpt show alone."
            )
        if engine.mesh.tp > 1:
            raise ConfigError(f"{call} is for parameters that tp does not cut: leave tensor_parallel out.")
        self._engine, self._shape = engine, parameter.shape
        slot = next(i for i, p in enumerate(unit.weights.params) if p is parameter)
        self._name = unit.layout.slots[slot].name
        self._pieces = [owned for owned in engine.optimizer.pieces if owned.unit is unit and owned.name == self._name]
        self._unit = unit

    def master(self) -> Tensor:
        """Return the whole master."""
        parts = ((owned.piece.start, joined(owned.read())) for owned in self._pieces)
        return self._whole(parts, self._unit.weights.updates_all)

    def set_master(self, value: Tensor) -> None:
        """Overwrite the master, and the weight with it."""
        for owned, part in self._parts(value):
            owned.write(part)
        self._unit.weights.refresh().wait()

    def state(self, key: str) -> Tensor | None:
        """Return a whole state of the optimizer; None where it has none of this name."""
        if not self._has(key):
            return None
        states = self._engine.optimizer.states_of
        parts = ((owned.piece.start, states(owned)[key]) for owned in self._pieces)
        return self._whole(parts, self._unit.weights.updates_all)

    def set_state(self, key: str, value: Tensor) -> None:
        """Overwrite a state of the optimizer. Raises ConfigError where it has none of this name."""
        if not self._has(key):
            raise ConfigError(f"{self._name} has no state {key!r} before the optimizer's first step made it.")
        for owned, part in self._parts(value):
            view = self._engine.optimizer.state_view(owned, key, owned.master.dtype)
            self._engine.optimizer.overwrite(owned, key, view.copy_(part))

    def gradient(self) -> Tensor | None:
        """Return the whole gradient that the next step clips and applies; None where no backward has ended one."""
        if not self._engine.accumulation.reached:
            return None
        self._engine.reductions.catch_up()
        return self._whole(self._gradients(), everywhere=False) / self._factor

    def set_gradient(self, value: Tensor) -> None:
        """Overwrite the gradient that the next step clips and applies. Raises ConfigError where there is none."""
        if not self._engine.accumulation.reached:
            raise ConfigError("safe_set_full_grad() is for after the last backward of a step, and before step().")
        self._engine.reductions.catch_up()
        self._unit.gradients.gather()  # at stage 0, where every rank has all sums beside those of its shard
        flat = self._flat(value)
        owned = ((piece.piece.start, piece.gradient) for piece in self._pieces)
        for start, grad in (*self._gradients(), *owned):
            grad.copy_(flat[start : start + grad.numel()].to(grad.device, grad.dtype) * self._factor)

    @property
    def _factor(self) -> float:
        """What gradients are multiplied with until the step: the loss scale, and a weight of 1 for each rank."""
        return self._engine.loss_scale.value * self._engine.dp.size

    def _has(self, key: str) -> bool:
        """Say whether any rank has a state; one with no piece of the parameter cannot tell."""
        states = self._engine.optimizer.states_of
        mine = any(
            isinstance(states(owned).get(key), Tensor) and states(owned)[key].dim() == 1 for owned in self._pieces
        )
        return bool(self._engine.dp.exchange(torch.tensor([float(mine)], dtype=torch.float64)).max())

    def _gradients(self) -> Iterator[Part]:
        """Yield this rank's parts of the reduced gradient: a shard's, also at stage 0."""
        layout = self._unit.layout
        for piece, grad in zip(layout.pieces(self._unit.comm.rank), self._unit.gradients.reduced.pieces(), strict=True):
            if layout.slots[piece.slot].name == self._name:
                yield piece.start, grad

    def _parts(self, value: Tensor) -> Iterator[tuple[MasterPiece, Tensor]]:
        flat = self._flat(value)
        for owned in self._pieces:
            start = owned.piece.start
            yield owned, flat[start : start + owned.master.numel()].to(owned.master.device, owned.master.dtype)

    def _flat(self, value: Tensor) -> Tensor:
        if value.shape != self._shape:
            raise ConfigError(f"{self._name} has shape {list(self._shape)}, and the value {list(value.shape)}.")
        return value.detach().reshape(-1)

    def _whole(self, parts: Iterable[Part], everywhere: bool) -> Tensor:
        """Return a whole tensor of parts; everywhere: every rank has all of them."""
        whole = torch.zeros(self._shape.numel(), dtype=torch.float32, device=self._engine.mesh.device)
        for start, values in parts:
            whole[start : start + values.numel()].copy_(values)
        if not everywhere:
            for start in range(0, whole.numel(), CHUNK):
                here = whole[start : start + CHUNK]
                here.copy_(self._unit.comm.exchange(here).sum(0))  # of zeros and one value: exact
        return whole.view(self._shape)


def _unit(engine: Engine, parameter: nn.Parameter) -> Unit | None:
    return next((unit for unit in engine.units if any(p is parameter for p in unit.weights.params)), None)
