"""The forms of an export: which parameters it has, what they are called there, and what lies beside them.

    whole     every parameter, as published                a folder for `from_pretrained`
    merged    every parameter, adapters merged into them   the same, without a word of PEFT
    base      every parameter, without the adapters        the same
    adapter   what was trained                             a folder for `PeftModel.from_pretrained` (adapter_folder.py)

A form takes parameters as they come, by their names in the model, and gives tensors under the names that files have.
Those that a merge needs together wait on the host for one another: a block of the model, and no more. In the place of
a matrix in 8 or 4 bits all but adapter have that of the base's folder, from which it was made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from zero3d.checkpoint.adapter_folder import AdapterForm
from zero3d.checkpoint.hub_names import Exported, as_published, has_adapters, named_as_saved, on_host, save_config
from zero3d.errors import CheckpointError
from zero3d.models.bases import model_of
from zero3d.models.blocks import find_blocks
from zero3d.models.kept import Kept
from zero3d.models.merge import KEPT, WRAPPED, adapted_layers, base_of, base_prefix, is_of_base, merged, plain_name
from zero3d.models.packing import inner_model

WHOLE, MERGED, BASE, ADAPTER = "whole", "merged", "base", "adapter"
UNMERGED = ("ADAPTION_PROMPT",)  # kinds of PEFT's, beside those of prompts, that leave the weights as they are


class Form(Protocol):
    """What is written of a model, and how.

    kept  tensors of the model's folder that are written beside what it is fed; None without any
    """

    kept: Kept | None

    def wants(self, name: str) -> bool:
        """Say whether a parameter is needed."""

    def feed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Accept whole parameters that may change afterwards; return what can be written now, on the host, by name.

        What is returned may share their memory.
        """

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take the persistent buffers, last of all; return those that are written, and what waited, on the host."""

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        """Write what lies beside the tensors, which are in `model.safetensors` or files of an index."""


def form_of(kind: str | None, exported: Exported) -> Form:
    """Return the form that is asked for; None means an adapter where there is one, else all. Raises CheckpointError."""
    adapted = has_adapters(exported.model)
    kind = kind or (ADAPTER if adapted else WHOLE)
    if kind not in FORMS:
        raise CheckpointError(f"an export is one of {', '.join(FORMS)}, not {kind!r}.")
    if kind == WHOLE and adapted:
        raise CheckpointError(
            f"a model with adapters is exported as {ADAPTER}, {MERGED} or {BASE}: {WHOLE} weights have PEFT's names."
        )
    if kind != WHOLE and not adapted:
        raise CheckpointError(f"this model has no adapters of PEFT: export it as {WHOLE}, not as {kind}.")
    return FORMS[kind](exported)


class WholeForm:
    """Every parameter, under the names of the model's published checkpoints."""

    def __init__(self, exported: Exported) -> None:
        self._model, self._in_full = exported.model, exported.in_full
        self.kept = exported.kept

    def wants(self, name: str) -> bool:
        return True

    def feed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return as_published(
            self._model, {name: tensor.detach().cpu() for name, tensor in self._in_full(tensors).items()}
        )

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return named_as_saved(self._model, buffers)

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        save_config(self._model, folder, dtype)


