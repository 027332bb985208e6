"""Tensors of a model's folder that are kept and not trained: heads that predict tokens after the next.

    mtp.*, model.mtp_block.*                       Qwen3-Next, Qwen3.5, Nemotron-H, ERNIE 4.5, MiMo, LongCat
    layers.N.*, N from num_hidden_layers on        DeepSeek-V3, GLM-4.5, Bailing: layers with an eh_proj, which joins
                                                   an embedding and a hidden state

transformers leaves them out when it loads such a folder, and a server that speculates with them misses them in an
export. So an export of all weights has the same bytes under the same names; a matrix that the folder has in 8 or 4 bits
is decoded, like all others of that export. What else the model has no place for, such as a tower under model.part=text
or layers that a smaller config.json leaves out, is no head, and stays out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from zero3d.errors import CheckpointError, ConfigError
from zero3d.reading import Unreadable, open_regular, tensor_places

BLOCK_BYTES = 8 << 20  # read at once
PROBE_BYTES = 4096  # of each end of a tensor, by which a copy is known
HEAD = re.compile(r"(^|\.)mtp")
LAYER = re.compile(r"^(?P<list>(?:.*\.)?layers)\.(?P<number>\d+)\.")
JOINS = "eh_proj"
DECODED = torch.bfloat16


class KeptTensor(NamedTuple):
    """A tensor as files have it.

    dtype  as safetensors calls it
    key    in the folder
    file   that has its bytes, from `start` on; None for one that is decoded by `read`
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    key: str
    file: Path | None
    start: int = 0
    read: Callable[[str], Tensor] | None = None

    @property
    def itemsize(self) -> float:
        """The bytes of a value."""
        return self.nbytes / max(1, prod(self.shape))


class Kept:
    """Owns where tensors are that exports of all weights carry on, and reads them block by block.

    folder   of the model
    tensors  by the names that they have in an export
    """

    def __init__(self, folder: Path, tensors: Mapping[str, KeptTensor]) -> None:
        self.folder, self.tensors = folder, dict(tensors)

    @property
    def nbytes(self) -> int:
        """The bytes of all of them."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def blocks(self, name: str) -> Iterator[bytes | memoryview]:
        """Yield the bytes of a tensor. Raises CheckpointError where they cannot be read."""
        tensor = self.tensors[name]
        if tensor.file is None:
            yield self._decoded(tensor)
            return
        left = tensor.nbytes
        try:
            with open_regular(tensor.file) as file:
                file.seek(tensor.start)
                while left:
                    block = file.read(min(left, BLOCK_BYTES))
                    if not block:
                        raise Unreadable("has become shorter")
                    left -= len(block)
                    yield block
        except (OSError, Unreadable) as error:
            raise self._gone(tensor.file, _words(error)) from error

    def _decoded(self, tensor: KeptTensor) -> memoryview:
        assert tensor.read is not None
        try:
            values = tensor.read(tensor.key).to(DECODED).contiguous()
        except (OSError, SafetensorError, ConfigError) as error:
            raise self._gone(self.folder, f"cannot be read ({error})") from error
        return values.view(-1).view(torch.uint8).numpy().data

    def check(self) -> None:
        """Refuse files that are gone or have become others since they were found. Raises CheckpointError."""
        for file in sorted({tensor.file for tensor in self.tensors.values() if tensor.file is not None}):
            try:
                there = tensor_places(file)
            except (OSError, Unreadable) as error:
                raise self._gone(file, _words(error)) from error
            size = file.stat().st_size
            for tensor in self.tensors.values():
                if tensor.file == file and tensor.start + tensor.nbytes > size:
                    raise self._gone(file, "has become shorter")
                found = (tensor.start, tensor.start + tensor.nbytes, tensor.dtype, tensor.shape)
                if tensor.file == file and there.get(tensor.key) != found:
                    raise self._gone(file, f"no longer has {tensor.key} where it was")

    def is_in(self, file: Path) -> bool:
        """Return whether a file has all of them, as far as the first and last bytes of each tell."""
        try:
            copy = of_file(file)
            alike = self.tensors.keys() == copy.tensors.keys() and all(
                (tensor.dtype, tensor.shape) == (copy.tensors[name].dtype, copy.tensors[name].shape)
                for name, tensor in self.tensors.items()
            )
            return alike and all(self._ends(name) == copy._ends(name) for name in self.tensors)
        except (OSError, Unreadable, CheckpointError):
            return False

    def moved(self, file: Path) -> None:
        """Read all of them from a file, which has them under their names in an export. Raises CheckpointError."""
        try:
            there = tensor_places(file)
        except (OSError, Unreadable) as error:
            raise self._gone(file, _words(error)) from error
        for name, tensor in self.tensors.items():
            start, _, dtype, shape = there[name]
            self.tensors[name] = tensor._replace(file=file, start=start, dtype=dtype, shape=shape, key=name, read=None)

    def _ends(self, name: str) -> bytes | None:
        """Return the first and last bytes of a tensor; None of one that is decoded, which is equal to no other's."""
        tensor = self.tensors[name]
        if tensor.file is None:
            return None
        part = min(tensor.nbytes, PROBE_BYTES)
        with open_regular(tensor.file) as file:
            file.seek(tensor.start)
            first = file.read(part)
            file.seek(tensor.start + tensor.nbytes - part)
            return first + file.read(part)

    def _gone(self, file: Path, why: str) -> CheckpointError:
        first = next(iter(self.tensors))
        return CheckpointError(
            f"an export of all weights carries on {len(self.tensors)} tensors of {self.folder} that are not trained "
            f"({first} and so on, {self.nbytes:,} bytes), and {file} {why}: put the folder back as it was and export "
            "again."
        )


def _words(error: Exception) -> str:
    """Return what is wrong with a file, as words that follow its name."""
    return f"cannot be read ({error.strerror})" if isinstance(error, OSError) else str(error)


def of_file(file: Path) -> Kept:
    """Return all tensors of a file as kept ones. Raises OSError and Unreadable."""
    found = {
        name: KeptTensor(dtype, shape, stop - start, name, file, start)
        for name, (start, stop, dtype, shape) in tensor_places(file).items()
    }
    return Kept(file.parent, found)


def find_heads(unused: Sequence[str], used: Collection[str], model: Any) -> list[str]:
    """Return which keys of a folder are of multi-token heads, among those that its model has no place for.

    used  keys that the model has a place for
    """
    lists: dict[str, int] = {}  # lists of layers that the model has -> how many
    for key in used:
        if found := LAYER.match(key):
            lists[found["list"]] = max(lists.get(found["list"], 0), int(found["number"]) + 1)
    behind: dict[tuple[str, int], list[str]] = {}
    for key in unused:
        if found := LAYER.match(key):
            behind.setdefault((found["list"], int(found["number"])), []).append(key)
    heads = {key for key in unused if HEAD.search(key)}
    for name, count in lists.items():
        while keys := behind.get((name, count)):
            if not any(JOINS in key.split(".") for key in keys) and not _is_left_out(keys, model):
                break
            heads.update(keys)
            count += 1
    return [key for key in unused if key in heads]


def may_have_heads(model: Any) -> bool:
    """Return whether folders of this kind of model have heads, by what transformers leaves out when it loads them."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return any("mtp" in pattern or "layers" in pattern for pattern in patterns)


def _is_left_out(keys: Sequence[str], model: Any) -> bool:
    """Return whether transformers says of each of these keys that this kind of model leaves it out."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return all(any(re.search(pattern, key) for pattern in patterns) for key in keys)
