"""Checkpoints of the strategy as plain Lightning reads them: without an engine, by `load_from_checkpoint` and `test`.

FOLDER/lightning.ckpt    what Lightning keeps: loops, callbacks, hyperparameters; weights that a callback has put in
FOLDER/zero3d            a checkpoint of ours: masters and states, of which masters become the weights
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import wraps
from math import prod
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.core import saving
from torch import Tensor, nn

from zero3d.checkpoint.manifest import BUFFER, FROZEN
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.errors import ConfigError
from zero3d.models.names import persistent_buffers
from zero3d.ways.huggingface.accelerate.accelerator import states_in

LOOP = "lightning.ckpt"
TIED = "zero3d_tied"  # in lightning.ckpt: names of parameters that are others, too
PASSING = "zero3d_passing"  # there: names of buffers that no state dict has, which the engine has saved
CURRENT = "current_model_state"  # there, beside averages as state_dict: weights, which the engine has saved
PREFIX = "module."  # of the LightningModule in the engine's module


def is_ours(path: Path) -> bool:
    """Return whether a path is a checkpoint that the strategy has written."""
    return (path / LOOP).is_file() and states_in(path) is not None


def tied_names(module: nn.Module) -> dict[str, str]:
    """Return the names of parameters that have another name, too, with the first one."""
    first: dict[int, str] = {}
    named = module.named_parameters(remove_duplicate=False)
    found = {name: first.setdefault(id(p), name) for name, p in named}
    return {name: owner for name, owner in found.items() if name != owner}


def passing_buffers(module: nn.Module) -> list[str]:
    """Return the names of buffers that a module's state dict leaves out."""
    kept = set(persistent_buffers(module))
    return [name for name, _ in module.named_buffers(remove_duplicate=False) if name not in kept]


def whole_weights(folder: Path) -> dict[str, Tensor]:
    """Return the state dict of a LightningModule from a checkpoint of the engine: masters, frozen weights, buffers.

    Reads all of it into this process's memory. Raises CheckpointError, and ConfigError for a base that was left out.
    """
    stored = StoredStates(folder)
    found = {}
    for name, spec in stored.parameters.items():
        if spec.in_base:
            raise ConfigError(
                f"{folder} leaves out the frozen {name!r}, which is in a folder of weights: fit loads it."
            )
        state = stored.trained if spec.trainable else FROZEN
        dtype = stored.states[name][state] if (count := prod(spec.shape)) else getattr(torch, spec.dtype)
        values = torch.empty(count, dtype=dtype)
        for start, part in stored.chunks(name, state) if count else ():
            values[start : start + part.numel()] = part
        found[name] = values.view(spec.shape)
    found |= {name: stored.own_tensor(0, f"{BUFFER}{name}") for name in stored.own[0].buffers}
    return {name.removeprefix(PREFIX): tensor for name, tensor in found.items()}


def read_checkpoint(folder: Path, read: Callable[[Path], Any]) -> dict[str, Any]:
    """Return what a plain Trainer's checkpoint has; `read` reads a file of Lightning's."""
    kept: dict[str, Any] = read(folder / LOOP)
    for key in ("state_dict", CURRENT):
        if kept.get(key) == {}:
            kept[key] = _weights_of(folder, kept.get(TIED, {}), kept.get(PASSING, []))
    return kept


def _weights_of(folder: Path, tied: dict[str, str], passing: Collection[str]) -> dict[str, Tensor]:
    states = states_in(folder)
    assert states is not None, "is_ours"
    weights = {name: values for name, values in whole_weights(states).items() if name not in passing}
    return weights | {name: weights[owner] for name, owner in tied.items()}


def let_load() -> None:
    """Have `LightningModule.load_from_checkpoint` read folders of the strategy, too."""
    original = saving.pl_load
    if hasattr(original, "_reads_ours"):
        return

    @wraps(original)
    def load(path: Any, map_location: Any = None, **options: Any) -> Any:
        def read(file: Any) -> Any:
            return original(file, map_location=map_location, **options)

        if not isinstance(path, str | Path) or not is_ours(Path(path)):
            return read(path)
        found = read_checkpoint(Path(path), read)
        if isinstance(map_location, str | torch.device):
            found["state_dict"] = {name: tensor.to(map_location) for name, tensor in found["state_dict"].items()}
        return found

    load._reads_ours = True  # type: ignore[attr-defined]
    saving.pl_load = load