class BaseForm:
    """Every parameter of the model without adapters, under the names that it has without PEFT.

    Parameters of a block, and those of an adapted layer outside of one, wait until all of them are there. A tied
    parameter is one of each module that has it: merged apart, they are written apart, and the model's config says so.
    """

    def __init__(self, exported: Exported) -> None:
        assert exported.model is not None
        self._model, self._in_full = inner_model(exported.model), exported.in_full
        self.kept = exported.kept
        self._base = tuple({base_prefix(model_of(module)) for module in exported.modules})
        self._layers = adapted_layers(exported.modules)
        self._others = exported.other_names
        names = [each for name in exported.names for each in (name, *self._others.get(name, ()))]
        heads = [block for module in exported.modules for block in find_blocks(module)] + list(self._layers)
        self._group = {name: next((each for each in heads if name.startswith(f"{each}.")), name) for name in names}
        self._missing: dict[str, set[str]] = {}
        for name, group in self._group.items():
            self._missing.setdefault(group, set()).add(name)
        self._waiting: dict[str, dict[str, Tensor]] = {}
        self._ties = _Ties(
            {
                tuple(dict.fromkeys(map(plain_name, (name, *self._others[name]))))
                for name in exported.names
                if name in self._others
            }
        )

    def wants(self, name: str) -> bool:
        return True

    def feed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ready: dict[str, Tensor] = {}
        for name, tensor in on_host(tensors).items():
            for each in (name, *self._others.get(name, ())):
                group = self._group[each]
                self._waiting.setdefault(group, {})[each] = tensor if each == name else tensor.clone()
                self._missing[group].discard(each)
                if not self._missing[group]:
                    ready |= self._ties.kept(self._plain(self._waiting.pop(group)))
        return as_published(self._model, ready) if ready else {}

    def _plain(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of a whole group without PEFT's."""
        plain: dict[str, Tensor] = {}
        of_layers: dict[str, dict[str, Tensor]] = {}
        for name, tensor in self._in_full(tensors).items():
            layer = next((each for each in self._layers if name.startswith(f"{each}.")), None)
            if layer is None and name.startswith(self._base):
                plain[plain_name(name)] = tensor
            elif layer is not None:
                of_layers.setdefault(layer, {})[name.removeprefix(f"{layer}.")] = tensor
        for layer, held in of_layers.items():
            named = self._of_layer(self._layers[layer], held)
            plain |= {f"{plain_name(layer)}.{name}": tensor for name, tensor in named.items()}
        return plain

    def _of_layer(self, layer: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what is taken of one of PEFT's layers, all of whose tensors are there."""
        return base_of(layer, tensors)

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        plain: dict[str, Tensor] = {}
        for name, tensor in buffers.items():
            layer = next((each for each in self._layers if name.startswith(f"{each}.")), None)
            kept = layer is None or is_of_base(self._layers[layer], name.removeprefix(f"{layer}."))
            if kept and name.startswith(self._base):
                plain[plain_name(name)] = tensor
        return named_as_saved(self._model, plain)

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        save_config(self._model, folder, dtype, self._ties.broken)


class MergedForm(BaseForm):
    """Every parameter of the model without adapters, into which these are merged."""

    def __init__(self, exported: Exported) -> None:
        _refuse_unmerged(exported)
        super().__init__(exported)

    def _of_layer(self, layer: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return merged(layer, tensors)


FORMS: Mapping[str, Callable[[Exported], Form]] = {
    WHOLE: WholeForm,
    MERGED: MergedForm,
    BASE: BaseForm,
    ADAPTER: AdapterForm,
}


class _Ties:
    """Names of tied weights: written once, under the first name, while they are the same; else under each.

    broken  some were not
    """

    def __init__(self, groups: Iterable[tuple[str, ...]]) -> None:
        self._groups = [names for names in groups if len(names) > 1]
        self._waiting: dict[str, Tensor] = {}
        self.broken = False

    def kept(self, plain: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Take tensors by plain name; return what can be written now."""
        tied = {name for names in self._groups for name in names}
        self._waiting |= {name: tensor for name, tensor in plain.items() if name in tied}
        ready = {name: tensor for name, tensor in plain.items() if name not in tied}
        for names in list(self._groups):
            if all(name in self._waiting for name in names):
                self._groups.remove(names)
                first, *others = [self._waiting.pop(name) for name in names]
                ready[names[0]] = first
                if apart := {name: t for name, t in zip(names[1:], others, strict=True) if not t.equal(first)}:
                    self.broken = True
                    ready |= apart
        return ready


def _refuse_unmerged(exported: Exported) -> None:
    """Refuse adapters that are no change of weights, and what another pipeline stage has. Raises CheckpointError."""
    configs: Any = getattr(exported.model, "peft_config", {})
    for config in configs.values():
        kind = getattr(config.peft_type, "value", config.peft_type)
        if config.is_prompt_learning or kind in UNMERGED:
            raise CheckpointError(
                f"an adapter of kind {kind} changes what the model is given, not its weights, and cannot be merged: "
                "export the adapter."
            )
    for name, owner in exported.copies.items():
        if {WRAPPED, KEPT} & set(name.split(".")):
            raise CheckpointError(
                f"{plain_name(name)} has an adapter and is tied to {plain_name(owner)} of another pipeline stage, so "
                "that neither has what a merge takes: export the adapter, or save and call `zero3d ckpt export "
                "STEP FOLDER --as merged`."
            )
