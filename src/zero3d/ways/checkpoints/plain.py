"""Folders that Trainer and Accelerate write of torch's own optimizer, also under DistributedDataParallel or by FSDP.

    model.safetensors, pytorch_model.bin, with or without an index    weights by name
    pytorch_model_fsdp.bin, adapter_model.safetensors                 of FSDP, whole; of PEFT, adapters alone
    optimizer.pt (Trainer), optimizer.bin (Accelerate, FSDP)          states by number, or by name (FSDP)
    scheduler.pt, scheduler.bin                                       of the schedule

A number of `optimizer.pt` says nothing of a parameter: it is the place in the optimizer's groups, which whoever loads
it has built alike. So the groups are held to those of that optimizer, and every state to its parameter's shape.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.optim import Optimizer

from zero3d.errors import CheckpointError, short
from zero3d.reading import Unreadable, read_object
from zero3d.ways.checkpoints.archives import map_file, read_torch
from zero3d.ways.checkpoints.foreign import ADAMS, Foreign

OPTIMIZERS = ("optimizer.pt", "optimizer.bin")
WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
STEP = "step"
_OF_TRAINER = (
    " A Trainer's first group has weight decay, and its second none: decay = "
    "Trainer.get_decay_parameter_names(None, model); AdamW([{'params': [p for n, p in model.named_parameters() if n in "
    "decay]}, {'params': [p for n, p in model.named_parameters() if n not in decay], 'weight_decay': 0.0}])."
)


class Live(NamedTuple):
    """Describes the model and the optimizer that are to go on.

    kind     class of the torch optimizer
    shapes   of all parameters, by name
    trained  names of those that are trained
    same     other names of a tied parameter, by each of its names
    groups   names of the parameters in the optimizer's groups, in their order
    buffers  names of the persistent ones
    saved    name in a file of adapters -> name of the parameter; None for a model without adapters
    states   options of a group -> names of the states that the optimizer keeps with them; None where nobody knows
    """

    kind: str
    shapes: Mapping[str, tuple[int, ...]]
    trained: frozenset[str]
    same: Mapping[str, Sequence[str]]
    groups: Sequence[Sequence[str]]
    buffers: frozenset[str]
    saved: Mapping[str, str] | None
    states: Callable[[Mapping[str, Any]], frozenset[str] | None] = lambda options: None


def found(folder: Path) -> Path | None:
    """Return the file of the optimizer's states; None where a folder has none."""
    return next((folder / name for name in OPTIMIZERS if (folder / name).is_file()), None)


def read(folder: Path, live: Live) -> Foreign:
    """Read a folder that `found` has a file of. Raises CheckpointError."""
    path = found(folder)
    assert path is not None
    weights = _weights(folder, live)
    foreign = Foreign(f"torch.optim.{live.kind} ({path})", kind=live.kind)
    for name, shape in live.shapes.items():
        values = next((weights[each] for each in live.same.get(name, (name,)) if each in weights), None)
        if values is not None and tuple(values.shape) != shape:
            raise CheckpointError(f"{folder} has {name} as {tuple(values.shape)}, and this model has it as {shape}.")
        if values is None and (name in live.trained or live.saved is None):
            raise CheckpointError(f"{folder} has no weights of {name}: build the model that it was saved from.")
        if values is None:
            foreign.kept[name] = shape
        else:
            (foreign.masters if name in live.trained else foreign.frozen)[name] = values
    foreign.buffers |= {name: weights[name] for name in live.buffers & weights.keys()}
    _add_states(foreign, path, live)
    return foreign


def _weights(folder: Path, live: Live) -> dict[str, Tensor]:
    names = ADAPTERS if live.saved is not None else WEIGHTS
    for name in names:
        if (folder / name).is_file():
            found = _file(folder, name)
            return found if live.saved is None else {live.saved.get(key, key): value for key, value in found.items()}
    for index in INDEXES if live.saved is None else ():
        if (folder / index).is_file():
            try:
                files = {*read_object(folder / index)["weight_map"].values()}
            except (Unreadable, KeyError, AttributeError, TypeError) as error:
                raise CheckpointError(f"{folder / index} is no index of weights ({short(error)}).") from error
            return {key: value for name in sorted(files) for key, value in _file(folder, str(name)).items()}
    raise CheckpointError(f"{folder} has an optimizer's states, and none of {', '.join(names)}: copy the weights, too.")


def _file(folder: Path, name: str) -> dict[str, Tensor]:
    mapped = map_file(folder, name)
    if not name.endswith(".safetensors"):
        found = read_torch(mapped)
        return {key: value for key, value in found.items() if isinstance(value, Tensor)}
    try:
        return dict(load_file(mapped.path))
    except SafetensorError as error:
        raise CheckpointError(f"{mapped.path} is damaged ({short(error)}): copy it again.") from error


