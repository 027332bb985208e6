"""Adapters in PEFT's own format, and what was trained beside them.

    adapter_config.json           PEFT's configuration, with the folder of the base
    adapter_model.safetensors     adapters, and whole modules that were trained (PEFT's modules_to_save)
    trained.safetensors           what PEFT has no place for, where there is any: single parameters of modules whose
                                  others are frozen, by their names in the base model

`PeftModel.from_pretrained(base, folder)` reads the first two; `load_state_dict(tensors, strict=False)` on the base
model before that brings the third. What of an adapter is saved, and under which names, is said by PEFT's
`get_peft_model_state_dict`, of a twin of this rank's model that holds whole tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from zero3d.checkpoint.hub_names import Exported, on_host
from zero3d.checkpoint.writing import told, write_tensors
from zero3d.errors import CheckpointError
from zero3d.models.adapters import without_advice
from zero3d.models.bases import model_of
from zero3d.models.kept import Kept
from zero3d.models.merge import REPLACED, WRAPPED, WRAPPER, adapted_layers, base_prefix, is_of_base, plain_name, twin
from zero3d.models.names import persistent_buffers

WEIGHTS, TRAINED = "adapter_model.safetensors", "trained.safetensors"
WHOLE, BESIDE = "whole:", "beside:"  # how names begin on their way of modules trained whole, and of what lies beside


class AdapterForm:
    """Collects a model's trained adapter on the host and writes it as PEFT does, once all of it is there."""

    kept: Kept | None = None

    def __init__(self, exported: Exported) -> None:
        model: Any = exported.model
        if len(model.peft_config) != 1:
            raise CheckpointError(
                f"one adapter is exported, and this model has {len(model.peft_config)} ({', '.join(model.peft_config)})"
                ": save them with PEFT inside `with engine.full_params()`."
            )
        ((self._adapter, config),) = model.peft_config.items()
        self._config = copy.deepcopy(config)
        self._model = model
        self._base = exported.base
        self._kind = getattr(config.peft_type, "value", config.peft_type)
        self._parts: list[Any] = [model_of(module) for module in exported.modules]
        self._others = exported.other_names
        self._of_adapter = self._names_of_adapter(exported)
        self._wanted = exported.trainable | self._of_adapter
        self._trained = exported.trainable - self._of_adapter
        self._modules = _whole_modules(self._trained, exported) if self._takes_modules else set()
        self._held: dict[str, Tensor] = {}

    @property
    def _takes_modules(self) -> bool:
        """Return whether this kind of adapter has PEFT's `modules_to_save`: modules that are trained whole."""
        return hasattr(self._config, "modules_to_save") and not self._config.is_prompt_learning

    def wants(self, name: str) -> bool:
        return any(each in self._wanted for each in (name, *self._others.get(name, ())))

    def feed(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        wanted = {name: tensor for name, tensor in tensors.items() if self.wants(name)}  # of a unit with others
        for name, tensor in on_host(wanted).items():
            for each in (name, *self._others.get(name, ())):
                self._held[each] = tensor if each == name else tensor.clone()
        return {}

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all that was taken, and buffers of PEFT's, under the names in its file or behind a mark."""
        held, self._held = self._held, {}
        known = {name: buffers[same] for name, same in _buffer_names(self._parts).items() if same in buffers}
        state = held | {name: buffer.detach().cpu().clone() for name, buffer in known.items()}
        named: dict[str, Tensor] = {}
        for part in self._parts:
            named |= self._saved(part, state, self._config)
        for name, tensor in held.items():
            if name not in self._of_adapter:
                plain = plain_name(_inside(name, self._parts))
                whole = WHOLE if plain.rpartition(".")[0] in self._modules else BESIDE
                named[f"{WRAPPER if REPLACED in name.split('.') else whole}{plain}"] = tensor  # of another stage's copy
        return {name: tensor.contiguous() for name, tensor in named.items()}

    def _names_of_adapter(self, exported: Exported) -> frozenset[str]:
        """Return the names of parameters that PEFT saves by itself, and of others that it put into the model."""
        names = [each for name in exported.names for each in (name, *self._others.get(name, ()))]
        state = {name: torch.empty(exported.shapes.get(name, ()), device="meta") for name in names}
        prefixes = {base_prefix(part) for part in self._parts}
        outside = {name for name in names if not any(name.startswith(prefix) for prefix in prefixes)}
        found = {name for name in outside if outside.issuperset(self._others.get(name, ()))}
        for head, layer in adapted_layers(self._parts).items():
            inside = (name for name in names if name.startswith(f"{head}."))
            found |= {
                name
                for name in inside
                if f".{REPLACED}." in name or not is_of_base(layer, name.removeprefix(f"{head}."))
            }
        found -= {name for name in found if ".original_module." in f".{name}"}
        if not self._config.is_prompt_learning:
            by_id = {id(tensor): name for name, tensor in state.items()}
            for part in self._parts:
                on_meta = {name: t.to("meta") for name, t in persistent_buffers(part).items()}
                saved = self._saved(part, state | on_meta, copy.deepcopy(self._config))
                found |= {by_id[id(tensor)] for tensor in saved.values() if id(tensor) in by_id}
        return frozenset(found)

    def _saved(self, part: nn.Module, state: dict[str, Tensor], config: Any) -> dict[str, Tensor]:
        """Return what PEFT saves of one of this rank's models, by the names in its file. Raises CheckpointError."""
        from peft import PeftModel, get_peft_model_state_dict

        inside = _held_by(part, state)
        copied = twin(part, inside)
        copied.peft_config = {self._adapter: config}
        try:
            with without_advice():
                saved: dict[str, Tensor] = get_peft_model_state_dict(
                    copied, state_dict=inside, adapter_name=self._adapter, save_embedding_layers=False
                )
        except Exception as error:  # whatever PEFT says of a kind that it does not save so
            raise CheckpointError(
                f"PEFT does not save an adapter of kind {self._kind} of this model ({type(error).__name__}: "
                f"{' '.join(str(error).split())[:200]}): use engine.save for its states."
            ) from error
        wrapped = isinstance(part, PeftModel)
        return {name if wrapped else f"{WRAPPER}{name}": tensor for name, tensor in saved.items()}

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        """Put the tensors into PEFT's one file, and those it has no place for beside it; write its configuration."""
        tensors: dict[str, Tensor] = {}
        written = sorted(folder.glob("model*.safetensors"))
        for path in written:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        beside = {key.removeprefix(BESIDE): tensors.pop(key) for key in list(tensors) if key.startswith(BESIDE)}
        whole = {key.removeprefix(WHOLE): tensors.pop(key) for key in list(tensors) if key.startswith(WHOLE)}
        tensors |= {f"{WRAPPER}{name}": tensor for name, tensor in whole.items()}
        write_tensors(folder / WEIGHTS, tensors, format="pt", writer="zero3d")
        if beside:
            write_tensors(folder / TRAINED, beside, format="pt", writer="zero3d")
        del tensors, beside
        for path in (*written, *folder.glob("model.safetensors.index.json")):
            path.unlink()
        with told(folder / "adapter_config.json"):
            self._save_config(folder, {name.rpartition(".")[0] for name in whole})

    def _save_config(self, folder: Path, modules: set[str]) -> None:
        config = self._config
        config.inference_mode = True
        if modules:
            config.modules_to_save = sorted({*(config.modules_to_save or ()), *modules})
        if self._base is not None:
            config.base_model_name_or_path = str(self._base.resolve())
        if config.task_type is None and hasattr(self._model, "prepare_inputs_for_generation"):
            config.task_type = "CAUSAL_LM"
        config.save_pretrained(folder)


def streamed_name(name: str) -> str:
    """Return the name under which a tensor of a form reaches those who load an adapter without its folder."""
    whole = f"{WRAPPER}{name.removeprefix(WHOLE)}" if name.startswith(WHOLE) else name
    return whole.removeprefix(BESIDE)


def _inside(name: str, parts: Iterable[nn.Module]) -> str:
    """Return a name without what it begins with around the base."""
    return next((name.removeprefix(prefix) for part in parts if name.startswith(prefix := base_prefix(part))), name)


def _held_by(part: nn.Module, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of modules that a part has; other parts have the others."""
    owners = {name for name, _ in part.named_modules(remove_duplicate=False)}
    return {name: tensor for name, tensor in state.items() if name.rpartition(".")[0] in owners}


def _buffer_names(parts: Iterable[nn.Module]) -> dict[str, str]:
    """Return each name of a persistent buffer -> the first of all that the buffer has."""
    names: dict[str, str] = {}
    for part in parts:
        first = {buffer: name for name, buffer in part.named_buffers()}
        names |= {name: first[buffer] for name, buffer in persistent_buffers(part).items()}
    return names


def _whole_modules(trained: Set[str], exported: Exported) -> set[str]:
    """Return the plain names of modules outside of adapted layers all of whose parameters were trained."""
    others, parts = exported.other_names, [model_of(module) for module in exported.modules]
    modules = {each.rpartition(".")[0] for name in trained for each in (name, *others.get(name, ()))}
    whole = set()
    for module in modules:
        inside = [name for name in exported.shapes if name.startswith(f"{module}.")]
        if module and WRAPPED not in module.split(".") and all(name in trained for name in inside):
            whole.add(plain_name(_inside(module, parts)))
    return whole
