"""Writing files of a checkpoint so that they are on the disk: tensors, JSON, text; a folder that failed is removed.

Tensors go to a safetensors file one chunk after the other, through one bounded buffer in host memory: the header, with
the place of every tensor, comes first and needs shapes and dtypes alone. Checksums are taken of the bytes on their
way to the file, block by block, while a block is in a core's cache; the file is never read again. The disk is given
what was written as it comes. A save waits for it (fsync) at its end, once for all files of a rank: the disk works while
the manifest is made, and a file system that keeps a journal writes it for all files together.

    tensors on the device, in order --chunk--> buffer (pinned where there is an accelerator) --> checksums and file
    contiguous ones on the host ---------------------------------------------------------------> checksums and file
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Self

import torch
from torch import Tensor

from zero3d.checkpoint.files import BLOCK_BYTES, Checksums, Hasher
from zero3d.checkpoint.folders import complete_steps
from zero3d.checkpoint.json_values import to_json
from zero3d.checkpoint.manifest import CODES
from zero3d.distributed.collectives import Comm
from zero3d.errors import CheckpointError, Zero3dError, remedy_of
from zero3d.models.kept import Kept
from zero3d.precision import Halves, dtype_name, joined

BUFFER_BYTES = 1 << 25  # of host memory, whatever the size of the states
GIVEN_BYTES = 1 << 23  # that the disk is given at once


@contextmanager
def removed_on_failure(temporary: Path, world: Comm) -> Iterator[None]:
    """Remove a folder that could not be completed: it would fill the disk that may be full."""
    try:
        yield
    except Zero3dError:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


class Unsynced:
    """Owns the files that a rank has written and that the disk may not have: open, for who syncs them must hear of it.

    Whoever leaves it without `sync` leaves files that a loss of power may take.

    seconds  that the disk took for each
    """

    def __init__(self) -> None:
        self._files: dict[Path, BinaryIO] = {}
        self._closing = ExitStack()
        self.seconds: dict[Path, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # of a disk that is full, and that was told
            self._closing.close()

    def open(self, path: Path) -> BinaryIO:
        """Open a new file."""
        self._files[path] = self._closing.enter_context(path.open("wb"))
        return self._files[path]

    def sync(self) -> None:
        """Have the disk take all that it has not taken yet. Raises CheckpointError."""
        while self._files:
            path, file = next(iter(self._files.items()))
            begun = time.perf_counter()
            with told(path, file.tell()):
                file.flush()
                os.fsync(file.fileno())
            self.seconds[path] = time.perf_counter() - begun
            del self._files[path]


@contextmanager
def told(path: Path, nbytes: int = 0) -> Iterator[None]:
    """Say of an error of the disk what could not be written, how much that is and how much is free.

    Raises CheckpointError.
    """
    try:
        yield
    except OSError as error:
        older = complete_steps(path.parent.parent)
        remedy = remedy_of(error) + ("; the older checkpoints are whole" if older else " and try again")
        raise CheckpointError(
            f"cannot write {path} ({error.strerror or error}{_room(path, nbytes)}): {remedy}."
        ) from error


def _room(path: Path, nbytes: int) -> str:
    """Say how much a file takes, and how much the disk has left."""
    with suppress(OSError):
        return f"; it takes {nbytes:,} bytes, and {shutil.disk_usage(path.parent).free:,} are free" if nbytes else ""
    return ""


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | Halves], unsynced: Unsynced | None = None, **about: str
) -> Checksums:
    """Write a safetensors file; return its checksums. Raises CheckpointError where the disk does not take it.

    Tensors may be on any device and strided. Beside them it takes BUFFER_BYTES of host memory, or less; of those in
    halves it joins as many bytes at a time.

    unsynced  is given the file, to be synced later; it is synced here where there is none
    """
    if unsynced is None:
        with Unsynced() as files:
            checksums = write_tensors(path, tensors, files, **about)
            files.sync()
        return checksums
    in_order = sorted(tensors, key=lambda key: (-tensors[key].dtype.itemsize, key))  # so that each is aligned
    contents = {key: tensors[key] for key in in_order}
    hasher = Hasher(contents)
    header = _header(path, contents, about)
    nbytes = sum(values.shape.numel() * values.dtype.itemsize for values in contents.values())
    with told(path, len(header) + nbytes):
        file = unsynced.open(path)
        hasher.update(None, header)
        file.write(header)
        given = 0
        for key, data in _staged(contents):
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                hasher.update(key, block)
                file.write(block)
            if file.tell() - given >= GIVEN_BYTES:
                given = _give(file, given)
        _give(file, given)
    return hasher.checksums()


def write_kept(path: Path, kept: Kept, names: Sequence[str]) -> None:
    """Write a safetensors file of tensors that other files have, block by block. Raises CheckpointError."""
    names = sorted(names, key=lambda name: -kept.tensors[name].itemsize)  # so that each is aligned
    listed: dict[str, Any] = {"__metadata__": {"format": "pt", "writer": "zero3d"}}
    end = 0
    for name in names:
        tensor = kept.tensors[name]
        start, end = end, end + tensor.nbytes
        listed[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [start, end]}
    with Unsynced() as unsynced:
        header = _framed(listed)
        with told(path, len(header) + end):
            file = unsynced.open(path)
            file.write(header)
        given = 0
        for name in names:
            for block in kept.blocks(name):
                with told(path, len(header) + end):
                    file.write(block)
                    given = _give(file, given)
        unsynced.sync()


def _give(file: BinaryIO, start: int) -> int:
    """Have the disk begin with what was written from `start` on, and return where that ends.

    The page cache lets go of what the disk has; what it has not is written now, for it cannot be let go.
    """
    file.flush()
    stop = file.tell()
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(file.fileno(), start, stop - start, os.POSIX_FADV_DONTNEED)
    return stop


def _header(path: Path, tensors: Mapping[str, Tensor | Halves], about: Mapping[str, str]) -> bytes:
    """Return what a safetensors file begins with: its length, and dtype, shape and place of every tensor as JSON."""
    listed: dict[str, Any] = {"__metadata__": dict(about)} if about else {}
    end = 0
    for key, values in tensors.items():
        dtype = dtype_name(values.dtype)
        if dtype not in CODES:
            raise CheckpointError(f"cannot write {path}: {key} is {dtype}, which safetensors files do not hold.")
        start, end = end, end + values.shape.numel() * values.dtype.itemsize
        listed[key] = {"dtype": CODES[dtype], "shape": list(values.shape), "data_offsets": [start, end]}
    return _framed(listed)


def _framed(listed: Mapping[str, Any]) -> bytes:
    text = json.dumps(listed, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _staged(tensors: Mapping[str, Tensor | Halves]) -> Iterator[tuple[str, memoryview]]:
    """Yield the bytes of tensors in order, with their keys: their own memory where that is the host's and contiguous.

    Of others each time a part of one buffer, which the next one overwrites.
    """
    through = [values for values in tensors.values() if not _is_as_written(values)]
    largest = max((values.shape.numel() * values.dtype.itemsize for values in through), default=0)
    stored = [values if isinstance(values, Tensor) else values.weights for values in through]
    pinned = any(values.device.type != "cpu" for values in stored)
    buffer = torch.empty(min(largest, BUFFER_BYTES), dtype=torch.uint8, pin_memory=pinned)
    for key, values in tensors.items():
        if isinstance(values, Tensor) and _is_as_written(values):
            for part in torch.split(values.detach().reshape(-1).view(torch.uint8), GIVEN_BYTES):
                yield key, part.numpy().data
            continue
        for chunk in chunks(values, buffer.numel() // values.dtype.itemsize):
            staged = buffer[: chunk.numel() * chunk.element_size()]
            staged.view(chunk.dtype).view(chunk.shape).copy_(chunk)  # blocking: the bytes are read next
            yield key, staged.numpy().data


def _is_as_written(values: Tensor | Halves) -> bool:
    """Say whether a tensor's memory has, in order, the bytes that its file gets."""
    return isinstance(values, Tensor) and values.device.type == "cpu" and values.is_contiguous()


