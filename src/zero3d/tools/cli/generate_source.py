"""Finds what OUTPUT of `zero3d generate` names, as a folder that transformers or PEFT loads.

a run's output         its export where it has finished, else its newest checkpoint
its checkpoints        the newest of them
step-N                 exported into a temporary folder, whatever mesh has saved it
adapter_config.json    an adapter of PEFT's, on its base
config.json            a folder of save_pretrained

A run's folder is only read, and its lock is not taken: a run that goes on may remove the checkpoint that is read. Then
there is a newer one.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import Any, NamedTuple

from zero3d.checkpoint.folders import MANIFEST, checkpoints, is_checkpoint, is_complete, step_of
from zero3d.checkpoint.forms import MERGED
from zero3d.checkpoint.manifest import AVERAGE
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.config import Config, load
from zero3d.config.sections import WHOLE
from zero3d.data.tokenizers import BYTES
from zero3d.errors import ConfigError, OutOfBudget, short
from zero3d.memory.file_lock import is_held
from zero3d.models.places import CONFIG, FETCH, check_weights, has_base, is_called
from zero3d.models.presets import PRESETS
from zero3d.reading import Unreadable, parse_object, read_object, read_text
from zero3d.stores.urls import is_url
from zero3d.tools.cli.ckpt_export import Asked, export
from zero3d.train.export_places import all_places, export_places
from zero3d.train.folder import Folder
from zero3d.train.lock import LOCK
from zero3d.train.session_report import EARLY, FINISHED

ADAPTER_CONFIG = "adapter_config.json"
BASE = "base_model_name_or_path"
OVER = (FINISHED, EARLY)  # of report.json
TAKES = "a run's output folder, one of its checkpoints (OUTPUT/checkpoints/step-N), or an exported folder"


class Source(NamedTuple):
    """A folder to load.

    base       the folder that its adapter is for; None where it has all weights
    part       of the base, as model.part
    precision  in which the adapter was trained, as `precision`; None where that is not known
    tokenizer  "bytes" where the run's data were bytes; None: the folder has one
    said       what it is, in a line
    step       of the checkpoint, or the last one of the run that has exported it; None where that is not known
    """

    folder: Path
    said: str
    base: Path | None = None
    part: str = WHOLE
    precision: str | None = None
    tokenizer: str | None = None
    step: int | None = None


class Wanted(NamedTuple):
    """Holds what the command line says of the model.

    base    the folder of the model that training began with, if it was moved
    merged  adapters are wanted in the weights: ranks cut a model without them
    """

    base: str | None = None
    merged: bool = False


@contextmanager
def open_source(output: str, wanted: Wanted) -> Iterator[Source]:
    """Find what OUTPUT names; what is written for it is gone afterwards.

    Raises ConfigError, CheckpointError, OutOfBudget.
    """
    path = _given(output)
    with TemporaryDirectory(prefix="zero3d-generate-") as place:
        yield _find(path, Path(place) / "export", wanted)


def _given(output: str) -> Path:
    """Return a folder that was typed. Raises ConfigError."""
    if is_url(output):
        raise ConfigError(
            f"{short(output)} is a URL, and models are read from a disk: type zero3d ckpt export {short(output)} "
            "FOLDER, and generate from that folder."
        )
    path = os.path.expanduser(output)
    if not os.path.isdir(path):  # a Path's own raises for long names
        found = "is a file" if os.path.exists(path) else "is not there"
        raise ConfigError(f"{short(output)} {found}: give {TAKES}. {FETCH}")
    return Path(path)


def _find(path: Path, place: Path, wanted: Wanted) -> Source:
    if is_checkpoint(path):
        return _of_checkpoint(path, place, wanted)
    if (path / ADAPTER_CONFIG).is_file() or (path / CONFIG).is_file():
        return _of_folder(path, wanted)
    folder = Folder(path)
    if folder.config.is_file():
        return _of_run(folder, place, wanted)
    if checkpoints(path):
        return _of_newest(path, place, wanted)
    names = ", ".join(sorted(entry.name for entry in path.iterdir())[:5]) or "nothing"
    raise ConfigError(f"{short(path)} has no config.yaml of a run and no {CONFIG} (it has {names}): give {TAKES}.")


# --- a run ----------------------------------------------------------------------------------------


def _of_run(folder: Folder, place: Path, wanted: Wanted) -> Source:
    config = load(folder.config)
    saved = checkpoints(folder.checkpoints)
    exported = [path for path in _exports(folder, config) if _is_exported(path)]
    if exported and (_is_over(folder) or not saved) and not (saved and wanted.merged and _is_adapter(exported[0])):
        return _of_folder(exported[0], wanted)
    if saved:
        return _of_newest(folder.checkpoints, place, wanted)
    state = "still goes on" if is_held(folder.root / LOCK) else "has ended"
    raise ConfigError(
        f"{short(folder.root)} has no export and no checkpoint yet, and the run {state}: wait for its first checkpoint "
        "(checkpoint.every=STEPS in the run's configuration; 0 means only at the end)."
    )


def _exports(folder: Folder, config: Config) -> list[Path]:
    """Return where the run exports to by its configuration; without a function's model, which may have adapters."""
    if is_called(config.model):
        return [place.path for place in all_places(folder.root)]
    adapted, based = config.lora.rank is not None, _has_base(config)
    return [place.path for place in export_places(folder.root, config.checkpoint.export, adapted, based)]


def _has_base(config: Config) -> bool:
    """Return whether the run's adapters were made for a folder's weights; as it was, wherever that folder is now."""
    path = config.model.path
    return has_base(config.model) or (
        config.model.init != "random" and not os.path.exists(path) and path not in PRESETS
    )


