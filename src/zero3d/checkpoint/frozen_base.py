"""The folder of a checkpoint's frozen weights: what of them is left out, and where it is found again. No torch.

    an engine is built    frozen weights are read from the folder, whose digest is taken: they are the base's
    full_params, a load   write other values into some of them: those are saved from now on
    a save                leaves out what is still the base's, and says of which digest that is
    a load                refuses another digest; what was left out is the base's again

A folder may be moved or copied between a save and a load: its digest counts, and the path is for messages. It is of

    tensors, by name    name, dtype, shape, and of the bytes BLOCKS blocks of BLOCK_BYTES, the first and the last
                        among them; all bytes where there are no more of them

It does not depend on how tensors are spread over files. It takes seconds where all bytes of a large model would take
minutes, and what it proves is as much less: two folders with one digest have tensors of the same names, dtypes and
shapes, and the same bytes in all blocks that were looked at. Weights that were trained on differ in nearly every one
of them. That single bytes elsewhere are the same it does not prove, nor who wrote them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import xxhash

from zero3d.checkpoint.fields import quote
from zero3d.checkpoint.manifest import Manifest
from zero3d.errors import CheckpointError, ConfigError
from zero3d.reading import Unreadable, tensor_places
from zero3d.shards.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS, BLOCK_BYTES = 16, 4096
DIGITS = 32  # of XXH3 in 128 bits


@runtime_checkable
class FolderSource(Protocol):
    """Gives values of parameters, and says which of them are in the files of a folder."""

    @property
    def folder(self) -> Path | None:
        """The folder; None where all values come from elsewhere."""

    def __call__(self, name: str, box: Box) -> Tensor:
        """Return the values in a box of the whole parameter `name`."""

    def files(self) -> list[Path]:
        """Return the safetensors files of the folder."""

    def holds(self, name: str) -> bool:
        """Say whether the values of a parameter are in the folder's files."""

    def close(self) -> None:
        """Let go of files and of the values read last."""


class FrozenBase:
    """Owns which frozen parameters of an engine have the values of a folder's files.

    source  gives them
    known   names of all that the folder holds
    digest  of the folder's weights; "" on ranks that do not write or compare it
    """

    def __init__(self, source: FolderSource, known: Iterable[str], digest: str) -> None:
        self.source = source
        self.known = frozenset(known)
        self.digest = digest
        self._unchanged = set(self.known)

    @classmethod
    def of(cls, source: FolderSource, frozen: Iterable[str], first: bool) -> FrozenBase | None:
        """Return the base of an engine that took its weights from `source`; None where its folder holds none of them.

        frozen  names of the full model's frozen parameters
        first   whether this rank writes manifests: it takes the digest

        Raises ConfigError.
        """
        source.close()
        known = [name for name in frozen if source.holds(name)]
        return cls(source, known, digest_of(source.files()) if first else "") if known else None

    @property
    def folder(self) -> Path:
        """The folder, as it was named."""
        assert self.source.folder is not None
        return self.source.folder

    def has(self, name: str) -> bool:
        """Say whether a parameter is still what the folder has."""
        return name in self._unchanged

    def changed(self, names: Iterable[str]) -> None:
        """Take note that parameters have other values than the folder's now."""
        self._unchanged -= set(names)

    def returned(self, names: Iterable[str]) -> None:
        """Take note that parameters have the folder's values again."""
        self._unchanged |= set(names)

    def described(self) -> Mapping[str, str]:
        """Return what a manifest says of it."""
        return {"folder": str(self.folder.resolve()), "digest": self.digest}


# --- a checkpoint and a folder --------------------------------------------------------------------


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


# --- the digest -----------------------------------------------------------------------------------


def digest_of(files: Sequence[Path]) -> str:
    """Return the digest of all tensors in these safetensors files, in hexadecimal digits. Raises ConfigError."""
    by_name = {name: (path, entry) for path in files for name, entry in _entries(path)}
    hasher = xxhash.xxh3_128()
    for name in sorted(by_name):
        path, (start, stop, described) = by_name[name]
        hasher.update(f"{name!r} {described}\0".encode())
        for block in _blocks(path, start, stop):
            hasher.update(block)
    return hasher.hexdigest()


def _entries(path: Path) -> Iterator[tuple[str, tuple[int, int, str]]]:
    """Yield of each tensor in a file where its bytes begin and end, and its dtype and shape."""
    try:
        for name, (start, stop, dtype, shape) in tensor_places(path).items():
            yield name, (start, stop, f"{dtype} {list(shape)}")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): copy it again.") from error
    except Unreadable as error:
        raise ConfigError(f"{path} cannot be read as safetensors: copy it again.") from error


def _blocks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes of a file between two places that are looked at. Raises ConfigError where they are not there."""
    places, size = [start], stop - start
    if size > BLOCKS * BLOCK_BYTES:
        size = BLOCK_BYTES
        places = [start + (stop - start - size) * i // (BLOCKS - 1) for i in range(BLOCKS)]
    try:
        with path.open("rb") as file:
            for place in places:
                file.seek(place)
                block = file.read(size)
                if len(block) < size:
                    raise ConfigError(f"{path} ends before byte {place + size:,}, where a tensor ends: copy it again.")
                yield block
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): copy it again.") from error
