"""Checkpoints of torch.distributed.checkpoint (DCP): of FSDP2 loops, torchtitan and Accelerate.

    FOLDER/.metadata          a pickle: which tensor is where
           __0_0.distcp ...   the tensors, each as torch.save writes it

Names are the program's own. Moments are found by torch's `state.NAME.exp_avg`, weights by the NAMEs that these have;
without moments all other tensors are weights, and `model.` before all of them is taken off. Accelerate has model and
optimizer in two folders: both are read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as kinds
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.state_dict_loader import load

from zero3d.errors import CheckpointError
from zero3d.integrations.checkpoints.foreign import MOMENTS, Foreign
from zero3d.integrations.checkpoints.restricted import read_pickle

METADATA = ".metadata"
STATE = re.compile(r"(?:^|\.)state\.(.+)\.([a-z_]+)$")
CLASSES = (
    kinds.Metadata, kinds.TensorStorageMetadata, kinds.BytesStorageMetadata, kinds.TensorProperties,
    kinds.ChunkStorageMetadata, kinds.MetadataIndex, kinds.StorageMeta, kinds._MEM_FORMAT_ENCODING, _StorageInfo,
)  # fmt: skip
KNOWN: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__qualname__): kind for kind in CLASSES},
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
}


class RestrictedReader(FileSystemReader):
    """torch's reader of a folder, whose metadata cannot run anything."""

    def read_metadata(self, *given: Any, **named: Any) -> kinds.Metadata:
        """Read what is where. Raises CheckpointError."""
        path = Path(self.path) / METADATA
        with path.open("rb") as file:
            found = read_pickle(file, KNOWN)
        if not isinstance(found, kinds.Metadata):
            raise CheckpointError(f"{path} is no metadata of torch.distributed.checkpoint.")
        found.storage_meta = kinds.StorageMeta(load_id=self.load_id)
        return found


def found(folder: Path) -> list[Path]:
    """Return the folders of DCP that are here: this one, or those just below it."""
    if (folder / METADATA).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{METADATA}"))


def read(folders: Iterable[Path]) -> Foreign:
    """Read a checkpoint that `found` has. Raises CheckpointError."""
    folders = list(folders)
    listed = {folder: _listed(folder) for folder in folders}
    names = [key for described in listed.values() for key in described]
    states = {key: (match[1], match[2]) for key in names if (match := STATE.search(key))}
    trained = {name for name, state in states.values() if state in MOMENTS}
    weights = _weights([key for key in names if key not in states], trained)
    wanted = {key for key, (_, state) in states.items() if state in (*MOMENTS, "step")} | weights.keys()
    values = {
        key: tensor
        for folder, described in listed.items()
        for key, tensor in _load(folder, {key: described[key] for key in described if key in wanted}).items()
    }
    foreign = Foreign(f"torch.distributed.checkpoint ({folders[0].name})")
    for key, name in weights.items():
        kept = (
            foreign.masters if name in trained or (not trained and values[key].is_floating_point()) else foreign.frozen
        )
        kept[name] = values[key]
    for key, (name, state) in states.items():
        if state in MOMENTS:
            foreign.moments.setdefault(name, {})[state] = values[key]
        elif state == "step" and key in values:
            foreign.step = max(foreign.step, int(values[key]))
    return foreign


def _listed(folder: Path) -> dict[str, kinds.TensorStorageMetadata]:
    described = RestrictedReader(folder).read_metadata().state_dict_metadata
    return {key: what for key, what in described.items() if isinstance(what, kinds.TensorStorageMetadata)}


def _weights(keys: list[str], trained: set[str]) -> dict[str, str]:
    """Return which keys are weights, and the parameter of each. Raises CheckpointError."""
    before = {key[: -len(name)] for name in trained for key in keys if key == name or key.endswith(f".{name}")}
    fitting = [prefix for prefix in sorted(before, key=len) if all(prefix + name in keys for name in trained)]
    if trained and not fitting:
        lost = sorted(name for name in trained if not any(key == name or key.endswith(f".{name}") for key in keys))
        raise CheckpointError(
            f"the checkpoint has moments of {len(trained)} parameters, and no weights for {len(lost) or 'some'} of "
            f"them, such as {(lost or sorted(trained))[0]!r}: copy the model's folder, too."
        )
    if trained:
        prefix = fitting[0]
    else:
        prefix = "model." if all(key.startswith("model.") for key in keys) and any(
            key.startswith(("model.model.", "model.lm_head.", "model.transformer.")) for key in keys
        ) else ""  # fmt: skip
    return {key: key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _load(folder: Path, described: Mapping[str, kinds.TensorStorageMetadata]) -> dict[str, Tensor]:
    tensors = {key: torch.empty(what.size, dtype=what.properties.dtype) for key, what in described.items()}
    if tensors:
        try:
            load(tensors, storage_reader=RestrictedReader(folder), no_dist=True)
        except CheckpointError:
            raise
        except Exception as error:  # of a damaged file anything may come
            raise CheckpointError(f"{folder} cannot be read ({type(error).__name__}): copy it again.") from error
    return tensors
