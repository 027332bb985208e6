"""A run's output folder: claimed once, never written over by accident.

OUTPUT/
  config.yaml     what was run; `zero3d train OUTPUT/config.yaml` runs it again
  metrics.jsonl   one line per step
  checkpoints/    step-N: the last few and the best; best -> step-N
  hf/             the final weights, for from_pretrained
  loss.png, trace-rank-0.json, tensorboard/
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from zero3d.errors import CheckpointError, ConfigError

WRITTEN = ("config.yaml", "metrics.jsonl", "checkpoints", "hf", "loss.png", "trace-rank-0.json", "tensorboard", "wandb")
AUTO = "auto"


@dataclass(frozen=True)
class Folder:
    """Paths of one run."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def export(self) -> Path:
        return self.root / "hf"

    @property
    def curve(self) -> Path:
        return self.root / "loss.png"

    # --- claiming -----------------------------------------------------------------------------------

    def claim(self, resume: str | None, overwrite: bool, found: Path | None = None) -> None:
        """Make it, or refuse a used one with the three choices. Raises ConfigError.

        found  the checkpoint that `resume` means: a run goes on in its own folder, or begins a fresh one
        """
        goes_on = resume == AUTO or (found is not None and found.resolve().parent == self.checkpoints.resolve())
        if overwrite:
            self._clear()
        elif not goes_on and self.used:
            raise ConfigError(
                f"output {self.root} is used already ({', '.join(sorted(e.name for e in self.root.iterdir())[:4])}): "
                "go on with --resume auto, write elsewhere with output=FOLDER, or start anew with --overwrite."
            )
        try:
            self.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"output {self.root.resolve()} cannot be created ({error.strerror}): choose another with output=FOLDER."
            ) from error

    def write_config(self, text: str) -> None:
        """config.yaml, the first thing a run writes. Raises ConfigError."""
        try:
            self.config.write_text(text)
        except OSError as error:
            raise ConfigError(
                f"{self.config.resolve()} cannot be written ({error.strerror}): choose another with output=FOLDER."
            ) from error

    @property
    def used(self) -> bool:
        """Whether anything is in it."""
        return self.root.exists() and (not self.root.is_dir() or any(self.root.iterdir()))

    def _clear(self) -> None:
        """Remove what a run has written, and refuse a folder that no run has."""
        if not self.used:
            return
        if not self.config.is_file():
            raise ConfigError(f"--overwrite: {self.root} has no config.yaml, so no run wrote it: remove it yourself.")
        for name in WRITTEN:
            path = self.root / name
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)

    def resume_from(self, resume: str | None) -> Path | None:
        """The checkpoint to go on from: `auto` takes the newest of this folder, if there is one."""
        if resume is None:
            return None
        from zero3d.restore import find  # imports torch, which those who only name folders do without

        try:
            return find(self.checkpoints if resume == AUTO else Path(resume))
        except CheckpointError:
            if resume == AUTO:
                return None
            raise

    # --- checkpoints --------------------------------------------------------------------------------

    def prune(self, last: int, keep: int, best: int | None) -> None:
        """Leave `keep` checkpoints up to `last`, the one just saved, and the best one, and point `best` at it.

        Later ones are of a course that was left: the run went back and on from an older checkpoint.
        """
        found = sorted(int(p.name[5:]) for p in self.checkpoints.glob("step-*") if p.name[5:].isdigit())
        link = self.checkpoints / "best"
        if best is not None and best in found:
            fresh = self.checkpoints / ".best.tmp"
            fresh.unlink(missing_ok=True)
            fresh.symlink_to(f"step-{best}")
            fresh.replace(link)
        kept = {*[step for step in found if step <= last][-keep:], best}
        for step in set(found) - kept:
            shutil.rmtree(self.checkpoints / f"step-{step}")
        if link.is_symlink() and not link.exists():
            link.unlink()

    def keep_metrics(self, step: int) -> list[dict[str, float]]:
        """Drop lines after `step`, which will be written again; what is left."""
        lines = self.metrics.read_text().splitlines() if self.metrics.is_file() else []
        kept = [record for record in map(_parse, lines) if record is not None and record["step"] <= step]
        fresh = self.metrics.with_suffix(".tmp")
        fresh.write_text("".join(json.dumps(record) + "\n" for record in kept))
        fresh.replace(self.metrics)
        return kept


def _parse(line: str) -> dict[str, float] | None:
    """A record, or None for a line that a crash cut off."""
    try:
        record: dict[str, float] = json.loads(line)
    except ValueError:
        return None
    return record


def first_free(stem: str) -> int:
    """Make the first free one of STEM, STEM-2, STEM-3, ... ; its number."""
    number = 1
    while True:
        try:
            numbered(stem, number).mkdir(parents=True)
            return number
        except FileExistsError:
            number += 1
        except OSError as error:
            raise ConfigError(
                f"{numbered(stem, number).resolve()} cannot be created ({error.strerror}): give a folder that you may "
                "write to with output=FOLDER."
            ) from error


def numbered(stem: str, number: int) -> Path:
    """STEM, STEM-2, ..."""
    return Path(stem if number == 1 else f"{stem}-{number}")
