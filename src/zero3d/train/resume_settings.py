"""Settings of a resumed run: noted in a checkpoint, compared with the new ones, chosen, and put in words to type.

    --resume-settings given   the file's, as for everything else: a learning rate that it changes counts from here on
    --resume-settings saved   sections `optimizer` and `schedule` are the checkpoint's, whatever the file says

An engine notes its own settings (`engine/state.py`). A run adds the settings that its engine does not see: the size of
batches, values of other keys that change bits, and every such key as its file had it, to be typed again.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from zero3d.checkpoint.fields import Field
from zero3d.checkpoint.folders import MANIFEST
from zero3d.checkpoint.manifest_parser import open_manifest
from zero3d.checkpoint.resume_contract import BITWISE
from zero3d.config import Batch, Config
from zero3d.config.describe import plain, scalar
from zero3d.config.keys import KEYS, value_of
from zero3d.distributed.degrees import AXES
from zero3d.engine.engine import Engine
from zero3d.errors import CheckpointError
from zero3d.spec.bits import SAVED
from zero3d.spec.declaring import as_noted, noted_as
from zero3d.train.setup.optimizer import BY_NAME, norms_and_biases, of_one_dimension
from zero3d.train.setup.schedule import rate

OF_UPDATE = ("optimizer.", "schedule.")
RATES = ("scheduler", "factors", "schedule_state")  # what is noted of a schedule
NOT_TYPED = ("model", "data")  # facts of keys that a run refuses to change
OF_BATCHES = ("batch", "micro_batch", "tokenization")  # facts among batches
OPTION = "--resume-settings"
NO_DECAY = "optimizer.no_decay"


def settings_of(config: Config) -> dict[str, Any]:
    """Return the keys that bits depend on, as a checkpoint keeps them, without keys whose change it refuses."""
    return {name: plain(value_of(config, name)) for name in _kept()}


def batches_of(batch: Batch, steps: int, rule: int | None = None) -> dict[str, int]:
    """Return sequences of a step and of a micro-batch, and the steps that the schedule is made for.

    rule  by which records are tokenized when a batch needs them, where there are such (`DataSet.rule`)
    """
    sizes = {"batch": batch.batch, "micro_batch": batch.micro_batch, "steps": steps}
    return sizes if rule is None else sizes | {"tokenization": rule}


def _kept() -> Iterator[str]:
    return (name for name, key in KEYS.items() if key.bits is not None and key.bits.fact not in NOT_TYPED)


def check_settings(settings: Field) -> None:
    """Refuse values that no file can have. Raises CheckpointError."""
    for name, field in settings.items():
        _read(name, field)


def check_batches(batches: Field) -> None:
    """Refuse sizes that no batch can have. Raises CheckpointError."""
    for _, field in batches.items():
        field.integer(0)


def _read(name: str, field: Field) -> Any:
    """Return a key's value that was saved, as a Config has it; of a key that there is no more, None."""
    if name not in KEYS:
        return None
    try:
        return KEYS[name].read(field.value)
    except ValueError:
        field.refuse(f"a value of {name}")


def with_saved(config: Config, choice: str, checkpoint: Path | None) -> Config:
    """Return a configuration with the checkpoint's update, if `choice` asks for it. Raises CheckpointError."""
    if choice != SAVED or checkpoint is None:
        return config
    manifest = open_manifest(checkpoint)
    loop = manifest.value("loop") or {}
    if not loop.get("settings"):
        raise CheckpointError(
            f"{OPTION} {SAVED}: {checkpoint} does not say which settings its run had; an older zero3d wrote it, or "
            f"engine.save: leave {OPTION} out, and give the settings."
        )
    settings = Field(str(checkpoint / MANIFEST), "loop.settings", loop["settings"])
    for name in filter(lambda name: name.startswith(OF_UPDATE), _kept()):
        if name in loop["settings"]:
            section, _, key = name.partition(".")
            value = _read(name, settings.entry(name))
            config = replace(config, **{section: replace(getattr(config, section), **{key: value})})
    return config


