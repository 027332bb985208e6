"""Checks that the files of a checkpoint are those that its manifest means: checksums, and what their headers say.

A file that is changed after it was hashed, while ranks read their boxes of it, goes unnoticed: the header is
held to the manifest and what is read has its shape and dtype, but values are not hashed again. Nobody writes
into a committed checkpoint, so that this takes a fault of the disk in these seconds, or intent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from zero3d.checkpoint.fields import USE_ANOTHER, quote
from zero3d.checkpoint.files import fetched_again, has_checksum, is_elsewhere, open_regular, present
from zero3d.checkpoint.folders import checkpoints
from zero3d.checkpoint.manifest import CODES, Manifest, Part, TensorSpec
from zero3d.checkpoint.manifest_parser import open_manifest, read_contents
from zero3d.errors import CheckpointError
from zero3d.shards.boxes import box_shape
from zero3d.stores.cache import shown

NAMES = {code: dtype for dtype, code in CODES.items()}


def verify(folder: Path) -> None:
    """Check everything that can be checked without a model. Raises CheckpointError, which names file and field."""
    manifest = open_manifest(folder)
    read_contents(manifest, lambda rank, part: verify_file(manifest, part))


def verify_file(manifest: Manifest, part: Part) -> None:
    """Hash one file of tensors and hold its header to what its rank says of it. Raises CheckpointError."""
    path = manifest.folder / part.file
    if not has_checksum(path, part.checksum) and not (fetched_again(path) and has_checksum(path, part.checksum)):
        raise CheckpointError(
            f"{shown(path)} differs from what was saved: its checksum is not the manifest's. {USE_ANOTHER}"
        )
    check_header(manifest, part)


def check_header(manifest: Manifest, part: Part) -> None:
    """Hold the header of a file of tensors to what its rank says of it; hashes nothing. Raises CheckpointError."""
    path = manifest.folder / part.file
    stored = header(path)
    expected = _expected(part)
    if stored.keys() - expected.keys():
        raise CheckpointError(
            f"{path} holds {quote(min(stored.keys() - expected.keys()))}, which is not in the manifest. {USE_ANOTHER}"
        )
    for key, (shape, dtype) in expected.items():
        if key not in stored:
            raise CheckpointError(f"{path} has no tensor {quote(key)}, and the manifest names it. {USE_ANOTHER}")
        if stored[key] != (shape, dtype):
            raise CheckpointError(
                f"{path}: {quote(key)} is {stored[key].dtype} {stored[key].shape}, but should be {dtype} {shape}. "
                f"{USE_ANOTHER}"
            )


def header(path: Path) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor in a safetensors file. Raises CheckpointError."""
    with _opened(path) as opened:
        slices = {key: opened.get_slice(key) for key in opened.keys()}  # noqa: SIM118
        return {
            key: TensorSpec(tuple(values.get_shape()), _dtype(values.get_dtype())) for key, values in slices.items()
        }


def check_size(path: Path) -> None:
    """Refuse a file of tensors that is not a regular one, or has not the size that its header says; reads only that.

    One that is in a store alone was as long as the file that was uploaded: nothing is fetched. Raises CheckpointError.
    """
    if is_elsewhere(path):
        return
    with open_regular(path), _opened(path):
        pass


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a safetensors file, whose header and size must agree. Raises CheckpointError."""
    try:
        with safe_open(present(path), framework="np") as opened:
            yield opened
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors ({quote(str(error))}). {USE_ANOTHER}") from None


def _dtype(code: str) -> str:
    return NAMES.get(code, code)


def _expected(part: Part) -> dict[str, TensorSpec]:
    """Return shape and dtype of every tensor that a file must hold."""
    return {row.key: TensorSpec(box_shape(row.box), row.dtype) for row in part.rows} | dict(part.own)


def newest_intact(directory: Path, but: Path) -> Path | None:
    """Return the newest checkpoint of a directory that `verify` has nothing against, `but` left out."""
    for folder in reversed(checkpoints(directory).values()):
        if folder != but:
            try:
                verify(folder)
            except CheckpointError:
                continue
            return folder
    return None


def find_damage(folder: Path) -> CheckpointError | None:
    """Return what `verify` has against a checkpoint, or None."""
    try:
        verify(folder)
    except CheckpointError as error:
        return error
    return None
