"""The checkpoints of a run: the newest one, the one being saved behind training, the ones to keep, and failures.

save    -> engine.save, while the loop waits or behind training
finish  <- the outcome of the save behind training: it is the newest, older ones go; or it never was
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.config.sections import STOP, WARN, Checkpoint
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError, CopyError
from zero3d.train.folder import Folder

NEVER = -1  # no number of applied steps
Best = tuple[int, float] | None  # applied steps and evaluation of the best checkpoint


class _Begun(NamedTuple):
    """A save: its step, the best checkpoint with it, and both before it."""

    steps: int
    best: Best
    steps_before: int
    best_before: Best


class Saving:
    """Owns a run's checkpoints. Every method is called by all ranks together.

    newest  the newest checkpoint that is committed; the folder of all of them where the run has none
    steps   applied steps of the one that was begun last, committed or not
    best    the best of the committed ones and the one under way
    tell    is given the folder of every checkpoint that is committed
    wrote   is given the seconds of each in which training waited for files of this rank
    """

    def __init__(
        self,
        config: Checkpoint,
        engine: Engine,
        folder: Folder,
        tell: Callable[[Path], None] = lambda _: None,
        wrote: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._config = config
        self._engine = engine
        self._folder = folder
        self._tell, self._wrote = tell, wrote
        self.newest, self.steps = folder.checkpoints, engine.steps
        self.best: Best = None
        self._first = engine.steps  # checkpoints of an abandoned course go once this one has come further
        self._under_way: _Begun | None = None
        self._told = True
        self._stops = (config.on_error or (WARN if config.asynchronous else STOP)) == STOP

    def go_on(self, newest: Path | None, best: Best, from_slots: bool) -> None:
        """Continue an earlier session's; from slots those are of a later step than the newest checkpoint."""
        self.newest, self.best = newest or self.newest, best
        if from_slots:
            self.steps = NEVER

    @property
    def under_way(self) -> bool:
        """Whether a save goes on behind training."""
        return self._under_way is not None

    @property
    def has_any(self) -> bool:
        """Whether there is a checkpoint."""
        return self.newest != self._folder.checkpoints

    def save(self, loop: Mapping[str, Any], best: Best, must: bool) -> None:
        """Save the engine's step, after `finish`. must: while the caller waits, and a failure is raised.

        Raises CheckpointError.
        """
        begun = _Begun(self._engine.steps, best, self.steps, self.best)
        behind = self._config.asynchronous and not must
        self.steps, self.best = begun.steps, best
        try:
            if behind:
                self._engine.save(self._folder.checkpoints, loop, wait=False, to=self._config.to)
            else:
                self._committed(self._engine.save(self._folder.checkpoints, loop, to=self._config.to), begun)
        except CheckpointError as error:
            self._failed(error, begun, must or self._stops)
        else:
            self._under_way, self._told = begun if behind else None, False

    def finish(self, ends: bool) -> None:
        """Wait for the save behind training, if there is one, and take note of what came of it.

        Raises CheckpointError where a failure is to end the run, unless that ends anyway: it saves once more then.
        """
        begun, self._under_way = self._under_way, None
        if begun is None:
            return
        try:
            folder = self._engine.saved()
        except CheckpointError as error:
            self._failed(error, begun, self._stops and not ends)
        else:
            assert folder is not None
            self._committed(folder, begun)

    def _committed(self, folder: Path, begun: _Begun, copied: bool = True) -> None:
        """Take over a checkpoint; older ones go, but the best, of the store's once it has this one."""
        self.newest = folder
        self._wrote(self._engine.save_figures.own)
        if self._engine.world.rank == 0 and begun.steps > self._first:
            chosen = begun.steps, self._config.keep, None if begun.best is None else begun.best[0]
            self._folder.prune(*chosen)
            if copied:
                self._folder.prune_copies(*chosen)
        self._tell(folder)

    def _failed(self, error: CheckpointError, begun: _Begun, raises: bool) -> None:
        """Forget a checkpoint that never was, keep one that is not in the store; raise why, or warn of it."""
        if isinstance(error, CopyError):
            self._committed(self._folder.checkpoints / f"step-{begun.steps}", begun, copied=False)
            said = f"the store has no checkpoint of step {begun.steps}, and training goes on: {error}"
        else:
            self.steps, self.best = begun.steps_before, begun.best_before
            kept = f"{self.newest} is the newest" if self.has_any else "nothing is saved yet"
            said = f"the checkpoint of step {begun.steps} was not written, training goes on, and {kept}: {error}"
        if raises:
            raise error
        if self._engine.world.rank == 0:
            warnings.warn(said, stacklevel=2)

    def figures(self) -> dict[str, float]:
        """Return the cost of the last save, once: seconds that training waited, bytes that this rank wrote."""
        if self._told:
            return {}
        self._told = True
        seconds, nbytes, _ = self._engine.save_figures
        return {"save_seconds": seconds, "save_bytes": nbytes}
