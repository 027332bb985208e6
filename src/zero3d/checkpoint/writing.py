"""Writing files of a checkpoint so that they are on the disk: tensors, JSON, text; a folder that failed is removed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from zero3d.checkpoint.folders import complete_steps
from zero3d.checkpoint.json_values import to_json
from zero3d.distributed.collectives import Comm
from zero3d.errors import CheckpointError, Zero3dError


@contextmanager
def removed_on_failure(temporary: Path, world: Comm) -> Iterator[None]:
    """Remove a folder that could not be completed: it would fill the disk that may be full."""
    try:
        yield
    except Zero3dError:
        if world.rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        raise


def write_tensors(path: Path, tensors: dict[str, Tensor], **about: str) -> None:
    """Write and fsync a safetensors file. Raises CheckpointError where the disk does not take it."""
    try:
        save_file(tensors, path, metadata=about or None)
        sync(path)
    except (OSError, SafetensorError) as error:
        older = complete_steps(path.parent.parent)
        remedy = "go on from an older checkpoint, which is whole" if older else "try again"
        raise CheckpointError(f"cannot write {path} ({error}): make room and {remedy}.") from OSError(str(error))


def write_json(path: Path, value: Any) -> str:
    """Write and fsync plain values as JSON; return the text. Raises CheckpointError for anything else."""
    try:
        text = json.dumps(to_json(value))
    except TypeError as error:
        raise CheckpointError(
            f"cannot write {path.name}: {error}. Scheduler and group options must be plain values."
        ) from error
    write_text(path, text)
    return text


def write_text(path: Path, text: str) -> None:
    """Write and fsync a text file."""
    path.write_text(text)
    sync(path)


def sync(path: Path) -> None:
    """Have the disk take a file, or the entries of a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
