"""The exported folders of a run: written with tokenizer and processor, put in place, loaded again and evaluated."""

from __future__ import annotations

import gc
import math
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from zero3d.checkpoint.adapter_folder import TRAINED
from zero3d.checkpoint.forms import ADAPTER
from zero3d.checkpoint.model_card import Card
from zero3d.checkpoint.writing import told, write_kept
from zero3d.config import Config, resolve_batch
from zero3d.config.sections import WHOLE
from zero3d.data.batches import validation_batches
from zero3d.data.dataset import DataSet
from zero3d.data.tokenizers import Tokenizer, load_tokenizer
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError, OutOfBudget
from zero3d.models.bases import has_tower
from zero3d.models.foreign_code import no_foreign_code
from zero3d.models.kept import Kept
from zero3d.models.open import read_config
from zero3d.models.packing import given_in_training, inner_model, is_varlen, position_rows, tell
from zero3d.models.parts import IN_TEXT, choose
from zero3d.models.targets import Targets
from zero3d.train.export_places import ExportPlace

TEMPLATES = ("chat_template*",)
PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", *TEMPLATES)


def model_tokenizer(folder: Path | None) -> Tokenizer | None:
    """Return the tokenizer of the model's folder, which data of token ids did not need; None where it has none."""
    try:
        return None if folder is None else load_tokenizer(None, str(folder))
    except ConfigError:
        return None


def export_model(
    engine: Engine, place: ExportPlace, tokenizer: Tokenizer | None, base: Path | None, card: Card
) -> str | None:
    """Write an export beside the one of an earlier session, then in its place; return a note of what it lacks.

    base  the model's folder, whose processor is copied
    card  what the run knows for the model card
    """
    first, everyone = engine.world.rank == 0, engine.world.patient
    agree(everyone, lambda: shutil.rmtree(place.fresh, ignore_errors=True) if first else None)
    engine.checkpoints.export(place.fresh, place.kind, card=card)

    def complete() -> str | None:
        note = save_tokenizer(tokenizer, place.fresh)
        copy_processor(base, place.fresh, engine.module)
        place.publish()
        return note

    return agree(everyone, complete if first else lambda: None)


def keep_heads(kept: Kept | None, places: Sequence[ExportPlace], file: Path, everyone: Comm) -> None:
    """Copy what exports carry on from the model's folder into the run's: the model's may be gone when the run ends.

    Nothing is copied where no export has it, nor again where a run that goes on has it. All ranks call it; rank 0,
    which writes exports, copies, and reads from there from now on. Raises CheckpointError, OutOfBudget.
    """
    if kept is None or all(place.kind == ADAPTER for place in places):
        return
    agree(everyone, partial(_keep, kept, file) if everyone.rank == 0 else lambda: None)


def _keep(kept: Kept, file: Path) -> None:
    if not kept.is_in(file):
        free = shutil.disk_usage(file.parent).free
        if free < kept.nbytes:
            raise OutOfBudget(
                f"exports carry on {len(kept.tensors)} tensors of {kept.folder} that are not trained, and the run "
                f"keeps a copy of these, {kept.nbytes:,} bytes: the disk of {file.parent} has {free:,} free. Make room "
                f"for {kept.nbytes - free:,} more, choose another output, or type checkpoint.export=false."
            )
        fresh = file.with_name(f".{file.name}.tmp")
        write_kept(fresh, kept, list(kept.tensors))
        fresh.replace(file)
    kept.moved(file)


def copy_processor(base: Path | None, export: Path, model: nn.Module) -> None:
    """Copy the chat template of the model's folder beside its weights, and the processor where it takes images.

    Raises CheckpointError.
    """
    patterns = PROCESSOR if has_tower(model) else TEMPLATES
    found = [path for pattern in patterns for path in sorted(base.glob(pattern))] if base is not None else []
    for path in found:
        target = export / path.name
        if path.is_file() and not target.exists():
            with told(target, path.stat().st_size):
                shutil.copyfile(path, target)


def save_tokenizer(tokenizer: Tokenizer | None, export: Path) -> str | None:
    """Save the tokenizer beside the weights; return a note where there is none."""
    if tokenizer is None:
        return "the export has no tokenizer: the data are token ids, and the model's folder has none"
    try:
        return tokenizer.save(export)
    except ImportError as error:
        return f"the export has no tokenizer: {error.name} is missing: pip install 'zero3d[hf]'"


def verifies(config: Config, data: DataSet) -> bool:
    """Say whether the export is loaded again and evaluated."""
    return bool(config.checkpoint.export) and config.checkpoint.verify and bool(data.validation)


class Reloaded(NamedTuple):
    """The held-out loss of an export that was loaded again, and the class that has loaded it."""

    loss: float = math.nan
    by: str = ""


def load_export(place: ExportPlace, base: Path | None, dtype: torch.dtype, part: str = WHOLE) -> Any:
    """Load an exported folder as anybody would: by transformers, an adapter by PEFT on the model of its base.

    dtype  of the run, in which the base is loaded
    part   of the base that the adapter is for, as model.part
    """
    is_adapter = place.kind == ADAPTER
    source = place.path if not is_adapter else base
    assert source is not None
    config = read_config(source)
    choice = choose(config, part if is_adapter else WHOLE)
    options = {} if choice.config is config else {"config": choice.config, "key_mapping": dict(IN_TEXT)}
    with no_foreign_code():
        model = choice.auto.from_pretrained(
            source, dtype=dtype if is_adapter else "auto", local_files_only=True, trust_remote_code=False, **options
        )
    return with_adapter(model, place.path) if is_adapter else model


def with_adapter(model: Any, folder: Path) -> Any:
    """Return a base model with `folder`'s contents: PEFT's adapter, and trained weights without a place in PEFT."""
    from peft import PeftModel
    from safetensors.torch import load_file

    if (folder / TRAINED).is_file():
        model.load_state_dict(load_file(folder / TRAINED), strict=False)
    with no_foreign_code():
        return PeftModel.from_pretrained(model, folder, autocast_adapter_dtype=False, trust_remote_code=False)


def verify(config: Config, engine: Engine, place: ExportPlace, base: Path | None, data: DataSet) -> Reloaded:
    """Evaluate the exported model as anybody would load it, on rank 0 alone."""
    gc.collect()
    device, ranks = engine.mesh.device, engine.mesh.degrees.rows
    model = load_export(place, base, engine.precision.dtype, config.model.part).to(device).eval()
    of_model = Targets.of(model)
    tell(model)
    by = "PeftModel" if place.kind == ADAPTER else choose(model.config).auto.__name__
    assert data.validation is not None
    total, targets, given = 0.0, 0, given_in_training(inner_model(model), is_varlen(model), position_rows(model))
    rows = resolve_batch(config.train, ranks).micro_batch * (1 if config.zero.exact else ranks)
    for batch in validation_batches(data.validation, rows, limit=config.evaluate.batches):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        count = int(of_model.count(batch) or 0)
        with torch.no_grad():
            loss = float(model(**given(batch)).loss)
        total, targets = total + (loss * count if count else 0.0), targets + count
    return Reloaded(total / targets, by)
