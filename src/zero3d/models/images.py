"""Blank images: what a vision-language model is given where a micro-batch has no image of its own.

    image_inputs   what a model's forward takes for one image, in the form in which its processor makes it
    image_features what takes the place of that image's tokens in the language model
    BlankImages    at stage 3 all ranks gather the same units, so the vision tower runs on every rank: where a
                   micro-batch has no image on a blank one, whose features count zero times

One blank image costs a micro-batch of text one image's forward and backward through the tower.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.bases import base_of, model_of
from zero3d.models.placeholders import Placeholder
from zero3d.nested import tensors_in

SIDE = 448  # pixels of an image for towers that take any size
INPUTS = ("pixel_", "image_", "video_", "num_patches", "num_frames", "second_per_grid")  # names of towers' inputs
GRIDS = ("image_grid_thw", "spatial_shapes", "target_sizes", "image_grid_hw")  # patches of an image, by dimension
UNFLATTENED = ("kimi_k25", "paddleocr_vl")  # types whose processors leave a patch as it is, [3, height, width]
RECORDS = ("last_hidden_state", "hidden_states", "attentions")  # of an encoder, in its output


def is_for_towers(name: str) -> bool:
    """Return whether a forward's argument of this name is of images or videos, and not of tokens."""
    return name in GRIDS or name.startswith(INPUTS)


def image_inputs(model: nn.Module, smallest: bool = False) -> dict[str, Tensor]:
    """Return what `forward` takes for one image [1, ...], on the CPU: pixels of ones, for some models omit zeros.

    smallest  of the sizes that a model takes; else the largest of a list, or SIDE x SIDE where there is no list
    Raises ConfigError where a model's config does not tell the form of its images.
    """
    try:
        return _image_inputs(base_of(model_of(model)), smallest)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the config of {type(model_of(model)).__name__} does not describe its images "
            f"({type(error).__name__}: {_line(error)})."
        ) from error