def _add_states(foreign: Foreign, path: Path, live: Live) -> None:
    """Take moments, numbers and options of the groups. Raises CheckpointError for what is not that optimizer's."""
    saved = read_torch(map_file(path.parent, path.name))
    states, groups = saved["state"], saved["param_groups"]
    counts, wanted = [len(group["params"]) for group in groups], [len(group) for group in live.groups]
    if counts != wanted:
        raise CheckpointError(
            f"{path} has groups of {counts} parameters, and this optimizer has {wanted}: build the optimizer it was "
            f"saved with.{_OF_TRAINER if len(counts) == 2 and [sum(counts)] == wanted else ''}"
        )
    named = [
        (name, states[key])
        for group, names in zip(groups, live.groups, strict=True)
        for key, name in _of_group(group["params"], names)
        if key in states
    ]
    _check_kind(path, groups, {key for _, kept in named for key, value in kept.items() if value is not None}, live)
    numbers: dict[str, set[float]] = {}
    for name, kept in named:
        for key, value in kept.items():
            if isinstance(value, Tensor) and tuple(value.shape) == live.shapes[name] and key != STEP:
                foreign.moments.setdefault(name, {})[key] = value
            elif isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1):
                numbers.setdefault(key, set()).add(float(value))
            elif value is not None:
                told = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise CheckpointError(
                    f"{path} keeps {short(key)} {told} of {name}, which is {live.shapes[name]}: states that are not of "
                    f"each element cannot be taken, or the groups of {live.kind} were others when it was saved."
                )
    if differ := [key for key, values in numbers.items() if len(values) > 1]:
        raise CheckpointError(
            f"{path} has several values of {differ[0]} ({short(sorted(numbers[differ[0]]))}), and parameters are "
            "updated together here: go on with what wrote it, or start from the weights."
        )
    foreign.numbers |= {key: values.pop() for key, values in numbers.items()}
    foreign.step = int(foreign.numbers.get(STEP, 0))
    if live.kind in ADAMS:
        foreign.numbers.pop(STEP, None)
    foreign.groups = [{key: _plain(value) for key, value in group.items() if key != "params"} for group in groups]


def states_of(optimizer: Optimizer, options: Mapping[str, Any]) -> frozenset[str] | None:
    """Return which states an optimizer of torch's keeps with a group's options: a twin's first step makes them."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim"):
        return None
    options = {**optimizer.param_groups[0], **options, "params": None}
    arguments = {name: options[name] for name in inspect.signature(kind).parameters if options.get(name) is not None}
    made: set[str] = set()
    tried = 0
    for shape in ((1,), (1, 1)):  # some keep others of matrices, or take only these
        p = torch.zeros(shape, requires_grad=True)
        p.grad = torch.zeros(shape)
        with suppress(Exception):  # torch raises many kinds, also of options that its class does not have on a CPU
            twin = kind([p], **arguments)
            twin.step()
            made |= {key for key, value in twin.state[p].items() if value is not None}
            tried += 1
    return frozenset(made) if tried else None


def _check_kind(path: Path, groups: Sequence[Mapping[str, Any]], saved: set[str], live: Live) -> None:
    """Raise CheckpointError where a file has states that the live optimizer never makes, or none of those it makes."""
    known = [live.states({key: value for key, value in group.items() if key != "params"}) for group in groups]
    wanted = frozenset().union(*(names for names in known if names is not None))
    if None in known or not (saved - wanted or (wanted and not saved)):
        return
    if saved:
        has = f"states {_listed(saved)}, and {live.kind} keeps {_listed(wanted) or 'none'}: another has saved them"
    else:
        has = f"no moments of {live.kind}: they would begin at zero"
    raise CheckpointError(
        f"{path} has {has}. Train on with the optimizer that has saved it, such as TrainingArguments(optim=...) of "
        "that run, or pass the folder's weights to the model and train anew."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(short(name) for name in names))


def _of_group(keys: Sequence[Any], names: Sequence[str]) -> Sequence[tuple[Any, str]]:
    """Return the key of each parameter's states: FSDP's are names, in an order of its own."""
    if all(isinstance(key, str) for key in keys):
        return [(key, key) for key in keys if key in names]
    return list(zip(keys, names, strict=True))


def _plain(value: Any) -> Any:
    """Return an option as JSON has it."""
    if isinstance(value, Tensor) and value.numel() == 1:
        return float(value)
    return list(value) if isinstance(value, tuple) else value


def schedule_in(folder: Path) -> Mapping[str, Any] | None:
    """Return the state of the schedule; None where a folder has none. Raises CheckpointError."""
    name = next((name for name in ("scheduler.pt", "scheduler.bin") if (folder / name).is_file()), None)
    if name is None:
        return None
    state = read_torch(map_file(folder, name))
    if not isinstance(state, dict):
        raise CheckpointError(f"{folder / name} is not the state of a schedule.")
    return state
