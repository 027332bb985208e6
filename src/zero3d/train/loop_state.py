"""What the training loop had saved in a checkpoint, checked: counters, the best so far, the place in the data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field as stored, replace
from pathlib import Path
from typing import Any

from zero3d.blueprint.auto import PLACES
from zero3d.checkpoint.fields import Field
from zero3d.checkpoint.folders import MANIFEST
from zero3d.errors import ConfigError
from zero3d.spec.tiers import DEVICE, HOST
from zero3d.train.criterion import Criterion, Waiting
from zero3d.train.resume_settings import check_batches, check_settings

RUN = "run"  # beside the loop's state in a note: the number of the run that wrote it


@dataclass(frozen=True)
class LoopState:
    """Says how far a run is.

    step  batches so far; skipped of them changed nothing, the last `in_a_row` because they were not finite
    tokens  all ranks together
    best  [applied steps, value] of the checkpoint with the best evaluation
    chosen_by  the criterion of the best: "lowest validation_loss"
    waiting  how long a better evaluation has been waited for; None before the first one
    offload  the choice made for `auto` (offload.py), or None
    settings, batches  keys and sizes that the bits of the run depend on (resume_settings.py)
    """

    step: int = 0
    skipped: int = 0
    in_a_row: int = 0
    tokens: int = 0
    best: tuple[int, float] | None = None
    position: Mapping[str, Any] = stored(default_factory=dict)
    offload: Mapping[str, Any] | None = None
    chosen_by: str = str(Criterion())
    waiting: Waiting | None = None
    settings: Mapping[str, Any] = stored(default_factory=dict)
    batches: Mapping[str, int] = stored(default_factory=dict)

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> LoopState:
        """Return the state that a checkpoint has kept."""
        best, waiting = saved["best"], saved.get("waiting")
        known = {name: value for name, value in saved.items() if name != RUN}
        known["best"] = None if best is None else (int(best[0]), float(best[1]))
        known["waiting"] = None if waiting is None else Waiting(waiting["best"], waiting["since"])
        return cls(**known)

    def by(self, criterion: Criterion) -> LoopState:
        """Return the state of a run that chooses by `criterion`: by another one there is no best yet."""
        if self.chosen_by == str(criterion):
            return self
        return replace(self, chosen_by=str(criterion), best=None, waiting=None)


def check_loop_state(checkpoint: Path, saved: Mapping[str, Any] | None, applied: int) -> Mapping[str, Any]:
    """Return what the loop has saved, checked; the engine has `applied` steps. Raises CheckpointError, ConfigError.

    checkpoint  a folder, or the note of a step in slots
    """
    if saved is None or "position" not in saved:
        raise ConfigError(
            f"{checkpoint} was saved by engine.save, not by zero3d train: it does not say how far the data is."
        )
    file = checkpoint if checkpoint.suffix == ".json" else checkpoint / MANIFEST
    loop = Field(str(file), "loop", saved)
    skipped = loop.entry("skipped").integer()
    loop.entry("step").one_of(applied + skipped)
    loop.entry("tokens").integer()
    if loop.has("in_a_row"):  # older checkpoints do not say
        loop.entry("in_a_row").integer(0, skipped)
    if loop.entry("best").value is not None:
        step, loss = loop.entry("best").rows(2)
        step.integer(0, applied)
        loss.number()
    if loop.has("offload"):
        check_choice(loop.entry("offload"))
    if loop.has("chosen_by"):  # nor this
        loop.entry("chosen_by").text()
    if loop.has("waiting"):
        check_waiting(loop.entry("waiting"))
    if loop.has("settings"):
        check_settings(loop.entry("settings"))
    if loop.has("batches"):
        check_batches(loop.entry("batches"))
    position = loop.entry("position")
    if position.value is None:  # of a checkpoint that was imported
        return saved
    position.entry("epoch").integer()
    position.entry("index").integer(0, position.entry("sequences").integer(1) - 1)
    return saved


def check_waiting(waiting: Field) -> None:
    """Refuse what no run would have kept of its waiting for a better evaluation. Raises CheckpointError."""
    waiting.entry("since").integer()
    if waiting.entry("best").value is not None:
        waiting.entry("best").number()


def check_choice(choice: Field) -> None:
    """Refuse a saved choice for `auto` that no run would have made. Raises CheckpointError."""
    for name, field in choice.items():
        if name == "fraction":
            if not 0 < field.number() <= 1:
                field.refuse("a number above 0, up to 1")
        elif name in ("optimizer", "executor"):
            field.one_of(*(PLACES if name == "optimizer" else (DEVICE, HOST)))
        else:
            choice.refuse("a mapping of optimizer, fraction and executor")
