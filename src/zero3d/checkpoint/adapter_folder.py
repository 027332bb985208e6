"""Adapters in PEFT's own format, and what was trained beside them.

    adapter_config.json           PEFT's configuration, with the folder of the base
    adapter_model.safetensors     adapters, and whole modules that were trained (PEFT's modules_to_save)
    trained.safetensors           what PEFT has no place for, where there is any: single parameters of modules whose
                                  others are frozen, by their names in the base model

`PeftModel.from_pretrained(base, folder)` reads the first two; `load_state_dict(tensors, strict=False)` on the base
model before that brings the third.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from zero3d.checkpoint.published import Exported, on_host
from zero3d.checkpoint.writing import told, write_tensors
from zero3d.errors import CheckpointError
from zero3d.models.merge import REPLACED, WRAPPED, WRAPPER, plain_name

WEIGHTS, TRAINED = "adapter_model.safetensors", "trained.safetensors"
BESIDE = "beside:"  # how names begin on their way that are not in PEFT's file
MARK = "lora_"


class AdapterForm:
    """What was trained of a model with adapters, as PEFT saves it."""

    def __init__(self, exported: Exported) -> None:
        model: Any = exported.model
        if len(model.peft_config) != 1:
            raise CheckpointError(
                f"one adapter is exported, and this model has {len(model.peft_config)} ({', '.join(model.peft_config)})"
                ": save them with PEFT inside `with engine.full_params()`."
            )
        ((self._adapter, config),) = model.peft_config.items()
        self._config, self._model, self._base = copy.deepcopy(config), model, exported.base
        self._trainable = exported.trainable
        self._twins = _twins(exported)
        self._modules = _whole_modules(exported)

    def wants(self, name: str) -> bool:
        return name in self._trainable

    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for name, tensor in on_host(tensors).items():
            for each in (name, *self._twins.get(name, ())):
                named[self._key(each)] = tensor if each == name else tensor.clone()
        return named

    def _key(self, name: str) -> str:
        """Return what PEFT's file calls a parameter, or its plain name behind `BESIDE`."""
        inner = name.removeprefix(WRAPPER)
        if MARK in inner:
            parts = [part for part in inner.split(".") if part != self._adapter]
            if parts[-2:] == ["lora_magnitude_vector", "weight"]:
                parts.pop()
            return f"{WRAPPER}{'.'.join(parts)}"
        plain = plain_name(name)
        if f".{REPLACED}." in f".{inner}" or plain.rpartition(".")[0] in self._modules:
            return f"{WRAPPER}{plain}"
        if self._config.bias != "none" and plain.endswith(".bias"):
            return f"{WRAPPER}{inner}"
        return f"{BESIDE}{plain}"

    def buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {}

    def finish(self, folder: Path, dtype: torch.dtype) -> None:
        """Put the tensors into PEFT's one file, and those it has no place for beside it; write its configuration."""
        tensors: dict[str, Tensor] = {}
        written = sorted(folder.glob("model*.safetensors"))
        for path in written:
            with safe_open(path, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        beside = {key.removeprefix(BESIDE): tensors.pop(key) for key in list(tensors) if key.startswith(BESIDE)}
        write_tensors(folder / WEIGHTS, tensors, format="pt", writer="zero3d")
        if beside:
            write_tensors(folder / TRAINED, beside, format="pt", writer="zero3d")
        del tensors, beside
        for path in (*written, *folder.glob("model.safetensors.index.json")):
            path.unlink()
        with told(folder / "adapter_config.json"):
            self._save_config(folder)

    def _save_config(self, folder: Path) -> None:
        config = self._config
        config.inference_mode = True
        config.modules_to_save = sorted({*(config.modules_to_save or ()), *self._modules}) or None
        if self._base is not None:
            config.base_model_name_or_path = str(self._base.resolve())
        if config.task_type is None and hasattr(self._model, "prepare_inputs_for_generation"):
            config.task_type = "CAUSAL_LM"
        config.save_pretrained(folder)


def _twins(exported: Exported) -> dict[str, list[str]]:
    """Return the other names of tied parameters: each module that has one is a module of its own to PEFT."""
    by_parameter: dict[Any, list[str]] = {}
    for module in exported.modules:
        for name, p in module.named_parameters(remove_duplicate=False):
            by_parameter.setdefault(p, []).append(name)
    groups = [sorted(set(names), key=names.index) for names in by_parameter.values()]
    return {name: [each for each in names if each != name] for names in groups if len(names) > 1 for name in names}


def _whole_modules(exported: Exported) -> set[str]:
    """Return the plain names of modules outside of adapted layers all of whose parameters were trained."""
    trained = {name for name in exported.trainable if MARK not in name and f".{REPLACED}." not in f".{name}"}
    twins = _twins(exported)
    modules = {each.rpartition(".")[0] for name in trained for each in (name, *twins.get(name, ()))}
    whole = set()
    for module in modules:
        inside = [name for name in exported.shapes if name.startswith(f"{module}.")]
        if module and WRAPPED not in module.split(".") and all(name in trained for name in inside):
            whole.add(plain_name(module))
    return whole
