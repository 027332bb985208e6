"""`zero3d ckpt export`: the model's structure from a run's configuration, its weights from a checkpoint."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.checkpoint.forms import ADAPTER, BASE
from zero3d.checkpoint.frozen_base import FolderSource
from zero3d.checkpoint.model_card import NO_CARD, Card
from zero3d.checkpoint.offline_export import export_stored
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.config import Config, load
from zero3d.config.sections import TEXT
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import ConfigError, short
from zero3d.models.kept import Kept, may_have_heads, of_file
from zero3d.models.load import FileWeights
from zero3d.models.open import Opened, open_bare
from zero3d.models.packing import inner_model
from zero3d.models.places import has_base, is_called
from zero3d.models.trained import as_trained, open_trained
from zero3d.reading import Unreadable
from zero3d.stores.cache import shown
from zero3d.tools.cli.preflight import check_transformers
from zero3d.tools.cli.worker import quiet_environment
from zero3d.train.exported_folder import copy_processor, save_tokenizer
from zero3d.train.folder import KEPT
from zero3d.train.run_card import record_of, run_card
from zero3d.train.setup.text_part import part_of

NONE = "none"
CONFIG, METRICS, YAML = "config.yaml", "metrics.jsonl", (".yaml", ".yml")
WHAT = "--config PATH (the model's config.json or folder, a preset, or a run's config.yaml)"
ALONE = f"--config {NONE} for the weights alone, under the model's own names"


class Asked(NamedTuple):
    """What the command line asks for.

    config    what --config says, if anything
    kind      what --as says: one of `checkpoint.forms.FORMS`
    base      the folder of frozen weights that the checkpoint left out, where it is not the configuration's
    averages  write the averages of the weights (train.ema)
    """

    config: str | None = None
    kind: str | None = None
    base: str | None = None
    averages: bool = False


NOTHING = Asked()


def export(step: Path, folder: Path, asked: Asked = NOTHING) -> dict[str, Any]:
    """Write a checkpoint's weights as a Hugging Face folder; return what was written as data.

    Raises ConfigError, CheckpointError, OutOfBudget, NonFiniteError.
    """
    quiet_environment()
    config = None if asked.config == NONE else find_config(step, asked.config)
    if config is not None and asked.base is not None:
        config = replace(config, model=replace(config.model, path=os.path.expanduser(asked.base)))
    stored = StoredStates(step, asked.averages)
    opened = None if config is None else _open(config, stored, asked.config)
    model, base = (None, None) if opened is None else (opened.module, opened.weights)
    kept, lacks = (None, None) if config is None else _kept(config, step, model)
    frozen = base if isinstance(base, FolderSource) else None
    card = _card(config, opened, step, stored, asked)
    written = export_stored(stored, folder, model, asked.kind, frozen, kept, card)
    if opened is not None:
        copy_processor(opened.folder, written, opened.module)
    note = "no config and no tokenizer were asked for" if config is None else _save_tokenizer(config, opened, written)
    if asked.kind != ADAPTER:
        note = "; ".join(filter(None, (note, lacks))) or None
    files = sorted(path for path in written.iterdir() if path.is_file())
    return {
        "checkpoint": step,
        "folder": written,
        "model": None if opened is None else type(opened.module).__name__,
        "files": [path.name for path in files],
        "bytes": sum(path.stat().st_size for path in files),
        "note": note,
    }


def find_config(step: Path, typed: str | None) -> Config:
    """Return the configuration that names the model: the one typed, or that of the run's folder. Raises ConfigError."""
    if typed is not None:
        if typed.endswith(YAML):
            return load(Path(typed))
        config = load({})
        return replace(config, model=replace(config.model, path=os.path.expanduser(typed)))
    file = step.resolve().parent.parent / CONFIG
    if not file.is_file():
        raise ConfigError(
            f"{short(shown(step))} lies in no run's folder ({file} is not there), so its model is not known: type "
            f"{WHAT}, or {ALONE}."
        )
    return load(file)


def _card(config: Config | None, opened: Opened | None, step: Path, stored: StoredStates, asked: Asked) -> Card:
    """Return what a run's file and its records say for the model card; nothing where a model alone was typed."""
    if config is None or not (asked.config is None or asked.config.endswith(YAML)):
        return NO_CARD
    loop = stored.manifest.value("loop") or {}
    run = loop if "position" in loop else {}  # else a loop of somebody's own
    record = record_of(step.resolve().parent.parent / METRICS, run["step"]) if "step" in run else {}
    folder = None if opened is None else opened.folder
    card = run_card(config, folder, run.get("tokens"), record, asked.averages)
    return card._replace(losses={}) if asked.kind == BASE else card


def _open(config: Config, stored: StoredStates, typed: str | None) -> Opened:
    """Build the structure of a configuration's model; with the weights of its folder, if these are needed.

    Raises ConfigError.
    """
    step = stored.folder
    check_transformers(config.model)
    if is_called(config.model):
        raise ConfigError(
            f"the model of {short(step)} comes from {short(config.model.path)}, code which ckpt does not run: type "
            f"{WHAT} of a Hugging Face model, or {ALONE}."
        )
    config = replace(config, model=replace(config.model, part=part_of(config, stored.parameters)))
    try:
        if stored.manifest.left_out:
            return open_trained(config)
        return as_trained(open_bare(config.model), config)
    except ConfigError as error:
        if typed is not None:
            raise
        raise ConfigError(f"{str(error).rstrip('.')}. For another place of it type {WHAT}.") from error


def _kept(config: Config, step: Path, model: Any) -> tuple[Kept | None, str | None]:
    """Return what the model's folder has that a full export carries on, and a note where that is not known.

    It is the run's copy, or the folder's own.
    """
    copy = step.resolve().parent.parent / KEPT
    try:
        if copy.is_file():
            return of_file(copy), None
        if config.model.init == "random":
            return None, None
        if has_base(config.model):
            bare = open_bare(config.model).module
            return FileWeights(Path(config.model.path), bare, config.model.part == TEXT).kept, None
    except (OSError, Unreadable, ConfigError):
        pass
    if not may_have_heads(inner_model(model)):
        return None, None
    return None, (
        f"heads for further tokens, which a folder of {type(inner_model(model)).__name__} may have, are not in it: "
        f"neither {copy} nor a folder of weights is there (--config FOLDER)"
    )


def _save_tokenizer(config: Config, opened: Opened | None, written: Path) -> str | None:
    """Save the tokenizer that the run's own export would have; return a note where there is none, or another."""
    folder = None if opened is None else opened.folder
    try:
        tokenizer = load_tokenizer(config.data.tokenizer, None if folder is None else str(folder))
    except ConfigError as error:
        return f"the export has no tokenizer: {error}"
    return save_tokenizer(tokenizer, written)