def _is_over(folder: Folder) -> bool:
    """Return whether the last session came to its end, so that the export is of the last step."""
    ended = _report(folder).get("ended")
    return isinstance(ended, Mapping) and ended.get("how") in OVER


def _last_step(folder: Folder) -> int | None:
    """Return the last step of a run that came to its end; None of any other, whose export may be an earlier one's."""
    step = _report(folder).get("step")
    return step if isinstance(step, int) and _is_over(folder) else None


def _report(folder: Folder) -> Mapping[str, Any]:
    """Return what report.json says; nothing where it cannot be read."""
    try:
        return parse_object(read_text(folder.report))
    except (OSError, Unreadable):
        return {}


def _is_exported(path: Path) -> bool:
    return _is_adapter(path) or (path / CONFIG).is_file()


def _is_adapter(path: Path) -> bool:
    return (path / ADAPTER_CONFIG).is_file()


# --- checkpoints ----------------------------------------------------------------------------------


def _of_newest(directory: Path, place: Path, wanted: Wanted) -> Source:
    """Export the newest checkpoint; where the run removes it meanwhile, the one that is the newest then."""
    before: Path | None = None
    while True:
        found = checkpoints(directory)
        if not found:
            raise ConfigError(f"{short(directory)} has no checkpoint any more: wait for the run's next one.")
        step = found[max(found)]
        try:
            return _of_checkpoint(step, place, wanted)
        except Exception:  # whatever reading half of it raises
            if is_complete(step) or step == before:  # it is still the newest: nobody removes it
                raise
            shutil.rmtree(place, ignore_errors=True)
            before = step


def _of_checkpoint(step: Path, place: Path, wanted: Wanted) -> Source:
    config = _config_of(step, wanted)
    averages = any(AVERAGE in states for states in StoredStates(step).states.values())
    adapted = config.lora.rank is not None
    kind = MERGED if adapted and (wanted.merged or not _has_base(config)) else None
    try:
        export(step, place, Asked(kind=kind, base=wanted.base, averages=averages))
    except OutOfBudget as error:
        raise OutOfBudget(
            f"{str(error).rstrip('.')} (set TMPDIR: weights are written to a temporary folder, now in {gettempdir()})."
        ) from error
    base = Path(wanted.base or config.model.path) if adapted and kind is None else None
    return Source(
        place,
        f"{step}{', the averages of its weights (train.ema)' * averages}",
        base,
        config.model.part,
        config.precision,
        config.data.tokenizer if config.data.tokenizer == BYTES else None,
        step_of(step.resolve()),
    )


def _config_of(step: Path, wanted: Wanted) -> Config:
    """Return the configuration of a checkpoint's run, whose model can be built here. Raises ConfigError."""
    file = step.resolve().parent.parent / "config.yaml"
    by_hand = f"type zero3d ckpt export {short(step)} FOLDER --config PATH, and generate from that FOLDER"
    if not file.is_file():
        what = "" if (step / MANIFEST).is_file() else f", and it has no {MANIFEST}"
        raise ConfigError(
            f"{short(step)} lies in no run's folder ({file} is not there){what}, so its model is not known: {by_hand}."
        )
    config = load(file)
    if is_called(config.model):
        raise ConfigError(
            f"the model of {short(step)} comes from {short(config.model.path)}, code which is not run here: {by_hand} "
            "(PATH: the config.json of a Hugging Face model of that structure)."
        )
    path = wanted.base or config.model.path
    if not os.path.exists(os.path.expanduser(path)) and path not in PRESETS:
        raise _no_base(step, path)
    if wanted.base is not None:
        config = replace(config, model=replace(config.model, path=os.path.expanduser(wanted.base)))
    return config


def _no_base(what: Path, path: str) -> ConfigError:
    return ConfigError(
        f"{short(what)} needs the model that its training began with, {short(path)}, which is not there: type --base "
        "FOLDER, where that is now."
    )


# --- folders of weights ---------------------------------------------------------------------------


def _of_folder(path: Path, wanted: Wanted) -> Source:
    """Return an exported folder; in a run's output as that run made it. Raises ConfigError."""
    config = _config_around(path)
    bytes_ = config is not None and config.data.tokenizer == BYTES
    tokenizer = BYTES if bytes_ else None
    step = None if config is None else _last_step(Folder(path.resolve().parent))
    if not _is_adapter(path):
        check_weights(path, or_new=False)
        return Source(path, str(path), tokenizer=tokenizer, step=step)
    if wanted.merged:
        raise ConfigError(
            f"{short(path)} is an adapter, and ranks cut a model that has its adapters merged in: give a checkpoint of "
            "the run, which is merged, or the folder of a merged export (checkpoint.export=merged)."
        )
    base = wanted.base or _base_of(path, config)
    if base is None or not os.path.isdir(os.path.expanduser(base)):
        raise _no_base(path, str(base))
    part = WHOLE if config is None else config.model.part
    precision = None if config is None else config.precision
    folder = Path(os.path.expanduser(base))
    return Source(path, f"{path} on {folder}", folder, part, precision, tokenizer, step)


def _config_around(path: Path) -> Config | None:
    """Return the configuration of the run in whose output a folder was exported; None of any other folder."""
    folder = Folder(path.resolve().parent)
    places = [place.path for place in all_places(folder.root)]
    return load(folder.config) if path.resolve() in places and folder.of_a_run else None


def _base_of(path: Path, config: Config | None) -> str | None:
    """Return the folder that an adapter is for: as it says itself, or as its run says."""
    try:
        named: Any = read_object(path / ADAPTER_CONFIG).get(BASE)
    except Unreadable as error:
        raise ConfigError(f"{path / ADAPTER_CONFIG} {error}: correct it.") from error
    if config is not None and not (isinstance(named, str) and os.path.isdir(named)):
        return config.model.path
    return named if isinstance(named, str) else None
