"""Checkpoints of torch.distributed.checkpoint (DCP): of FSDP2 loops, torchtitan and Accelerate.

    FOLDER/.metadata          a pickle: which tensor is where
           __0_0.distcp ...   the tensors' chunks, each as torch.save writes it

Names are the program's own. Moments are found by torch's `state.NAME.exp_avg`, weights by the NAMEs that these have;
without moments all other tensors are weights, and `model.` before all of them is taken off. Accelerate has model and
optimizer in two folders: both are read.

What a metadata file claims is compared with itself and with the files before anything is allocated: chunks are all of
a tensor exactly once, none takes more bytes than it has in its file, and all of a file not more than there are.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zero3d.checkpoint.manifest import CODES
from zero3d.checkpoint.tiling import TilingSums, tiling_fault
from zero3d.errors import CheckpointError, short
from zero3d.precision import dtype_name
from zero3d.ways.checkpoints.archives import Mapped, map_file, read_torch
from zero3d.ways.checkpoints.foreign import MOMENTS, MOST_DIMS, Foreign, check_name
from zero3d.ways.checkpoints.restricted import Inert, read_pickle

METADATA = ".metadata"
LARGEST_METADATA = 1 << 29  # bytes; about 50 a chunk
STATE = re.compile(r"(?:^|\.)state\.(.+)\.([a-z_]+)$")
FEW = 1000  # chunks of a tensor, of which a fault is told by its place
Shape = tuple[int, ...]


class Metadata(Inert):
    """Holds a checkpoint's index: tensors by name (state_dict_metadata), files of their chunks (storage_data)."""


class Properties(Inert):
    """Stands for torch's TensorProperties, of which only the dtype is read."""

    dtype: Any = None

    def __setstate__(self, state: Any) -> None:
        self.dtype = state[0] if isinstance(state, tuple) and state else None


KNOWN: dict[tuple[str, str], type[Inert]] = {
    ("torch.distributed.checkpoint.metadata", "Metadata"): Metadata,
    ("torch.distributed.checkpoint.metadata", "TensorProperties"): Properties,
}


class Chunk(NamedTuple):
    """A part of a tensor, and the bytes of a file that have it."""

    start: Shape
    size: Shape
    file: str
    offset: int
    length: int


class Listed(NamedTuple):
    """A tensor of a folder, as its metadata describe it."""

    folder: Path
    shape: Shape
    dtype: torch.dtype
    chunks: list[Chunk]


def found(folder: Path) -> list[Path]:
    """Return the folders of DCP that are here: this one, or those just below it."""
    if (folder / METADATA).is_file():
        return [folder]
    return sorted(path.parent for path in folder.glob(f"*/{METADATA}"))


