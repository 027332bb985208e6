"""deepspeed.utils for programs: fp32 parameters, gradients and states of a parameter as whole tensors; a loader; logs.

All ranks call those of parameters together, with the parameter that `engine.module` has. Those of no engine give None,
as in DeepSpeed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.ways.deepspeed.names import refusing
from zero3d.ways.deepspeed.owners import Owned, engine_of

__path__: list[str] = []  # a package without files: imports.py is asked for DeepSpeed's modules in it
logger = logging.getLogger("zero3d")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message on these ranks, [-1]: on all. As in DeepSpeed, none of several logs it without `ranks`."""
    rank = dist.get_rank() if dist.is_initialized() else -1
    named = ranks or []
    if rank < 0 or rank in named or -1 in named[:1]:
        logger.log(level, "[Rank %d] %s", rank, message)


@torch.no_grad()
def safe_get_full_fp32_param(param: nn.Parameter) -> Tensor | None:
    """Return a parameter's fp32 master as a whole tensor; None of a frozen one."""
    owned = _owned(param, "safe_get_full_fp32_param()")
    return None if owned is None else owned.master()


@torch.no_grad()
def safe_set_full_fp32_param(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite a parameter's fp32 master, and the weight with it; the same value on all ranks."""
    if (owned := _owned(param, "safe_set_full_fp32_param()")) is not None:
        owned.set_master(value)


@torch.no_grad()
def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> Tensor | None:
    """Return a state of the optimizer, such as exp_avg, as a whole tensor; None where there is none of this name."""
    owned = _owned(param, "safe_get_full_optimizer_state()")
    return None if owned is None else owned.state(optim_state_key)


@torch.no_grad()
def safe_set_full_optimizer_state(param: nn.Parameter, value: Tensor, optim_state_key: str) -> None:
    """Overwrite a state of the optimizer; the same value on all ranks."""
    if (owned := _owned(param, "safe_set_full_optimizer_state()")) is not None:
        owned.set_state(optim_state_key, value)


@torch.no_grad()
def safe_get_full_grad(param: nn.Parameter) -> Tensor | None:
    """Return the gradient of a step that waits for `step()`, averaged over ranks and not clipped; None before that."""
    owned = _owned(param, "safe_get_full_grad()")
    return None if owned is None else owned.gradient()


@torch.no_grad()
def safe_set_full_grad(param: nn.Parameter, value: Tensor) -> None:
    """Overwrite the gradient of a step that waits for `step()`; the same value on all ranks."""
    if (owned := _owned(param, "safe_set_full_grad()")) is not None:
        owned.set_gradient(value)


def safe_update_full_grad_vectorized(
    param_list: Iterable[nn.Parameter], update_func: Callable[[Tensor, nn.Parameter], Tensor]
) -> None:
    """Overwrite the gradients of a step that waits for `step()` with update_func(gradient, parameter)."""
    for param in param_list:
        gradient = safe_get_full_grad(param) if param.requires_grad else None
        if gradient is not None:
            safe_set_full_grad(param, update_func(gradient, param))


class RepeatingLoader:
    """Iterates over a loader, and begins it anew where it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self.data_iter = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self.data_iter)
        except StopIteration:
            self.data_iter = iter(self.loader)
            return next(self.data_iter)


def _owned(param: nn.Parameter, call: str) -> Owned | None:
    engine = engine_of(param)
    if engine is None or not any(p is param for unit in engine.optimizer.units for p in unit.weights.params):
        return None
    if engine.accumulation.count == 0:
        engine.optimizer.flush()
    elif not engine.accumulation.reached and "grad" not in call:
        raise ConfigError(f"{call} between the micro-batches of a step: call it before or after them.")
    return Owned(engine, param, call)


__getattr__ = refusing("utils")
