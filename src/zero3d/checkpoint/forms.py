"""The forms of an export: which parameters it has, what they are called there, and what lies beside them.

    whole     every parameter, as published                a folder for `from_pretrained`
    merged    every parameter, adapters merged into them   the same, without a word of PEFT
    adapter   what was trained                             a folder for `PeftModel.from_pretrained` (adapter_folder.py)

A form takes parameters as they come, by their names in the model, and gives tensors under the names that files have.
Those that a merge needs together wait on the host for one another: a block of the model, and no more.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from zero3d.checkpoint.adapter_folder import AdapterForm
from zero3d.checkpoint.published import Exported, as_published, has_adapters, named_as_saved, on_host, save_config
from zero3d.errors import CheckpointError
from zero3d.models.blocks import find_blocks
from zero3d.models.merge import adapted_layers, merged, plain_name
from zero3d.models.packing import inner_model

WHOLE, MERGED, ADAPTER = "whole", "merged", "adapter"
FORMS = (WHOLE, MERGED, ADAPTER)


class Form(Protocol):
    """What is written of a model, and how."""

    def wants(self, name: str) -> bool:
        """Say whether a parameter is needed."""

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take whole parameters that may change afterwards; return what can be written now, on the host, by name."""

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the persistent buffers that are written, on the host, by name."""

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        """Write what lies beside the tensors, which are in `model.safetensors` or files of an index."""


def form_of(kind: str | None, exported: Exported) -> Form:
    """Return the form that is asked for; None means an adapter where there is one, else all. Raises CheckpointError."""
    adapted = has_adapters(exported.model)
    kind = kind or (ADAPTER if adapted else WHOLE)
    if kind not in FORMS:
        raise CheckpointError(f"an export is {', '.join(FORMS[:-1])} or {FORMS[-1]}, not {kind!r}.")
    if kind == WHOLE and adapted:
        raise CheckpointError(
            f"a model with adapters is exported as {ADAPTER} or {MERGED}: {WHOLE} weights would have PEFT's names."
        )
    if kind != WHOLE and not adapted:
        raise CheckpointError(f"this model has no adapters of PEFT: export it as {WHOLE}, not as {kind}.")
    if kind == ADAPTER:
        return AdapterForm(exported)
    return MergedForm(exported) if kind == MERGED else WholeForm(exported)


class WholeForm:
    """Every parameter, under the names of the model's published checkpoints."""

    def __init__(self, exported: Exported) -> None:
        self._model = exported.model

    def wants(self, name: str) -> bool:
        return True

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return named_as_saved(self._model, tensors)

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return named_as_saved(self._model, buffers)

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        save_config(self._model, folder, dtype)


class MergedForm:
    """Every parameter of the model without adapters, into which these are merged.

    Parameters of a block, and those of an adapted layer outside of one, wait until all of them are there.
    """

    def __init__(self, exported: Exported) -> None:
        assert exported.model is not None
        self._model = inner_model(exported.model)
        self._layers = adapted_layers(exported.modules)
        heads = [block for module in exported.modules for block in find_blocks(module)] + list(self._layers)
        self._group = {name: next((each for each in heads if name.startswith(f"{each}.")), name)
                       for name in exported.names}  # fmt: skip
        self._missing: dict[str, set[str]] = {}
        for name, group in self._group.items():
            self._missing.setdefault(group, set()).add(name)
        self._waiting: dict[str, dict[str, Tensor]] = {}

    def wants(self, name: str) -> bool:
        return True

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ready: dict[str, Tensor] = {}
        for name, tensor in on_host(tensors).items():
            group = self._group[name]
            self._waiting.setdefault(group, {})[name] = tensor
            self._missing[group].discard(name)
            if not self._missing[group]:
                ready |= as_published(self._model, self._merged(self._waiting.pop(group)))
        return ready

    def _merged(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Merge a whole group."""
        plain: dict[str, Tensor] = {}
        of_layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            layer = next((each for each in self._layers if name.startswith(f"{each}.")), None)
            if layer is None:
                plain[plain_name(name)] = tensor
            else:
                of_layers.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = tensor
        for layer, held in of_layers.items():
            named = merged(self._layers[layer], held)
            plain |= {f"{plain_name(layer)}.{name}": tensor for name, tensor in named.items()}
        return plain

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return named_as_saved(self._model, {plain_name(name): tensor for name, tensor in buffers.items()})

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        save_config(self._model, folder, dtype)
