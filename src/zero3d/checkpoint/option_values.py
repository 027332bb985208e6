"""Values of a checkpoint that torch's optimizer and schedule are given: each is checked before any is taken.

options of groups      of the types that they had when the engine was built: what an earlier checkpoint has put in
                       their place does not count, so that no load changes what the next one may have
numbers it keeps       of every parameter, such as Adam's step: finite, and none under the name of a tensor
all of it together     a twin of torch's optimizer takes a step with it (`check_update`)
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from zero3d.checkpoint.fields import USE_ANOTHER, Field, quote
from zero3d.checkpoint.json_values import from_json
from zero3d.checkpoint.manifest import AVERAGE, FROZEN, MASTER, Manifest
from zero3d.checkpoint.save import STEP_OF
from zero3d.checkpoint.state import EngineState
from zero3d.errors import CheckpointError

STEP = "step"
FLAGS = ("foreach", "fused", "maximize", "capturable", "differentiable", "amsgrad", "centered", "nesterov")
OF_SCHEDULES = ("initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr")  # options that they write
INNER, FUNCTIONS = "_schedulers", "lr_lambdas"  # of a schedule: others that it calls, its functions' own values
LARGEST_FP32 = torch.finfo(torch.float32).max


def check_option(name: str, saved: Field, built: Mapping[str, Any], default: Any) -> None:
    """Check an option of a group by what it was when the engine was built; `default`: where nobody chooses it."""
    if name in OF_SCHEDULES:
        check_alike(saved, 0.0)
    elif name not in built:
        _check_plain(saved)
    elif name in FLAGS and (built[name] is None or isinstance(built[name], bool)):
        if saved.value is not None:
            saved.flag()
    elif built[name] is None or default is None:
        _check_plain(saved)
    else:
        check_alike(saved, built[name])


def _check_plain(saved: Field) -> None:
    """Check that it is null, a truth value, a number, a text, or a list of such."""
    if isinstance(saved.value, list):
        for item in saved.rows():
            _check_plain(item)
    elif isinstance(saved.value, dict):
        saved.refuse("a plain value")
    elif isinstance(saved.value, (int, float)) and not isinstance(saved.value, bool):
        _check_number(saved)


def check_alike(saved: Field, live: Any) -> None:
    """Check that a saved value may take the place of a live one: of its kind, or null for what may be left out."""
    last = saved.name.rpartition(".")[2]
    if last == FUNCTIONS and isinstance(live, list):  # of each group null, or the attributes of an object
        for row in saved.rows(len(live)):
            if row.value is not None:
                row.entries()
    elif live is None:
        if saved.value is not None and not isinstance(saved.value, bool):
            _check_number(saved)
    elif isinstance(live, bool):
        if saved.value is not None:
            saved.flag()
    elif isinstance(live, (int, float)) or (isinstance(live, Tensor) and live.dim() == 0):
        _check_number(saved)
    elif isinstance(live, str):
        saved.text()
    elif isinstance(live, tuple):
        for saved_item, live_item in zip(saved.rows(len(live)), live, strict=True):
            check_alike(saved_item, live_item)
    elif isinstance(live, list):
        for number, saved_item in enumerate(saved.rows(len(live) if last == INNER else None) if live else ()):
            check_alike(saved_item, live[min(number, len(live) - 1)])
    elif isinstance(live, dict):
        _check_mapping(saved, live)
    elif isinstance(live, Tensor):
        _check_tensor(saved, tuple(live.shape))


def _check_mapping(saved: Field, live: Mapping[Any, Any]) -> None:
    """Check a mapping by its keys; those that are numbers, as steps are, may be others."""
    for key, live_item in live.items():
        if isinstance(key, str) or str(key) in saved.entries():
            check_alike(saved.entry(str(key)), live_item)


def _check_number(saved: Field) -> None:
    """Check that it is a number; schedulers begin with infinite ones."""
    value = saved.value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        saved.refuse("a number")
    if isinstance(value, int):
        saved.number()  # not larger than a float can be


def _check_tensor(saved: Field, shape: tuple[int, ...]) -> None:
    if not shape:
        saved.number()
        return
    for row in saved.rows(shape[0]):
        _check_tensor(row, shape[1:])


def check_scalars(manifest: Manifest, states: set[str], engine: EngineState) -> None:
    """Check the numbers that the optimizer keeps of every parameter, whose tensors have these names."""
    scalars = manifest.fields.entry("optimizer").entry("scalars")
    for name in engine.optimizer.numbers if states - {MASTER, FROZEN, AVERAGE} else ():
        scalars.entry(name)
    for name, saved in scalars.items():
        value = saved.number()
        if abs(value) > LARGEST_FP32:
            saved.refuse("a number that fp32 can hold")
        if name in states:
            saved.refuse(f"no number: {quote(name)} is a tensor of every parameter")
        if name.startswith(STEP_OF):
            if name.removeprefix(STEP_OF) not in manifest.parameters:
                saved.refuse("the count of a parameter")
            if not 0 <= value <= scalars.entry(STEP).number() or value % 1:
                saved.refuse(f"a whole number from 0 to {STEP}")


def check_update(manifest: Manifest, stored: Mapping[str, Sequence[str]], engine: EngineState) -> None:
    """Have a twin of torch's optimizer take a step with what the checkpoint has of each group. Raises CheckpointError.

    Options of the right types may be out of torch's range, not for this device, or want states that are not there.
    Optimizers of others are not tried, nor options that their class does not take as they are now.
    """
    optimizer, saved = engine.optimizer.torch, manifest.fields.entry("optimizer")
    if not type(optimizer).__module__.startswith("torch.optim"):
        return
    scalars = {key: value for key, value in saved.entry("scalars").entries().items() if not key.startswith(STEP_OF)}
    for number, (group, field) in enumerate(zip(optimizer.param_groups, saved.entry("groups").rows(), strict=False)):
        owned = next((piece for piece in engine.optimizer.pieces if piece.group == number), None)
        if owned is None:
            continue  # another rank has some of it
        now = {name: value for name, value in group.items() if name != "params"}
        kept = optimizer.state.get(owned.master, {})
        if _fault(optimizer, owned.master, now, kept) is not None:
            continue
        names = [name for name in stored.get(engine.full_model.owner(owned.name), ()) if name not in (MASTER, AVERAGE)]
        states: dict[str, Any] = {name: torch.zeros(1, device=owned.master.device) for name in names}
        for name, value in scalars.items() if states or not kept else ():
            like = kept.get(name)
            states[name] = torch.full_like(like, value) if isinstance(like, Tensor) else torch.tensor(value)
        error = _fault(optimizer, owned.master, now | from_json(field.value, now), states)
        if error is not None:
            raise CheckpointError(
                f"{field.file}: {field.name} is not taken by {type(optimizer).__name__} on this {owned.master.device} "
                f"with the states that are saved ({type(error).__name__}: {quote(str(error))}). {USE_ANOTHER}"
            ) from error


def _fault(
    optimizer: Optimizer, like: Tensor, options: Mapping[str, Any], states: Mapping[str, Any]
) -> Exception | None:
    """Return what an optimizer of this class raises when it is built with options and takes a step; None if nothing."""
    kind: Any = type(optimizer)
    p = torch.zeros(1, dtype=like.dtype, device=like.device, requires_grad=True)
    p.grad = torch.zeros_like(p)
    arguments = {name: options[name] for name in inspect.signature(kind).parameters if name in options}
    try:
        twin = kind([{"params": [p], **options}], **arguments)
        flat = {name for name, value in states.items() if isinstance(value, Tensor) and value.dim() == 1}
        twin.state[p] = {name: torch.zeros_like(p) if name in flat else _copy(states[name]) for name in states}
        twin.step()
    except Exception as error:  # noqa: BLE001  # torch raises many kinds
        return error
    return None


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else deepcopy(value)
