"""Blank images: what a vision-language model is given where a micro-batch has no image of its own.

    image_inputs   what a model's forward takes for one image, in the form in which its processor makes it
    image_features what takes the place of that image's tokens in the language model
    BlankImages    at stage 3 all ranks gather the same units, so the vision tower runs on every rank: where a
                   micro-batch has no image on a blank one, whose features count zero times

One blank image costs a micro-batch of text one image's forward and backward through the tower.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, model_of
from zero3d.models.placeholders import Placeholder
from zero3d.nested import tensors_in

SIDE = 448  # pixels of an image for towers that take any size
INPUTS = ("pixel_values", "pixel_attention_mask", "image_sizes", "image_grid_thw")  # what towers read
TOLD_APART = ("token_type_ids", "mm_token_type_ids")  # what some models take to tell images' tokens from others


def image_inputs(model: nn.Module, smallest: bool = False) -> dict[str, Tensor]:
    """Return what `forward` takes for one image [1, ...], on the CPU: pixels of ones, for some models omit zeros.

    smallest  of the sizes that a model takes; else the largest of a list, or SIDE x SIDE where there is no list
    """
    base = base_of(model_of(model))
    config, takes = base.config, inspect.signature(base.get_image_features).parameters
    vision = config.vision_config
    if "image_grid_thw" in takes:
        patch, merge = vision.patch_size, vision.spatial_merge_size
        side = 2 * merge if smallest else max(SIDE // patch // merge, 2) * merge
        channels = getattr(vision, "in_channels", 3)
        values = torch.ones(side * side, channels * vision.temporal_patch_size * patch**2)
        return {"pixel_values": values, "image_grid_thw": torch.tensor([[1, side, side]])}
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.ones(1, getattr(vision, "num_channels", 3), height, width)
    if "pixel_attention_mask" in takes:
        return {"pixel_values": pixels[None]}
    if (pinpoints := getattr(config, "image_grid_pinpoints", None)) is not None:
        chosen = (min if smallest else max)(pinpoints, key=prod)
        tiles = 1 + (chosen[0] // height) * (chosen[1] // width)
        return {"pixel_values": pixels.expand(1, tiles, -1, -1, -1), "image_sizes": torch.tensor([chosen])}
    return {"pixel_values": pixels}


def image_features(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what takes the place of image tokens in the language model, [..., tokens, hidden] each."""
    base = base_of(model_of(model))
    return list(tensors_in(base.get_image_features(**inputs, return_dict=True).pooler_output))


class BlankImages:
    """Hooks by which a forward without images runs the model's vision tower on a blank one.

    The features are multiplied by zero and added to the input embeddings: the loss is what it was, and the tower's
    gradients are zeros. Forwards with a cache, which `generate` makes, are left as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._due = model, False
        base: Any = base_of(model_of(model))
        embedding = base.get_input_embeddings()
        if isinstance(embedding, Placeholder):
            return  # the tower is with the first chunk of a pipeline
        self._inputs = image_inputs(model, smallest=True)
        base.register_forward_pre_hook(self._begin, with_kwargs=True)
        embedding.register_forward_hook(self._add)

    def _begin(self, base: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        given = {name for name, value in kwargs.items() if value is not None}
        self._due = not given & {"pixel_values", "pixel_values_videos", "past_key_values", "inputs_embeds"}

    def _add(self, embedding: nn.Module, args: Any, embedded: Tensor) -> Tensor | None:
        if not self._due:
            return None
        self._due = False
        inputs = {
            name: t.to(embedded if t.is_floating_point() else embedded.device) for name, t in self._inputs.items()
        }
        try:
            features = image_features(self._model, inputs)
        except (TypeError, ValueError, AttributeError) as error:
            line = (str(error).strip().splitlines() or [""])[0]
            raise ConfigError(
                f"{type(model_of(self._model)).__name__} cannot be given a blank image ({type(error).__name__}: "
                f"{line}), which stage 3 needs where a micro-batch has none: pass zero.stage=2, or images in all."
            ) from error
        return embedded + torch.stack([(t * 0).sum() for t in features]).sum().to(embedded.dtype)