def with_groups(config: Config, model: nn.Module, checkpoint: Path | None) -> tuple[Config, str | None]:
    """Return a configuration with weight decay on the same parameters as in the resumed run, and a line about it.

    A run that an older version began notes null for optimizer.no_decay, its default, under which norms, biases, rates
    and convolutions of recurrences had weight decay where they have two dimensions or more. A manifest that cannot be
    read is refused when it is loaded.
    """
    if checkpoint is None or config.optimizer.no_decay != BY_NAME:
        return config, None
    try:
        settings = (open_manifest(checkpoint).value("loop") or {}).get("settings") or {}
    except CheckpointError:
        return config, None
    exempt = norms_and_biases(model) - of_one_dimension(model)
    decayed = [name for name, p in model.named_parameters() if p.requires_grad and name in exempt]
    if settings.get(NO_DECAY, BY_NAME) is not None or not decayed:
        return config, None
    kept = replace(config, optimizer=replace(config.optimizer, no_decay=None))
    return kept, (
        f"{NO_DECAY}=null: an older version began this run and gave weight decay to {len(decayed)} parameters that "
        f"have none in a new run, such as {decayed[0]}; it keeps them."
    )


def describe(config: Config, offers: bool, engine: Engine, saved: Mapping[str, Any], batches: Mapping[str, int]) -> str:
    """Return a line: whether a run goes on bitwise, and if not, why, and the settings to type. All ranks call it.

    offers   whether `--resume-settings saved` can be typed, and was not
    saved    the state that the loop had saved
    batches  `batches_of` the run that goes on
    """
    then, was = saved.get("settings") or {}, saved.get("batches") or {}
    now = settings_of(config)
    changed = engine.checkpoints.compare(_noted(then, was), _noted(now, batches))
    line = engine.resumed
    different = [name for name, value in then.items() if name in now and now[name] != value]
    words = [] if (ranks := _ranks_before(engine)) is None else [f"--ranks {ranks}"]
    if line.startswith(BITWISE) or not (different or words):
        return line
    if all(each.name in RATES for each in changed) and _began_alike(config, engine.steps, then, was, batches):
        line += "; rates up to here are those of a run that began with these settings"
    words += [shlex.quote(f"{name}={scalar(KEYS[name].read(then[name]))}") for name in different]
    update = offers and any(name.startswith(OF_UPDATE) for name in different)
    return f"{line}. To go on as before, type {' '.join(words)}{f', or {OPTION} {SAVED}' if update else ''}"


def _ranks_before(engine: Engine) -> int | None:
    """Return the number of ranks of the resumed run before, if it was another."""
    noted = engine.checkpoints.loaded or {}
    degrees = [noted.get(axis) for axis in AXES]
    world = math.prod(degree for degree in degrees if isinstance(degree, int))
    return world if None not in degrees and world != engine.world.size else None


def _noted(settings: Mapping[str, Any], batches: Mapping[str, int]) -> dict[str, Any]:
    """Return values of keys by themselves, and batches, as the resume contract compares them."""
    values = {}
    for name, value in settings.items():
        section, _, key = name.rpartition(".")
        bits = KEYS[name].bits if name in KEYS else None
        if bits is not None and not bits.fact:
            values[noted_as(section, key)] = as_noted(value)
    return values | {name: batches[name] for name in OF_BATCHES if name in batches}


def _began_alike(
    config: Config, done: int, then: Mapping[str, Any], was: Mapping[str, int], batches: Mapping[str, int]
) -> bool:
    """Return whether the steps that are done had the rates that they would have now."""
    if "steps" not in was:
        return False
    values = {
        name.partition(".")[2]: KEYS[name].read(value) for name, value in then.items() if name.startswith("sched")
    }
    before = rate(replace(config.schedule, **values), was["steps"], config.optimizer.lr)
    now = rate(config.schedule, batches["steps"], config.optimizer.lr)
    return all(before(step) == now(step) for step in range(done))
