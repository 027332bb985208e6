"""The exported folder of a run: written with its tokenizer, put in place, loaded again and evaluated."""

from __future__ import annotations

import gc
import shutil
from pathlib import Path

import torch

from zero3d.config import Config, resolve_batch
from zero3d.data.batches import validation_batches
from zero3d.data.dataset import DataSet
from zero3d.data.tokenizers import Tokenizer, load_tokenizer
from zero3d.distributed.agreement import agree
from zero3d.engine.engine import Engine
from zero3d.errors import ConfigError
from zero3d.models.foreign_code import no_foreign_code
from zero3d.models.packing import forward_options
from zero3d.train.folder import Folder
from zero3d.train.progress import Progress


def model_tokenizer(folder: Path | None) -> Tokenizer | None:
    """Return the tokenizer of the model's folder, which data of token ids did not need; None where it has none."""
    try:
        return None if folder is None else load_tokenizer(None, str(folder))
    except ConfigError:
        return None


def export_model(engine: Engine, folder: Folder, tokenizer: Tokenizer | None, progress: Progress) -> None:
    """Write the Hugging Face folder beside the one of an earlier session, then in its place."""
    first, everyone = engine.world.rank == 0, engine.world.patient
    agree(everyone, lambda: shutil.rmtree(folder.fresh_export, ignore_errors=True) if first else None)
    engine.export(folder.fresh_export)

    def complete() -> None:
        if note := save_tokenizer(tokenizer, folder.fresh_export):
            progress.say(note)
        folder.publish()

    agree(everyone, complete if first else lambda: None)


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
    return config.checkpoint.export and config.checkpoint.verify and bool(data.validation)


def verify(config: Config, engine: Engine, export: Path, data: DataSet) -> float:
    """Return the held-out loss of the exported model as anybody would load it, on rank 0 alone."""
    from transformers import AutoModelForCausalLM

    gc.collect()
    device, ranks = engine.mesh.device, engine.dp.size
    with no_foreign_code():
        model = AutoModelForCausalLM.from_pretrained(
            export, dtype="auto", local_files_only=True, trust_remote_code=False
        )
    model = model.to(device).eval()
    assert data.validation is not None
    total, targets = 0.0, 0
    rows = resolve_batch(config.train, ranks).micro_batch * (1 if config.zero.exact else ranks)
    for batch in validation_batches(data.validation, rows, limit=config.evaluate.batches):
        batch = {name: tensor.to(device) for name, tensor in batch.items()}
        count = int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            loss = float(model(**batch, **forward_options(model)).loss)
        total, targets = total + (loss * count if count else 0.0), targets + count
    return total / targets
