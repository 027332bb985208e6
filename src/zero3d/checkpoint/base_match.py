"""Whether a folder is the base that a checkpoint's frozen weights were left out for."""

from __future__ import annotations

from zero3d.checkpoint.base_digest import digest_of
from zero3d.checkpoint.fields import quote
from zero3d.checkpoint.frozen_base import FolderSource
from zero3d.checkpoint.manifest import Manifest
from zero3d.errors import CheckpointError


def needed_base(manifest: Manifest) -> str:
    """Return the sentence of what a checkpoint needs, without an end."""
    saved = manifest.value("base")
    count = len(manifest.left_out)
    return (
        f"{manifest.folder} leaves out {count} frozen weight{'s' if count > 1 else ''} of {quote(saved['folder'])} "
        f"(digest {saved['digest']})"
    )


def check_digest(manifest: Manifest, folder: object, digest: str, remedy: str) -> None:
    """Refuse a folder whose weights have another digest. Raises CheckpointError."""
    if digest != manifest.value("base")["digest"]:
        raise CheckpointError(
            f"{needed_base(manifest)}, and the weights of {quote(str(folder))} are others (digest {digest}): {remedy}."
        )


def check_base(manifest: Manifest, base: FolderSource | None) -> None:
    """Refuse no folder, and one with other weights, for what is done without ranks. Raises CheckpointError."""
    if base is None:
        raise CheckpointError(f"{needed_base(manifest)}: type --base FOLDER, where that is now.")
    check_digest(manifest, base.folder, digest_of(base.files()), "type --base FOLDER, where that base is now")
