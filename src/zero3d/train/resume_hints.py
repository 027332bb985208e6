"""Why a run cannot go on as it is, and the command to type: its checkpoint and its number of ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zero3d.checkpoint.fields import USE_ANOTHER
from zero3d.checkpoint.folders import checkpoints
from zero3d.checkpoint.integrity import find_damage, newest_intact
from zero3d.config import Config, Health
from zero3d.errors import CheckpointError, RetiredFormatError
from zero3d.precision import LossScale
from zero3d.stores.cache import shown
from zero3d.train.folder import AUTO, Folder

ANEW = "start anew with --overwrite"
REPLACE = "Take that machine out of the run (zero3d doctor looks at it)"
BAD = "had gradients that are NaN or infinite"


def older_hint(checkpoint: Path) -> str:
    """Return the advice for a whole checkpoint of no use: take the one before it, or start anew."""
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
        known, url = shown(checkpoint), self.folder.url
        copied = url is not None and known.startswith(f"{url}/")  # and newer than those here, else it was not taken
        start = AUTO if newest or copied else checkpoint if inside else f"{known} output=FOLDER"
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
        if (found := find_damage(checkpoint)) is None or isinstance(found, RetiredFormatError):
            return
        older = newest_intact(self.folder.checkpoints, but=checkpoint)
        if older is None:
            remedy = f"No other checkpoint in {self.folder.checkpoints} is whole: {ANEW}."
        else:
            remedy = f"The newest one that is whole is {older}: type {self.command(older)}"
        damage = str(error).removesuffix(USE_ANOTHER).strip()
        raise CheckpointError(f"{checkpoint.name}, the newest checkpoint, is damaged: {damage} {remedy}") from error


def skip_limit(health: Health) -> int:
    """Return the steps in a row that are not finite, the last of which ends a run."""
    return 1 if health.nonfinite == "stop" else health.max_skips


def too_many_skips(health: Health, in_a_row: int, step: int) -> str:
    """Say why a run ends at `step`."""
    if health.nonfinite == "stop":
        return f"step {step} {BAD} (health.nonfinite=stop)."
    return f"{in_a_row} steps in a row {BAD} (health.max_skips={health.max_skips}), up to step {step}."


def none_applied(overflows: int, steps: int, last: int, scale: LossScale) -> str:
    """Say why a session fails that ends at step `last` as it began."""
    which = "of the run" if steps == last else f"from step {last - steps + 1} on"
    skipped = (
        f"all {steps} steps {which} {BAD}"
        if overflows == steps
        else (f"none of the {steps} steps {which} was applied, {overflows} of which {BAD}")
    )
    falls = f"; fp16's loss scale fell to {scale.value:g} by then: give more train.steps or a lower loss_scale.initial"
    return f"{skipped}{falls if scale.can_fall else ''}."


def after_corruption(saved: Mapping[int, Path], clean: int | None, began: int, hints: ResumeHints) -> str:
    """Say where to go on from.

    saved  checkpoints by their applied steps
    clean  applied steps before this session's last replay without a difference; None without one
    began  applied steps when this session began: earlier steps are not doubted
    """
    sure = began if clean is None else clean
    good = [step for step in saved if step <= sure]
    doubtful = [saved[step].name for step in saved if step > sure]
    known = f"The last clean replay was in step {sure + 1}" if clean is not None else "No replay was clean before"
    doubt = f"; what was saved since may hold the fault: {', '.join(doubtful)}" if doubtful else ""
    if not good:
        nothing = "no checkpoint is as old as that" if saved else "nothing is saved"
        return f"{known}{doubt}; {nothing}. {REPLACE}, then {ANEW}."
    newest = saved[max(good)]
    return f"{known}{doubt}; {newest.name} is older. {REPLACE}, then go on from there: {hints.command(newest)}"