def chunks(values: Tensor | Halves, most: int) -> Iterator[Tensor]:
    """Cut a tensor, strided or not, into views of at most `most` elements that follow one another; those are joined."""
    if isinstance(values, Tensor):
        yield from _views(values.detach(), most)
        return
    for weights, remainder in zip(_views(values.weights, most), _views(values.remainder, most), strict=True):
        yield joined(Halves(weights, remainder))


def _views(values: Tensor, most: int) -> Iterator[Tensor]:
    if values.numel() <= most:
        if values.numel():
            yield values
        return
    rows = most // values[0].numel()
    if rows:
        yield from torch.split(values, rows)
        return
    for row in values:
        yield from _views(row, most)


def write_json(path: Path, value: Any) -> str:
    """Write and fsync plain values as JSON; return the SHA-256. Raises CheckpointError for anything else."""
    return write_text(path, json_text(path, value))


def json_text(path: Path, value: Any) -> str:
    """Return plain values as the JSON that is to be written to a file. Raises CheckpointError for anything else."""
    try:
        return json.dumps(to_json(value))
    except TypeError as error:
        raise CheckpointError(
            f"cannot write {path.name}: {error}. Scheduler and group options must be plain values."
        ) from error


def write_text(path: Path, text: str, unsynced: Unsynced | None = None) -> str:
    """Write a text file; return its SHA-256. Raises CheckpointError where the disk does not take it.

    unsynced  is given the file, to be synced later; it is synced here where there is none
    """
    if unsynced is None:
        with Unsynced() as files:
            sha256 = write_text(path, text, files)
            files.sync()
        return sha256
    data = text.encode()
    with told(path, len(data)):
        file = unsynced.open(path)
        file.write(data)
        _give(file, 0)
    return hashlib.sha256(data).hexdigest()
