"""What Hugging Face models are made of: a head around a base model; of a vision-language one, a language model in it.

LlamaForCausalLM                   model (base)      lm_head
LlavaForConditionalGeneration      model (base)      lm_head
                                     vision_tower, multi_modal_projector, language_model
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from zero3d.models.packing import inner_model


def base_of(model: Any) -> Any:
    """Return the Hugging Face model below the head, which takes inputs_embeds; None for any other module."""
    inner = inner_model(model)
    return inner.base_model if hasattr(inner, "base_model_prefix") and hasattr(inner, "config") else None


def decoder_of(model: Any) -> Any:
    """Return the module that takes inputs_embeds and positions: of a vision-language model the one for text.

    None for a module that is not Hugging Face's.
    """
    base = base_of(model)
    found = base.get_decoder() if hasattr(base, "get_decoder") else None
    return base if found is None else found


def model_of(module: nn.Module) -> nn.Module:
    """Return the model that a pipeline's chunk was cut from, with its class and methods; any other module itself."""
    model: nn.Module = vars(module).get("_model", module)
    return model


def image_model(model: nn.Module) -> Any:
    """Return the module that makes features of images: a base model, or the encoder in one (T5Gemma 2); else None."""
    base = base_of(model_of(model))
    found = (module for module in (base, getattr(base, "encoder", None)) if hasattr(module, "get_image_features"))
    return next(found, None)


def sees_images(model: nn.Module) -> bool:
    """Say whether a model is a Hugging Face vision-language model with a tower, which its config may leave out.

    Fuyu's, Chameleon's and Emu3's have no vision_config: they always have what reads images.
    """
    config = getattr(image_model(model), "config", None)
    return getattr(config, "vision_config", config) is not None


def has_tower(model: nn.Module) -> bool:
    """Return whether a model takes images or sounds beside text, which its forward names."""
    takes = inspect.signature(inner_model(model_of(model)).forward).parameters
    return any(name.startswith(("pixel_values", "input_features", "image_")) for name in takes)


def language_model(model: nn.Module) -> str:
    """Return the name of a vision-language model's module for text, "" for any other model."""
    if not sees_images(model):
        return ""
    decoder: nn.Module = base_of(model_of(model)).get_decoder()
    names: dict[nn.Module, str] = {module: name for name, module in model.named_modules()}
    return names[decoder]


def config_number(model: nn.Module, name: str) -> int | None:
    """Return a number of the text model's configuration, or None where the model has none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return getattr(text, name, None)


def layer_numbers(config: Any, name: str) -> list[int]:
    """Return a number of a text model's configuration, or each layer's where layers differ (Gemma 4); else none."""
    layers = getattr(config, "per_layer_config", None)
    try:
        found = [getattr(config, name, None)]
    except Exception:  # transformers refuses to say what layers have differently
        if not layers:
            raise
        found = [getattr(layers[index], name, None) for index in range(config.num_hidden_layers)]
    return [number for number in found if isinstance(number, int)]
