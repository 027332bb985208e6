"""The optimizers that `Accelerator.prepare` returns: the engine's, and one that has no model yet."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.nested import map_tensors
from zero3d.zero.optimizer import APPLIED, NOT_DUE

TOGETHER = "an optimizer is prepared with its model, in one call: accelerator.prepare(model, optimizer)."


def shares(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates any parameter of a model."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in own for p in model.parameters())


class LoneOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Is prepared without its model: it can be read and pickled, and every step raises ConfigError."""

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__(optimizer, device_placement=False)

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        """Raise ConfigError: on several ranks each would go its own way."""
        raise ConfigError(TOGETHER)


class StatesOfAllRanks(Mapping[Any, Any]):
    """Stands for the states of an optimizer, of which a rank has a part: every read raises ConfigError."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise ConfigError("a rank has a part of the optimizer's states: save all with accelerator.save_state(FOLDER).")

    __getitem__ = __iter__ = __len__ = __reduce_ex__ = _refuse


class EngineOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """Has the parameter groups of the torch optimizer that the engine updates with, so that schedules act on them.

    engine  whose step it takes, where the window of accumulation ends
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer.torch, device_placement=False)
        self.engine = engine
        self._norm: Tensor | None = None

    def clip(self, max_norm: float) -> Tensor:
        """Have the next step clip at this norm (inf: not); return a number that is NaN until that step fills it in."""
        self.engine.clip_norm = None if math.isinf(max_norm) else max_norm
        self._norm = torch.full((), math.nan, device=self.engine.mesh.device)
        return self._norm

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Apply the step, if the window of accumulation ends here."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) is not supported: call the model and accelerator.backward before it."
            )
        if not self.gradient_state.sync_gradients:
            return
        self.engine.reshard()
        result = self.engine.step()
        self._is_overflow = result.reason not in (APPLIED, NOT_DUE)  # without a backward Accelerate's schedules go on
        if self._norm is not None:
            self._norm.copy_(result.grad_norm)
        self.engine.clip_norm, self._norm = None, None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients of the window so far; after a step there are none."""
        if self.gradient_state.sync_gradients:
            self.engine.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the torch optimizer's; of several ranks each has a part of the states: not shown."""
        found: dict[str, Any] = super().state_dict()
        if self.engine.closed or self.engine.world.size == 1:
            return map_tensors(found, torch.clone)  # type: ignore[no-any-return]
        return {"state": StatesOfAllRanks(), "param_groups": found["param_groups"]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Raise ConfigError: a rank has a part of the states."""
        raise ConfigError("a rank has a part of the optimizer's states: load all with accelerator.load_state(FOLDER).")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ConfigError: a copy or a pickle would be without its engine."""
        raise ConfigError(
            "a prepared optimizer cannot be copied or pickled, since its states are an engine's: save them with "
            "accelerator.save_state(FOLDER), which accelerator.load_state(FOLDER) reads. After "
            "accelerator.free_memory() optimizer.optimizer is torch's own, without states."
        )
