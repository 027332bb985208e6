"""Settings of the update: options of the optimizer's groups, and the schedule; noted, and put back after a load.

A checkpoint's values take the place of those that an engine was built with, as torch's `load_state_dict` has it.
`Given` keeps the engine's own, for `Engine.load(..., settings="given")`: options are put back, and the schedule is
where it would be if it had been there from the first step.

What a schedule computes by functions (LambdaLR) is not in its state: of these the factors at some steps are noted.
"""

from __future__ import annotations

import hashlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch.optim import Optimizer

from zero3d.checkpoint.code_names import name_of
from zero3d.checkpoint.json_values import to_json
from zero3d.errors import ConfigError, short

NO_SCHEDULE = "none"
NEED_STATES = ("amsgrad", "centered")  # options with which torch's optimizers have a state more
BECOME = ("_schedule_phases", "total_size", "step_ratio")  # of pct_start (OneCycleLR), step_size_up (CyclicLR)
NOT_STATE = (
    "optimizer",
    "base_lrs",
    "_last_lr",
    "lr_lambdas",
    "_step_count",
    "_is_initial",
    "_get_lr_called_within_step",
)
NEXT, DOUBLINGS = 16, 24  # factors are noted of so many steps from here on, and of 1, 2, 4, ... 2^23


def options_of(groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return options of an optimizer's groups, live or as a file has them, as JSON has them.

    Where a schedule moves the rate, `lr` is the one that it began with.
    """
    return [_options(group) for group in groups]


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    named = {name: _noted(value) for name, value in group.items() if name not in ("params", "initial_lr")}
    return named | ({"lr": _noted(group["initial_lr"])} if "initial_lr" in group else {})


def schedule_of(scheduler: Any) -> str:
    """Return a schedule in words: its class, and the arguments that it was built with as far as its state has them."""
    if scheduler is None:
        return NO_SCHEDULE
    state = scheduler.state_dict()
    arguments = [f"{name}={_noted(state[name])!r}" for name in _kept_of(_arguments(type(scheduler))) if name in state]
    inner = [schedule_of(each) for each in getattr(scheduler, "_schedulers", None) or ()]
    return f"{type(scheduler).__name__}({', '.join(arguments + inner)})"


def factors_of(scheduler: Any) -> str | None:
    """Return a hash of what the functions of a schedule give from its step on; None where it has none."""
    inner = [factors_of(each) for each in getattr(scheduler, "_schedulers", None) or ()]
    functions = getattr(scheduler, "lr_lambdas", None) or ()
    if not functions and not any(inner):
        return None
    now = int(scheduler.last_epoch)
    steps = [*range(now, now + NEXT), *(2**power for power in range(DOUBLINGS))]
    told = [[_factor(function, step) for step in steps] for function in functions]
    return hashlib.sha256(repr((told, inner)).encode()).hexdigest()[:8]


def state_of(scheduler: Any) -> str | None:
    """Return a hash of all that a schedule has but rates, which options have, and functions of LambdaLR (`factors_of`).

    None for no schedule. Two schedules of one kind have it at the same step, where they go on alike.
    """
    if scheduler is None:
        return None
    state = {name: value for name, value in vars(scheduler).items() if name not in NOT_STATE}
    inner = [state_of(each) for each in state.pop("_schedulers", ())]
    told = [(name, name_of(value) if callable(value) else _noted(value)) for name, value in sorted(state.items())]
    return hashlib.sha256(repr((told, inner)).encode()).hexdigest()[:8]


def _arguments(kind: type[Any]) -> Sequence[str]:
    """Return the names of the arguments of a class and of those it is derived from."""
    signatures = [inspect.signature(vars(each)["__init__"]) for each in kind.__mro__ if "__init__" in vars(each)]
    names = {name for signature in signatures for name in signature.parameters}
    return sorted(names - {"self", "optimizer", "last_epoch", "verbose", "args", "kwargs"})


def _kept_of(arguments: Sequence[str]) -> Iterator[str]:
    """Yield the names under which a state may have arguments: milestones of SequentialLR are `_milestones` there."""
    for name in arguments:
        yield from (other for other in (name, f"_{name}", f"{name}s") if other not in ("_schedulers", "base_lrs"))
    yield from BECOME


def _factor(function: Callable[[int], float], step: int) -> str:
    try:
        return repr(float(function(step)))
    except Exception as error:  # noqa: BLE001  # a function of the caller's, which need not know all steps
        return type(error).__name__


def _noted(value: Any) -> Any:
    try:
        return to_json(value)
    except TypeError:
        return type(value).__name__


def check_given(given: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]) -> None:
    """Refuse options that need states which a checkpoint does not have. Raises ConfigError."""
    for own, others in zip(given, saved, strict=True):
        if missing := [name for name in NEED_STATES if own.get(name) and not others.get(name)]:
            raise ConfigError(
                f"settings='given': {missing[0]}=True needs states that the checkpoint does not have, because its run "
                f"had {missing[0]}=False: build the Engine without it, or load with settings='saved'."
            )


class Given:
    """Keeps the options and the schedule that an engine was built with, to put them back after a load.

    Built before a load, it moves the schedule to the step of the checkpoint and back; nothing stays changed. Raises
    ConfigError where the schedule cannot be moved.
    """

    def __init__(self, optimizer: Optimizer, scheduler: Any, steps: int) -> None:
        self._optimizer, self._scheduler = optimizer, scheduler
        with self._unchanged():
            for _ in range(steps if scheduler is not None else 0):
                self._advance()
            self._options = _copied(optimizer)
            self._state = None if scheduler is None else deepcopy(scheduler.state_dict())

    def put_back(self) -> None:
        """Give optimizer and schedule what they had, at the step of the checkpoint."""
        _fill(self._optimizer, self._options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(self._state)

    def _advance(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects a step of the optimizer first
            try:
                self._scheduler.step()
            except Exception as error:
                raise ConfigError(
                    f"settings='given': {type(self._scheduler).__name__} cannot be moved to the checkpoint's step "
                    f"({type(error).__name__}: {short(error)}): load with settings='saved'."
                ) from error

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undo inside what a schedule changes."""
        options = _copied(self._optimizer)
        state = None if self._scheduler is None else deepcopy(self._scheduler.state_dict())
        try:
            yield
        finally:
            _fill(self._optimizer, options)
            if self._scheduler is not None:
                self._scheduler.load_state_dict(state)


def _copied(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {name: deepcopy(value) for name, value in group.items() if name != "params"} for group in optimizer.param_groups
    ]


def _fill(optimizer: Optimizer, options: Sequence[Mapping[str, Any]]) -> None:
    for group, values in zip(optimizer.param_groups, options, strict=True):
        for name in set(group) - {"params", *values}:
            del group[name]  # the checkpoint's schedule had it
        group.update(deepcopy(dict(values)))
