"""The folder that frozen weights came from: what of them a checkpoint leaves out, and where it is found again.

    an engine is built    frozen weights are read from the folder, whose digest is taken: they are the base's
    full_params, a load   write other values into some of them: those are saved from now on
    a save                leaves out what is still the base's, and says of which digest that is
    a load                refuses another digest; what was left out is the base's again

A folder may be moved or copied between a save and a load: its digest counts, and the path is for messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor

from zero3d.checkpoint.base_digest import digest_of
from zero3d.shards.boxes import Box


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
        self.source, self.known, self.digest = source, frozenset(known), digest
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
