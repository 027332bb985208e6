"""Tensors of a Hugging Face folder by name: boxes of them, out of its safetensors, of which one is open at a time."""

from __future__ import annotations

from collections.abc import Collection
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from zero3d.errors import ConfigError, short
from zero3d.models.kept import KeptTensor
from zero3d.models.places import INDEX, ONE_FILE, check_weights
from zero3d.reading import Unreadable, check_regular, read_object, tensor_places
from zero3d.shards.boxes import Box, slices

REOPEN_BYTES = 32 << 20  # pages of a mapped file count as this process's memory until it is closed
LONGEST = 300  # characters of an error of safetensors


class Files:
    """Reads tensors of a folder by their keys. Raises ConfigError where there are no safetensors that can be read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _index(folder)
        self._open: tuple[str, Any]
        self._places: tuple[Path | None, dict[str, Any]] = (None, {})  # of the tensors of one file
        self._read: int
        self.close()

    def names(self) -> Collection[str]:
        """Return the keys of all tensors."""
        return self._file_of.keys()

    def paths(self) -> list[Path]:
        """Return the files."""
        return [self.folder / name for name in sorted(set(self._file_of.values()))]

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self._handle(key).get_slice(key).get_shape())

    def dtype(self, key: str) -> str:
        """Return the dtype of a tensor, as safetensors calls it."""
        dtype: str = self._handle(key).get_slice(key).get_dtype()
        return dtype

    def box(self, key: str, box: Box) -> Tensor:
        """Return the values in a box of a tensor."""
        if not box:
            return self.tensor(key)
        stored = self._handle(key).get_slice(key)
        part: Tensor = stored[slices(box)]
        first, last = box[0]
        self._read += (last - first) * prod(stored.get_shape()[1:]) * part.element_size()  # columns lie on all pages
        return part

    def tensor(self, key: str) -> Tensor:
        """Return a tensor."""
        tensor: Tensor = self._handle(key).get_tensor(key)
        self._read += tensor.numel() * tensor.element_size()
        return tensor

    def as_stored(self, key: str) -> KeptTensor:
        """Return where the bytes of a tensor are. Raises ConfigError."""
        file = self.folder / self._file_of[key]
        try:
            if self._places[0] != file:
                self._places = file, tensor_places(file)
            start, stop, dtype, shape = self._places[1][key]
        except (OSError, Unreadable) as error:
            raise ConfigError(f"{file} cannot be read as safetensors: copy it again.") from error
        return KeptTensor(dtype, shape, stop - start, key, file, start)

    def stored(self, key: str) -> None:
        """Return None: tensors are what they are."""

    def close(self) -> None:
        """Let go of the open file."""
        self._open, self._read = ("", None), 0

    def _handle(self, key: str) -> Any:
        file = self._file_of[key]
        if self._open[0] != file or self._read > REOPEN_BYTES:
            self._open, self._read = (file, safe_open(self.folder / file, framework="pt")), 0
        return self._open[1]


def _index(folder: Path) -> dict[str, str]:
    """Return the file of every tensor. Raises ConfigError when there is none."""
    check_weights(folder)
    listed = _weight_map(folder / INDEX) if (folder / INDEX).is_file() else {}
    keys: dict[str, str] = {}
    for file in sorted(set(listed.values())) or [ONE_FILE]:
        try:
            check_regular(folder / file)
            with safe_open(folder / file, framework="pt") as stored:
                keys |= dict.fromkeys(stored.keys(), file)
        except (OSError, SafetensorError, Unreadable) as error:
            raise ConfigError(
                f"{folder / short(file)} cannot be read as safetensors ({str(error)[:LONGEST]}): copy it again."
            ) from error
    lost = sorted(set(listed) - set(keys))
    if lost:
        raise ConfigError(f"{folder / INDEX} names {len(lost)} tensors that no file holds, first {short(lost[0])!r}.")
    return keys


def _weight_map(index: Path) -> dict[str, str]:
    """Read which file of the index's folder holds each tensor. Raises ConfigError."""
    try:
        listed = read_object(index).get("weight_map")
    except Unreadable as error:
        raise ConfigError(f"{index} is not an index of safetensors files: it {error}.") from error
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(f"{index} is not an index of safetensors files: it has no weight_map of names.")
    for file in listed.values():
        if not isinstance(file, str) or not file or Path(file).name != file or "\0" in file:
            raise ConfigError(f"{index} names {short(repr(file))}, which is not a file in its own folder.")
    return listed
