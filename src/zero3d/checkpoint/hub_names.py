"""A model as an export sees it, and as it is published: names of tensors, configs.

Names are those of the model's published checkpoints, by Hugging Face's own tables (fused experts, older names).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero3d.models.kept import Kept
from zero3d.models.quantised import as_matrices
from zero3d.zero.initial_weights import Source


class Exported(NamedTuple):
    """A model as an export sees it.

    model      with its class, config and methods, in PEFT's wrapper perhaps; None writes tensors alone
    modules    what this rank has of it, with the names of the whole
    names      of this rank's parameters
    trainable  names in the whole model
    shapes     of all parameters of the whole model, by name
    base       the folder that frozen weights came from, where one is known
    copies     a tied parameter's copy on a later pipeline stage -> the parameter
    matrices   gives, by name, those of the base that are in groups of 8 or 4 bits; None where they are not known
    kept       tensors of the model's folder that a full export carries on
    """

    model: nn.Module | None
    modules: Sequence[nn.Module]
    names: Sequence[str]
    trainable: frozenset[str]
    shapes: Mapping[str, tuple[int, ...]]
    base: Path | None
    copies: Mapping[str, str] = MappingProxyType({})
    matrices: Source | None = None
    kept: Kept | None = None

    @property
    def other_names(self) -> dict[str, list[str]]:
        """The other names of each tied parameter of this rank, by each of its names."""
        by_parameter: dict[Any, dict[str, None]] = {}
        for module in self.modules:
            for name, p in module.named_parameters(remove_duplicate=False):
                by_parameter.setdefault(p, {})[name] = None
        found: dict[str, list[str]] = {}
        for names in by_parameter.values():
            of_stages = [copy for copy, owner in self.copies.items() if owner in names]
            everywhere = list(dict.fromkeys((*names, *of_stages)))
            if len(everywhere) > 1:
                found |= {name: [each for each in everywhere if each != name] for name in everywhere}
        return found

    def in_full(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors with the base's matrices in the place of their groups."""
        return as_matrices(self.modules, tensors, self.matrices)


def has_adapters(model: nn.Module | None) -> bool:
    """Say whether a model has adapters of PEFT."""
    return bool(getattr(model, "peft_config", None))


def on_host(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors in the host's memory."""
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}


def as_published(model: nn.Module | None, host: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors under the names of the model's published checkpoints."""
    if not hasattr(model, "save_pretrained"):
        return host
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, Tensor] = revert_weight_conversion(model, host)
    return {name: tensor.contiguous() for name, tensor in converted.items()}


def named_as_saved(model: nn.Module | None, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return host copies under the names of the model's published checkpoints."""
    return as_published(model, on_host(tensors))


def save_config(model: nn.Module | None, folder: Path, dtype: torch.dtype, untied: bool = False) -> None:
    """Write the configs of a Hugging Face model, with the dtype of its weights; nothing for any other.

    untied  the head has other weights than the embedding, with which the model was built as one
    """
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "save_pretrained"):
        return
    config = type(config).from_dict(config.to_dict())
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    if untied:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    _loadable(model, config).save_pretrained(folder)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        _save_generation(generation, folder)


def _loadable(model: Any, config: Any) -> Any:
    """Return the config by which transformers' auto classes find a model's class.

    They know Mllama's language model by the config of text and images alone, of which its own is a part.
    """
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return config
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        around = CONFIG_MAPPING[kind] if name == type(model).__name__ else None
        if around is not None and around.sub_configs.get("text_config") is type(config):
            made = around(text_config=config.to_dict())
            made.architectures, made.dtype = config.architectures, config.dtype
            return made
    return config


def _save_generation(generation: Any, folder: Path) -> None:
    """Save a generation config as the model has it: transformers refuses to save settings that it loads."""
    try:
        generation.save_pretrained(folder)
    except ValueError:
        generation.to_json_file(folder / "generation_config.json")
