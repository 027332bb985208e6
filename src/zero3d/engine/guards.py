"""Refuse what would go wrong in silence: copies of weights that are not there, clipping and steps without gradients.

At stage 3 a parameter outside its forward is one NaN in the shape of the weight, and refuses to be
read (zero/released_parameters.py). Of whole modules `state_dict`, `load_state_dict`, `deepcopy` and
pickling raise instead. No class is patched: torch's own hooks and an instance attribute
`__reduce_ex__`, which copy and pickle look up, are enough.

A parameter's `grad` stays None at every stage, and torch's `clip_grad_norm_` takes parameters without gradients for
ones that need no clipping: it returns 0. It has no hook, so the function that it calls last is replaced, once, by one
that checks the parameters first. A program that has imported `clip_grad_norm_` earlier meets it, too. An optimizer of
the program's own over them would train nothing: torch's hook ahead of all optimizers' steps looks at its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import Optimizer, optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from zero3d.errors import ConfigError, ReleasedParameterError
from zero3d.zero.unit import Unit
from zero3d.zero.unit_parts import State
from zero3d.zero.weights import is_placeholder, placeholder

MARK = "__reduce_ex__"
CLIPPING = {  # torch's functions for clipping: the modules in which each is looked up, by the name that a program calls
    "clip_grad_value_": (torch.nn.utils, clip_grad),
    "clip_grads_with_norm_": (torch.nn.utils,),
    "_clip_grads_with_norm_": (clip_grad,),  # by clip_grad_norm_
}
_owned = WeakTensorKeyDictionary()  # parameters whose gradients an engine takes


def is_guarded(model: nn.Module) -> bool:
    """Return whether an engine already owns this model or a part of it."""
    return any(MARK in vars(module) for module in _own(model)) or any(map(is_placeholder, model.parameters()))


def _own(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that have parameters: others may be in several models, as transformers' functions are."""
    return (module for module in model.modules() if next(module.parameters(), None) is not None)


def guard(model: nn.Module, unit_of: Mapping[nn.Parameter, Unit], opened: Callable[[Unit], bool]) -> None:
    """Install the refusals on every module with parameters. `opened` says whether a unit is inside full_params()."""

    def refuse_read(module: nn.Module, prefix: str, keep_vars: bool) -> None:
        for name, p in module.named_parameters(prefix.rstrip("."), recurse=False):
            unit = unit_of.get(p)
            if unit is not None and unit.weights.state is not State.FULL:
                _refuse("state_dict()", name)

    def detach_copies(module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        for name, p in module.named_parameters(prefix.rstrip("."), recurse=False):
            unit = unit_of.get(p)
            if unit is not None and unit.weights.sharded and name in state:
                state[name] = state[name].clone()  # what is taken inside full_params() must outlive it

    def refuse_write(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        for name, p in module.named_parameters(prefix.rstrip("."), recurse=False):
            unit = unit_of.get(p)
            if unit is not None and not opened(unit):
                _refuse("load_state_dict()", name)

    def refuse_copy(protocol: Any) -> NoReturn:
        raise ReleasedParameterError(
            "this model belongs to an Engine: a copy or pickle would hold shards or placeholders, and its hooks would "
            "drive the original's engine. Make a copy that is kept beside it, such as an average, before the engine "
            "(before accelerator.prepare), and read values for it inside engine.full_params(); Engine(ema=0.999) "
            "averages in shards. Use engine.export(directory) for the weights, engine.save(directory) for everything, "
            "or engine.close() when training is over, which makes the model a plain one (of a Trainer: "
            "trainer.accelerator.close_engine(), of Lightning's: trainer.strategy.close_engine())."
        )

    for module in _own(model):
        module.register_state_dict_pre_hook(refuse_read)  # type: ignore[no-untyped-call]
        module.register_state_dict_post_hook(detach_copies)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(refuse_write)  # type: ignore[no-untyped-call]
        setattr(module, MARK, refuse_copy)


def guard_gradients(params: Iterable[nn.Parameter]) -> None:
    """Refuse to clip the gradients of these parameters by torch's own functions, and to step optimizers over them."""
    for p in params:
        _owned[p] = True
    for name, places in CLIPPING.items():
        for place in places:
            clip = getattr(place, name)
            if not hasattr(clip, "_refuses_owned"):
                setattr(place, name, _refusing(clip))
    if _refuse_step not in optimizer._global_optimizer_pre_hooks.values():
        optimizer.register_optimizer_step_pre_hook(_refuse_step)


def leave_gradients(params: Iterable[nn.Parameter]) -> None:
    """Let torch's own functions and optimizers have the gradients of these parameters again: no engine takes them."""
    for p in params:
        if p in _owned:
            del _owned[p]


def _takes_gradient(p: Tensor) -> bool:
    """Return whether an engine takes, or has taken, the gradient of a tensor."""
    return p in _owned and p.requires_grad and p.grad is None


def _refuse_step(stepped: Optimizer, args: Any, kwargs: Any) -> None:
    firsts = [group["params"][0] for group in stepped.param_groups if group["params"]]
    if firsts and all(map(_takes_gradient, firsts)):
        raise ConfigError(
            f"this {type(stepped).__name__} has the parameters of an Engine, which takes their gradients (`grad` is "
            "None): it would train nothing. Pass it to Engine(optimizer=...), and call engine.step() instead. If the "
            "program is to train without an engine, close that first: engine.close(), of a Trainer "
            "trainer.accelerator.close_engine(), of Lightning's trainer.strategy.close_engine()."
        )


def _refusing(clip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if any(map(_takes_gradient, parameters)):
            raise ConfigError(
                "torch's functions cannot clip gradients that an Engine has taken (`grad` of its parameters is None): "
                "pass Engine(clip_norm=...), whose default is 1.0, and remove this call. A step's norm is "
                "engine.step().grad_norm, or engine.grad_norm() before it. If the program is to train without an "
                "engine, close that first: engine.close(), of a Trainer trainer.accelerator.close_engine()."
            )
        return clip(parameters, *args, **kwargs)

    checked._refuses_owned = True  # type: ignore[attr-defined]
    return checked


CUT_INTO_STAGES = (
    "was cut into pipeline stages, and this rank has some of its layers: call engine.train_batch, engine.evaluate or "
    "engine.generate, use engine.export(directory) for the weights of the whole model, and engine.module for the "
    "chunks that are here."
)


def guard_rest(model: nn.Module, kept: Set[nn.Parameter], why: str = CUT_INTO_STAGES) -> None:
    """Free what this rank does not have of a model, and refuse to use the model as a whole.

    kept  this rank's parameters: a pipeline's chunks share them with the model
    why   the fate of the model, and the object to use instead
    """

    def refuse(*_: Any) -> NoReturn:
        raise ReleasedParameterError(f"this {type(model).__name__} {why}")

    model.register_forward_pre_hook(refuse)  # its modules' own forwards may be wrapped into those of the chunks
    for module in _own(model):
        module.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        setattr(module, MARK, refuse)
    for p in model.parameters():
        if p not in kept:
            p.data = placeholder(p, p.dtype, p.device)


def _refuse(what: str, name: str) -> NoReturn:
    raise ReleasedParameterError(
        f"{what} of {name!r}: the engine holds only shards of it here. Wrap the call in "
        "`with engine.full_params():` (gathers the weights), or use engine.export(directory); of a Trainer or an "
        "Accelerator, accelerator.get_state_dict(model) on all ranks."
    )
