"""Export: the weights as a folder that `from_pretrained` loads, gathered unit by unit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zero3d.agree import agree
from zero3d.checkpoint import sync, taken_back, write_json, write_tensors
from zero3d.errors import CheckpointError
from zero3d.zero.collectives import Comm
from zero3d.zero.unit import Unit

FILE_BYTES = 4 * 10**9


def export(
    directory: Path,
    module: nn.Module,
    units: Sequence[Unit],
    comm: Comm,
    gathered: Callable[[Unit], AbstractContextManager[None]],
) -> Path:
    """Write the weights in compute dtype as safetensors, with the config of a Hugging Face model.

    Gathers one unit at a time; rank 0 writes files of at most FILE_BYTES, so its host memory
    holds one file and never the model. The folder appears whole or not at all.
    """
    if hasattr(module, "peft_config"):
        raise CheckpointError(
            "export writes whole models, and this one is wrapped by PEFT: use `with engine.full_params(): "
            "model.save_pretrained(directory)` for its adapters, or merge them before the Engine is built."
        )
    directory = directory.resolve()
    temporary = directory.with_name(f".{directory.name}.tmp")
    writer = _ExportWriter(temporary)

    def on_rank_0(action: Callable[[], None]) -> None:
        agree(comm, action if comm.rank == 0 else lambda: None)

    on_rank_0(partial(_prepare_export, directory, temporary))
    with taken_back(temporary, comm):
        for unit in units:
            with gathered(unit):
                named = dict(zip((slot.name for slot in unit.layout.slots), unit.weights.params, strict=True))
                on_rank_0(partial(_add_unit, writer, module, named))
        on_rank_0(partial(_finish_export, writer, temporary, directory, module))
    return directory


def _add_unit(writer: _ExportWriter, module: nn.Module, named: Mapping[str, Tensor]) -> None:
    writer.add(_named_as_saved(module, named))


def _prepare_export(directory: Path, temporary: Path) -> None:
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(
            f"{directory} exists and is not empty: export to a new directory, so that nothing is lost."
        )
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _named_as_saved(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Host copies under the names of the model's published checkpoints."""
    host = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
    if not hasattr(module, "save_pretrained"):
        return host
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(module, host)
    return {name: tensor.contiguous() for name, tensor in converted.items()}


class _ExportWriter:
    """Collects tensors into files and remembers which file holds what."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._open: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if self._open and sum(map(_nbytes, self._open.values())) + _nbytes(tensor) > FILE_BYTES:
                self._flush()
            self._open[name] = tensor
            self._bytes += _nbytes(tensor)

    def _flush(self) -> None:
        path = self._directory / f"part-{len(self._files)}"
        write_tensors(path, self._open, format="pt", writer="zero3d")  # a run replaces only what says so
        self._files.append(list(self._open))
        self._open = {}

    def finish(self) -> None:
        """Give the files their final names and write the index if there are several."""
        self._flush()
        count = len(self._files)
        names = (
            ["model.safetensors"]
            if count == 1
            else [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        )
        for i, name in enumerate(names):
            (self._directory / f"part-{i}").rename(self._directory / name)
        if count > 1:
            where = {key: name for name, keys in zip(names, self._files, strict=True) for key in keys}
            index = {"metadata": {"total_size": self._bytes}, "weight_map": where}
            write_json(self._directory / "model.safetensors.index.json", index)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _finish_export(writer: _ExportWriter, temporary: Path, directory: Path, module: nn.Module) -> None:
    persistent = {name: b for name, b in module.named_buffers() if name in _persistent_buffers(module)}
    writer.add(_named_as_saved(module, persistent))
    writer.finish()
    config: Any = getattr(module, "config", None)
    if config is not None and hasattr(config, "save_pretrained"):
        config = type(config).from_dict(config.to_dict())
        config.architectures = [type(module).__name__]
        config.dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
        config.save_pretrained(temporary)
        generation = getattr(module, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(temporary)
    if directory.exists():
        directory.rmdir()
    temporary.rename(directory)
    sync(directory.parent)


def _persistent_buffers(module: nn.Module) -> set[str]:
    names = set()
    for prefix, owner in module.named_modules():
        hidden = owner._non_persistent_buffers_set
        names |= {f"{prefix}.{name}" if prefix else name for name in owner._buffers if name not in hidden}
    return names