def read(folders: Iterable[Path]) -> Foreign:
    """Read a checkpoint that `found` has. Raises CheckpointError."""
    folders = list(folders)
    listed: dict[str, Listed] = {}
    for folder in folders:
        for key, what in _listed(folder).items():
            if key in listed:
                raise CheckpointError(
                    f"{folder} and {listed[key].folder} both have {short(key)}: they are several checkpoints, so type "
                    "the folder of one."
                )
            listed[key] = what
    states = {key: (match[1], match[2]) for key in listed if (match := STATE.search(key))}
    trained = {name for name, state in states.values() if state in MOMENTS}
    weights = _weights([key for key in listed if key not in states], trained)
    wanted = {key for key, (_, state) in states.items() if state in (*MOMENTS, "step")} | weights.keys()
    values = _load({key: what for key, what in listed.items() if key in wanted})
    foreign = Foreign(f"torch.distributed.checkpoint ({folders[0].name})")
    for key, name in weights.items():
        kept = (
            foreign.masters if name in trained or (not trained and values[key].is_floating_point()) else foreign.frozen
        )
        kept[name] = values[key]
    for key, (name, state) in states.items():
        if state in MOMENTS:
            if state in foreign.moments.setdefault(name, {}):
                raise CheckpointError(f"{folders[0]} has {state} of {short(name)} twice: save one optimizer alone.")
            foreign.moments[name][state] = values[key]
        elif state == "step" and key in values:
            foreign.step = max(foreign.step, int(values[key]))
    return foreign


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
        prefix = (
            "model."
            if all(key.startswith("model.") for key in keys)
            and any(key.startswith(("model.model.", "model.lm_head.", "model.transformer.")) for key in keys)
            else ""
        )
    return {key: key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _listed(folder: Path) -> dict[str, Listed]:
    """Return the tensors of a folder. Raises CheckpointError for metadata that cannot be true."""
    mapped = map_file(folder, METADATA)
    if mapped.storage.nbytes() > LARGEST_METADATA:
        raise CheckpointError(
            f"{mapped.path} has {mapped.storage.nbytes():,} bytes, and at most {LARGEST_METADATA:,} are read."
        )
    metadata = read_pickle(mapped.path, bytes(mapped.view), KNOWN)
    described, stored = getattr(metadata, "state_dict_metadata", None), getattr(metadata, "storage_data", None)
    if not isinstance(metadata, Metadata) or not isinstance(described, dict) or not isinstance(stored, dict):
        raise CheckpointError(f"{mapped.path} is not metadata of torch.distributed.checkpoint.")
    places = {(index.fqn, getattr(index, "offset", None)): info for index, info in stored.items()}
    sums = TilingSums()
    return {
        check_name(key, str(mapped.path)): _tensor(folder, key, what, places, sums)
        for key, what in described.items()
        if hasattr(what, "chunks")  # else it is no tensor
    }


def _tensor(folder: Path, key: str, what: Any, places: Mapping[Any, Any], sums: TilingSums) -> Listed:
    shape, dtype = _numbers(key, what.size), getattr(what.properties, "dtype", None)
    if not isinstance(dtype, torch.dtype) or dtype_name(dtype) not in CODES:
        raise CheckpointError(f"{folder}: {short(key)} has the dtype {short(dtype)}, which no weight has.")
    chunks = []
    for chunk in what.chunks:
        start, size = _numbers(key, chunk.offsets), _numbers(key, chunk.sizes)
        if len(start) != len(shape) or len(size) != len(shape):
            raise CheckpointError(f"{folder}: a chunk of {short(key)} has other dimensions than the tensor's {shape}.")
        if any(a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
            raise CheckpointError(
                f"{folder}: a chunk of {short(key)} is {list(size)} at {list(start)}, beyond the tensor's "
                f"{list(shape)}."
            )
        if prod(size):
            chunks.append(_chunk(folder, key, start, size, places.get((key, start))))
    _check_tiled(folder, key, shape, chunks, sums)
    return Listed(folder, shape, dtype, chunks)


def _numbers(key: str, given: Any) -> Shape:
    """Return a shape or a place. Raises CheckpointError."""
    if (
        not isinstance(given, tuple)
        or len(given) > MOST_DIMS
        or any(type(n) is not int or not 0 <= n < 1 << 53 for n in given)
    ):
        raise CheckpointError(f"{short(key)} has {short(repr(given))} for a shape or a place: copy the metadata again.")
    return tuple(given)


def _chunk(folder: Path, key: str, start: Shape, size: Shape, info: Any) -> Chunk:
    if info is None:
        raise CheckpointError(
            f"{folder / METADATA} does not say where {short(key)} at {list(start)} is: copy it again."
        )
    if getattr(info, "transform_descriptors", None):
        raise CheckpointError(f"{folder} is compressed: save it without extensions of torch.distributed.checkpoint.")
    offset, length = _numbers(key, (info.offset, info.length))
    if not isinstance(info.relative_path, str):
        raise CheckpointError(f"{folder / METADATA} names no file for {short(key)}: copy it again.")
    return Chunk(start, size, info.relative_path, offset, length)


def _check_tiled(folder: Path, key: str, shape: Shape, chunks: list[Chunk], sums: TilingSums) -> None:
    """Raise CheckpointError unless the chunks are all of the tensor exactly once."""
    boxes = [tuple((a, a + n) for a, n in zip(chunk.start, chunk.size, strict=True)) for chunk in chunks]
    for box in boxes:
        sums.add(key, box)
    if not sums.whole(key, shape):
        fault = tiling_fault(shape, boxes) if 0 < len(boxes) <= FEW else None
        raise CheckpointError(
            f"{folder / METADATA}: the {len(boxes):,} chunks of {short(key)} are not all of its {list(shape)} exactly "
            f"once{f' ({fault})' if fault else ''}: copy the checkpoint again, with the metadata of all ranks."
        )


def _load(listed: Mapping[str, Listed]) -> dict[str, Tensor]:
    """Return tensors by key, each put together from its chunks. Raises CheckpointError."""
    files: dict[tuple[Path, str], Mapped] = {}
    taken: Counter[tuple[Path, str]] = Counter()
    for key, what in listed.items():
        for chunk in what.chunks:
            place = what.folder, chunk.file
            if place not in files:
                files[place] = map_file(*place)
            taken[place] += chunk.length
            claimed = prod(chunk.size) * what.dtype.itemsize
            if claimed > chunk.length or taken[place] > files[place].storage.nbytes():
                raise CheckpointError(
                    f"{files[place].path} has {files[place].storage.nbytes():,} bytes, of which {short(key)} at "
                    f"{list(chunk.start)} takes {chunk.length:,} for {claimed:,} of its own: copy it again."
                )
    return {key: _put_together(key, what, files) for key, what in listed.items()}


def _put_together(key: str, what: Listed, files: Mapping[tuple[Path, str], Mapped]) -> Tensor:
    tensor = torch.empty(what.shape, dtype=what.dtype)  # all of it is written, for chunks are all of it
    for chunk in what.chunks:
        mapped = files[what.folder, chunk.file]
        values = read_torch(mapped, chunk.offset, chunk.length)
        if not isinstance(values, Tensor) or values.shape != chunk.size or values.dtype != what.dtype:
            of = f"{list(values.shape)} {values.dtype}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            raise CheckpointError(
                f"{mapped.path} has {of} where {short(key)} at {list(chunk.start)} is {list(chunk.size)} {what.dtype}: "
                "copy it again."
            )
        tensor[tuple(slice(a, a + n) for a, n in zip(chunk.start, chunk.size, strict=True))] = values
    return tensor
