"""What a run refuses before anything large is allocated, and would fail at only after hours. All raise ConfigError."""

from __future__ import annotations

import inspect

from torch import nn

from zero3d.checkpoint.published import has_adapters
from zero3d.config import Config
from zero3d.errors import ConfigError
from zero3d.models.open import Opened


def check_length_over_tp(length: int, slices: int) -> None:
    """Refuse sequences that sequence parallelism cannot cut into equal slices."""
    if length % slices:
        fits = [str(n) for n in (length - length % slices, length + -length % slices) if n]
        raise ConfigError(
            f"mesh.sequence_parallel cuts sequences over mesh.tp={slices}, and data.length={length} / {slices} is not "
            f"whole: type data.length={' or '.join(fits)}, or mesh.sequence_parallel=false."
        )


def check_forward(model: nn.Module) -> None:
    """Refuse a model whose forward does not take token ids by name."""
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise ConfigError(
            f"{type(model).__name__}.forward takes ({', '.join(parameters)}), and a batch is passed by name: call its "
            "first argument input_ids, and if it wants them add position_ids and labels."
        )


def check_export(config: Config, opened: Opened) -> None:
    """Refuse an export that this model has not, and one that could not be loaded again to verify it. ConfigError."""
    kind, model = config.checkpoint.export, opened.module
    adapted = has_adapters(model)
    if isinstance(kind, str) and not adapted:
        raise ConfigError(
            f"checkpoint.export={kind} is of a model with adapters, and {type(model).__name__} has none: type "
            "lora.rank=16, or checkpoint.export=true."
        )
    if not (kind and config.checkpoint.verify):
        return
    if adapted and kind in (True, "adapter") and (opened.folder is None or config.model.init == "random"):
        raise ConfigError(
            "checkpoint.verify loads an adapter on the folder of its base, and model.path is none with weights: type "
            "checkpoint.export=merged, or checkpoint.verify=false."
        )
    check_verify(model)


def check_verify(model: nn.Module) -> None:
    """Refuse to verify an export that transformers could not load by its config.json after the training."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = type(getattr(model, "config", None))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(
            f"checkpoint.verify loads the export with AutoModelForCausalLM, which does not know {type(model).__name__} "
            "by its config: type checkpoint.verify=false."
        )
