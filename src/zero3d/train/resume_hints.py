"""What to type where a run cannot go on as it is: from which checkpoint, on how many ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from zero3d.checkpoint.fields import USE_ANOTHER
from zero3d.checkpoint.folders import checkpoints
from zero3d.checkpoint.integrity import find_damage, newest_intact
from zero3d.config import Config
from zero3d.errors import CheckpointError
from zero3d.train.folder import AUTO, Folder

ANEW = "start anew with --overwrite"


def older_hint(checkpoint: Path) -> str:
    """What to do about one that is whole and of no use: take the one before it, or start anew."""
    beside = list(checkpoints(checkpoint.parent).values())
    older = beside[: beside.index(checkpoint)] if checkpoint in beside else []
    return f"Take an older one, --resume {older[-1]}, or {ANEW}." if older else f"None there is older: {ANEW}."


@dataclass(frozen=True)
class ResumeHints:
    """Of a run in `folder` on `ranks`."""

    folder: Folder
    config: Config
    ranks: int

    def command(self, checkpoint: Path) -> str:
        """The command that goes on from it; a checkpoint that `auto` would not take is named."""
        found = checkpoints(self.folder.checkpoints)
        inside = checkpoint.resolve() in [path.resolve() for path in found.values()]
        newest = inside and found[max(found)].resolve() == checkpoint.resolve()
        start = AUTO if newest else checkpoint if inside else f"{checkpoint} output=FOLDER"
        return f"zero3d train {self.folder.config} --resume {start}{self._ranks}"

    @property
    def _ranks(self) -> str:
        """Where another number of them would make another global batch, and the configuration fixes neither."""
        free = self.config.mesh.dp is None and self.config.train.batch is None
        return f" --ranks={self.ranks}" if free else ""

    def point_to_older(self, found: Path, refused: CheckpointError) -> None:
        """Raise CheckpointError with the command that goes on from an older checkpoint, if `found` is damaged.

        Reads all of `found`, and of older ones until one is whole.
        """
        if find_damage(found) is None:
            return
        older = newest_intact(self.folder.checkpoints, but=found)
        if older is None:
            way = f"No other checkpoint in {self.folder.checkpoints} is whole: {ANEW}."
        else:
            way = f"The newest one that is whole is {older}: type {self.command(older)}"
        said = str(refused).removesuffix(USE_ANOTHER).strip()
        raise CheckpointError(f"{found.name}, the newest checkpoint, is damaged: {said} {way}") from refused