def _image_inputs(base: Any, smallest: bool) -> dict[str, Tensor]:
    config, takes = base.config, inspect.signature(base.get_image_features).parameters
    vision = getattr(config, "vision_config", None) or config
    if "image_position_ids" in takes:
        return _patches_with_places(vision, smallest)
    channels = _first(vision, ("in_channels", "num_channels"), 3)
    if grid := next((name for name in GRIDS if name in takes), None):
        return _patches_with_grid(config, grid, smallest)
    if config.model_type == "fuyu":
        return {
            "pixel_values": torch.ones(
                1, 1 if smallest else (SIDE // config.patch_size) ** 2, channels * config.patch_size**2
            )
        }
    if hasattr(config, "vq_config"):
        side = 2 ** len(config.vq_config.channel_multiplier) * 2 if smallest else SIDE
        sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in takes else {}
        return {"pixel_values": torch.ones(1, channels, side, side), **sizes}
    size = vision.image_size
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.ones(1, channels, height, width)
    if "pixel_attention_mask" in takes:
        mask = takes["pixel_attention_mask"]
        asked = mask.default is inspect.Parameter.empty
        return {"pixel_values": pixels[None], **({"pixel_attention_mask": pixels[:, :1].long()} if asked else {})}
    if (pinpoints := getattr(config, "image_grid_pinpoints", None)) is not None:
        chosen = (min if smallest else max)(pinpoints, key=prod)
        tiles = 1 + (chosen[0] // height) * (chosen[1] // width)
        return {"pixel_values": pixels.expand(1, tiles, -1, -1, -1), "image_sizes": torch.tensor([chosen])}
    if "high_res_pixel_values" in takes:
        side = config.high_res_vision_config.image_size
        return {"pixel_values": pixels, "high_res_pixel_values": torch.ones(1, channels, side, side)}
    if "image_sizes" in takes and takes["image_sizes"].default is inspect.Parameter.empty:
        return {"pixel_values": pixels, "image_sizes": torch.tensor([[height, width]])}
    return {"pixel_values": pixels}


def _patches_with_places(vision: Any, smallest: bool) -> dict[str, Tensor]:
    """Return an image of Gemma 4: patches beside their places."""
    pooled = vision.pooling_kernel_size
    side = 2 * pooled if smallest else max(SIDE // vision.patch_size // pooled, 2) * pooled
    places = torch.cartesian_prod(torch.arange(side), torch.arange(side)).flip(-1)
    return {"pixel_values": torch.ones(1, side**2, 3 * vision.patch_size**2), "image_position_ids": places[None]}


def _patches_with_grid(config: Any, grid: str, smallest: bool) -> dict[str, Tensor]:
    """Return an image as patches [patches, values of one] beside its grid: of time, height and width, or of two."""
    vision = config.vision_config
    patch, channels = vision.patch_size, _first(vision, ("in_channels", "num_channels"), 3)
    merge = _first(vision, ("spatial_merge_size", "merge_size", "merge_kernel_size", "window_kernel_size"), 1)
    merge = merge if isinstance(merge, int) else merge[0]
    side = 2 * merge if smallest else max(SIDE // patch // merge, 2) * merge
    frames = _first(vision, ("temporal_patch_size", "patch_temporal"), 1)
    shape = (channels, patch, patch) if config.model_type in UNFLATTENED else (channels * frames * patch**2,)
    values = torch.ones(side * side, *shape)
    size = torch.tensor([[side, side]])
    if grid == "image_grid_thw":
        merges = {"image_merge_sizes": torch.tensor([merge])} if config.model_type == "video_llama_3" else {}
        return {"pixel_values": values, grid: torch.tensor([[1, side, side]]), **merges}
    if grid == "spatial_shapes":
        return {"pixel_values": values[None], grid: size, "pixel_attention_mask": torch.ones(1, side * side).long()}
    if grid == "target_sizes":  # patches of all images beside each other
        return {"pixel_values": torch.ones(1, channels, patch, patch * side * side), grid: size.int()}
    return {"pixel_values": values, grid: size}


def _first(config: Any, names: Sequence[str], otherwise: Any) -> Any:
    """Return the first of these values that a config has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), otherwise)


def patches(model: nn.Module) -> int:
    """Return how many patches one image has, as large as `image_inputs` makes it; 0 where a config does not tell."""
    try:
        vision = base_of(model_of(model)).config.vision_config
        side = vision.patch_size
        height, width = (side, side) if isinstance(side, int) else side
        pixels = image_inputs(model)["pixel_values"]
        channels: int = _first(vision, ("num_channels", "in_channels"), 3)
        frames: int = _first(vision, ("temporal_patch_size",), 1)
        return int(pixels.numel() // (height * width * channels * frames))
    except (AttributeError, ConfigError, TypeError, ValueError):
        return 0


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def image_features(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what takes the place of image tokens in the language model, [..., tokens, hidden] each."""
    return list(tensors_in(tower_output(model, inputs).pooler_output))


def tower_output(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Return what a model's tower makes of images; `pooler_output` takes the place of image tokens.

    Llama 4 has its projector outside of what makes features: it comes after.
    """
    base = base_of(model_of(model))
    output = base.get_image_features(**inputs, return_dict=True)
    if output.pooler_output is None:
        output.pooler_output = base.multi_modal_projector(output.last_hidden_state.flatten(0, -2))
    return output


def _read_features(output: Mapping[str, Any]) -> list[Tensor]:
    """Return all that a language model reads of a tower's output: features at its entry, and at blocks (DeepStack).

    Hidden states and attentions are the encoder's record of itself. They reach layers that features do not, such as
    the last one of LLaVA's tower, which has no gradient where there are images either.
    """
    return list(tensors_in({name: value for name, value in output.items() if not name.endswith(RECORDS)}))


def no_blank_image(model: nn.Module, error: Exception) -> ConfigError:
    """Return what is said where a model's tower does not run on a blank image."""
    return ConfigError(
        f"{type(model_of(model)).__name__} cannot process a blank image ({type(error).__name__}: {_line(error)}), "
        "which stage 3 needs where a micro-batch has none: pass zero.stage=2, or a config without vision_config."
    )


class BlankImages:
    """Hooks by which a forward without images runs the model's vision tower on a blank one.

    It runs where images do: behind all embeddings (Gemma 4 has some by layer), before the language model. The features
    are multiplied by zero and added to the input embeddings: the loss is what it was, and the tower's gradients are
    zeros. Forwards with a cache, which `generate` makes, are left as they are.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self._due = model, False
        base: Any = base_of(model_of(model))
        if isinstance(base.get_input_embeddings(), Placeholder):
            return  # the tower is with the first chunk of a pipeline
        self._inputs = image_inputs(model, smallest=True)
        base.register_forward_pre_hook(self._begin, with_kwargs=True)
        base.get_decoder().register_forward_pre_hook(self._add, prepend=True, with_kwargs=True)

    def _begin(self, base: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        given = {name for name, value in kwargs.items() if value is not None}
        self._due = not given & {"pixel_values", "pixel_values_videos", "past_key_values", "inputs_embeds"}

    def _add(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self._due:
            return None
        self._due = False
        try:
            embedded: Tensor = kwargs["inputs_embeds"]
            inputs = {
                name: t.to(embedded if t.is_floating_point() else embedded.device) for name, t in self._inputs.items()
            }
            features = _read_features(tower_output(self._model, inputs))
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise no_blank_image(self._model, error) from error
        blank = torch.stack([(t * 0).sum() for t in features]).sum().to(embedded.dtype)
        return args, kwargs | {"inputs_embeds": embedded + blank}
