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
    """Say what to do about a checkpoint that is whole and of no use: take the one before it, or start anew."""
    siblings = list(checkpoints(checkpoint.parent).values())
    older = siblings[: siblings.index(checkpoint)] if checkpoint in siblings else []
    return f"Take an older one, --resume {older[-1]}, or {ANEW}." if older else f"None there is older: {ANEW}."


@dataclass(frozen=True)
class ResumeHints:
    """Says what to type to continue a run in `folder` on `ranks`."""

    folder: Folder
    config: Config
    ranks: int

    def command(self, checkpoint: Path) -> str:
        """Return the command that goes on from a checkpoint, by its name where `auto` would not take it."""
        saved = checkpoints(self.folder.checkpoints)
        inside = checkpoint.resolve() in [path.resolve() for path in saved.values()]
        newest = inside and saved[max(saved)].resolve() == checkpoint.resolve()
        start = AUTO if newest else checkpoint if inside else f"{checkpoint} output=FOLDER"
        return f"zero3d train {self.folder.config} --resume {start}{self._ranks}"

    @property
    def _ranks(self) -> str:
        """Return --ranks where another number would change the batch, which the configuration leaves open."""
        free = self.config.mesh.dp is None and self.config.train.batch is None
        return f" --ranks={self.ranks}" if free else ""

    def point_to_older(self, checkpoint: Path, error: CheckpointError) -> None:
        """Raise CheckpointError with the command that goes on from an older checkpoint, if `checkpoint` is damaged.

        Reads all of `checkpoint`, and of older ones until one is whole.
        """
        if find_damage(checkpoint) is None:
            return
        older = newest_intact(self.folder.checkpoints, but=checkpoint)
        if older is None:
            remedy = f"No other checkpoint in {self.folder.checkpoints} is whole: {ANEW}."
        else:
            remedy = f"The newest one that is whole is {older}: type {self.command(older)}"
        damage = str(error).removesuffix(USE_ANOTHER).strip()
        raise CheckpointError(f"{checkpoint.name}, the newest checkpoint, is damaged: {damage} {remedy}") from error
