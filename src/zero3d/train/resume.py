"""Resuming: the checkpoint that a run goes on from, loaded into engine and data."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from zero3d.checkpoint.compatibility import ANOTHER_MODEL
from zero3d.checkpoint.folders import step_of
from zero3d.checkpoint.manifest_parser import open_manifest
from zero3d.config import Config
from zero3d.data.batches import BatchStream
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm, broadcast_ints
from zero3d.engine.engine import Engine
from zero3d.engine.health import check_weights
from zero3d.errors import CheckpointError, ConfigError, NonFiniteError
from zero3d.spec.bits import SAVED
from zero3d.train.folder import AUTO, Folder
from zero3d.train.loop_state import RUN, check_loop_state
from zero3d.train.resume_hints import ANEW, ResumeHints, older_hint
from zero3d.train.resume_settings import OPTION
from zero3d.train.setup.inputs import Inputs, steps_of_run
from zero3d.train.setup.schedule import group_settings, rate, reset_settings
from zero3d.train.setup.text_part import older_run
from zero3d.train.start import Start


def find_checkpoint(config: Config, start: Start, everyone: Comm) -> Path | None:
    """Return the checkpoint to resume from, or None. Raises CheckpointError."""
    return agree(everyone, lambda: Folder.of(config).resume_from(start.resume))


def choose_slots(config: Config, start: Start, engine: Engine, checkpoint: Path | None) -> bool:
    """Say whether `auto` goes on from slots of a disk: this run's, of a later step than its newest checkpoint."""
    slots = engine.slots if start.resume == AUTO else None
    if slots is None:
        return False
    folder = Folder.of(config)
    own = slots.loop is not None and bool(folder.run_id) and slots.loop.get(RUN) == folder.run_id
    newer = checkpoint is None or slots.step > (step_of(checkpoint) or 0)
    return bool(broadcast_ints(engine.world, [int(own and newer)])[0])


def load(config: Config, start: Start, engine: Engine, checkpoint: Path) -> Mapping[str, Any] | None:
    """Load a checkpoint; return what the loop had saved. A CheckpointError names an older one for `auto`."""
    try:
        saved: Mapping[str, Any] | None = engine.load(checkpoint)
    except CheckpointError as error:
        searches = start.resume == AUTO and engine.world.rank == 0
        hints = ResumeHints(Folder.of(config), config, engine.world.size)
        agree(engine.world.patient, partial(hints.point_to_older, checkpoint, error) if searches else lambda: None)
        if ANOTHER_MODEL in str(error) and (said := older_run(config, open_manifest(checkpoint).parameters)):
            raise CheckpointError(f"{error} {said}") from error
        raise
    return saved


def restore(
    config: Config,
    start: Start,
    inputs: Inputs,
    engine: Engine,
    stream: BatchStream,
    checkpoint: Path | None,
    from_slots: bool = False,
) -> tuple[Mapping[str, Any] | None, int]:
    """Load a checkpoint, or slots, into engine and stream; return what the loop had saved, and the run's steps.

    Settings of the optimizer and of the schedule stay those of `config`. Raises what engine and stream do,
    ConfigError, and NonFiniteError.
    """
    configured = group_settings(engine.optimizer.torch)
    if from_slots and engine.slots is not None:
        if start.settings == SAVED:
            raise ConfigError(
                f"{OPTION} {SAVED} takes settings from a checkpoint, and {engine.slots.path.parent} holds a later "
                f"step: leave {OPTION} out, and give the settings, or name a checkpoint, --resume PATH."
            )
        checkpoint = engine.slots.path
        saved = check_loop_state(checkpoint, engine.load_slots(), engine.steps)
        remedy = f"{checkpoint.parent} holds them: remove it to go on from a checkpoint, or {ANEW}."
    elif checkpoint is not None:
        saved = check_loop_state(checkpoint, load(config, start, engine, checkpoint), engine.steps)
        remedy = f"{checkpoint} holds them. {older_hint(checkpoint)}"
    else:
        return None, inputs.steps
    check_weights(engine.units, engine.world, NonFiniteError, remedy)
    if saved["position"] is not None:  # one that was imported begins the data anew
        stream.restore(saved["position"])
    steps, done = steps_of_run(config, inputs.data, inputs.batch, saved["step"], stream.taken), saved["step"]
    if steps < done:
        key = "train.epochs" if config.train.steps is None else "train.steps"
        raise ConfigError(
            f"{key} asks for {steps:,} steps, and {checkpoint} has done {done:,}: give a larger {key}, or start a "
            "new run with output=FOLDER."
        )
    factor = rate(config.schedule, steps, config.optimizer.lr)
    reset_settings(engine.optimizer.torch, engine.scheduler, configured, factor)
    return saved, steps
