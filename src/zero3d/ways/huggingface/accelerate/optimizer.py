"""The optimizers that `Accelerator.prepare` returns: the engine's, and one that has no model yet."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.nested import map_tensors
from zero3d.ways.huggingface.accelerate.gradient_reads import GradientReads
from zero3d.zero.optimizer import APPLIED, NOT_DUE

TOGETHER = "an optimizer is prepared with its model, in one call: accelerator.prepare(model, optimizer)."


def shares(optimizer: Optimizer, model: nn.Module) -> bool:
    """Return whether an optimizer updates any parameter of a model."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return any(id(p) in own for p in model.parameters())


def forget_by_model(engine: Engine, forget: Callable[[], None]) -> Callable[..., None]:
    """Have `zero_grad` of an engine's module forget a step, whose gradients it would not find; return that method.

    On a part of the module it raises ConfigError where there are gradients: they are forgotten together.
    """

    def of_part(set_to_none: bool = True) -> None:
        if _has_gradients(engine):
            raise ConfigError(
                "zero_grad() of a part of the model: its gradients are an engine's, which forgets those of all "
                "parameters together. Call zero_grad() of the model or of its optimizer."
            )

    def of_all(set_to_none: bool = True) -> None:
        if _has_gradients(engine):
            forget()

    engine.put("zero_grad", of_part, everywhere=True)
    engine.put("zero_grad", of_all)
    return of_all


def _has_gradients(engine: Engine) -> bool:
    return bool(engine.accumulation.count or engine.reductions.pending)


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
        self.reads = GradientReads(engine)
        self._warned = False
        forget_by_model(engine, self._forget)

    def clip(self, max_norm: float) -> Tensor:
        """Have the step that is due clip at this norm (inf: not), and return the norm of its gradients; all ranks call.

        The step takes that norm. In a window of accumulation that goes on, nothing is clipped, and the norm is NaN.
        """
        engine = self.engine
        if not self.gradient_state.sync_gradients:
            self._warn_of_window()
            return torch.full((), math.nan, device=engine.mesh.device)
        self.reads.pause()
        engine.reshard()
        before, limit = engine.clip_norm, None if math.isinf(max_norm) else max_norm
        if before is None or (limit is not None and limit < before):
            engine.clip_norm = limit
        norm = engine.grad_norm().clone()  # the step's own is not the caller's to write into
        if engine.accumulation.count == 0:  # no backward came: as torch's, of no gradients
            return norm.zero_()
        return norm if before is None else norm.mul_(torch.clamp(before / (norm + 1e-6), max=1.0))

    def _warn_of_window(self) -> None:
        if not self._warned and self.engine.mesh.rank == 0:
            warnings.warn(
                "clip_grad_norm_ inside a window of accumulation: gradients are clipped once, where the window ends, "
                "and their norm is NaN until then. Call it under `if accelerator.sync_gradients:`.",
                stacklevel=4,
            )
        self._warned = True

    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Apply the step, if the window of accumulation ends here."""
        if closure is not None:
            raise ConfigError(
                "optimizer.step(closure) is not supported: call the model and accelerator.backward before it."
            )
        if not self.gradient_state.sync_gradients:
            return
        self.reads.end()
        self.engine.reshard()
        result = self.engine.step()
        self._is_overflow = result.reason not in (APPLIED, NOT_DUE)  # without a backward Accelerate's schedules go on
        self.engine.clip_norm = None

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forget the gradients of the window so far; after a step there are none."""
        if self.gradient_state.sync_gradients:
            self._forget()

    def _forget(self) -> None:
        self.reads.end()
        self.engine.zero_grad()
        self.engine.clip_norm = None

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
