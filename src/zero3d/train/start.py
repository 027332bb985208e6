"""How a run begins, and what can be refused before it does, by looking only. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from zero3d.config import Config
from zero3d.errors import ConfigError, Zero3dError
from zero3d.models.places import has_base
from zero3d.spec.bits import GIVEN
from zero3d.train.export_places import export_places
from zero3d.train.folder import AUTO, Folder
from zero3d.train.lock import check_free
from zero3d.train.planner import Planner
from zero3d.train.setup.packages import check_stores


@dataclass(frozen=True)
class Start:
    """Says how a run begins.

    name       of the output folder where the configuration gives none: zero3d-NAME, zero3d-NAME-2, ...
    resume     a checkpoint, or `auto`: the newest of the output folder, if there is one
    overwrite  remove what an earlier run wrote there
    settings   whose settings of the update count in a run that goes on: the file's (given), the checkpoint's (saved)
    report_output  is called with the output folder if the configuration names none
    end        ends this process with an error, from any thread; without it nobody watches the host's memory
    planner    is asked what `auto` becomes, what a step should take, and what to change when memory is out
    """

    name: str = "run"
    resume: str | None = None
    overwrite: bool = False
    report_output: Callable[[Path], None] = lambda _: None
    end: Callable[[Zero3dError], None] | None = None
    settings: str = GIVEN
    planner: Planner = field(default_factory=Planner)


def check_start(config: Config, start: Start, alone: bool) -> None:
    """Refuse a folder or checkpoint that cannot be, before anything is read. Raises ConfigError, CheckpointError.

    alone  no process of this run locks the folder yet or is about to: a lock is another run's
    """
    check_stores(config, start.resume)
    if start.resume == AUTO and config.output is None:
        raise ConfigError("--resume auto looks in the run's own folder: name it with output=FOLDER.")
    start.planner.refuse(config)
    folder = Folder.of(config)
    if alone and config.output is not None:
        check_free(folder.root)
    checkpoint = folder.resume_from(start.resume)
    if alone:
        folder.refuse_copies(start.resume, start.overwrite)
    if config.output is not None:
        folder.refuse(start.resume, start.overwrite, checkpoint)
        adapted, based = config.lora.rank is not None, has_base(config.model)
        for place in export_places(folder.root, config.checkpoint.export, adapted, based):
            place.refuse()
