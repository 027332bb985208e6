"""Blank images: what a vision-language model is given where a micro-batch has no image of its own.

    image_inputs   what a model's forward takes for one image, in the form in which its processor makes it: made by that
                   processor where there is one (give_blank_image), else of the config
    image_features what takes the place of that image's tokens in the language model
    BlankImages    at stage 3 all ranks gather the same units, so the vision tower runs as often on every rank: where
                   a micro-batch has fewer images or videos on blank ones, whose features count zero times

One blank image costs a micro-batch of text one image's forward and backward through the tower. Where no rank has an
image, the tower does not run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.errors import ConfigError
from zero3d.models.bases import image_model, model_of
from zero3d.models.packing import inner_model
from zero3d.models.placeholders import Placeholder
from zero3d.nested import tensors_in

UNSIZED = (768, 64)  # pixels of an image for towers of any size whose config has no patches: usual, smallest
SIDE = 448  # pixels of an image for towers that take any size
MEGAPIXEL = 1024  # pixels of each side of an image of a megapixel
Sides = tuple[int, int] | None  # tokens of an image, in height and width
SMALL, WIDE = (2, 2), (2, 3)
INPUTS = (
    "pixel_",
    "high_res_pixel_",
    "image_",
    "batch_num_images",
    "video_",
    "num_patches",
    "num_local_patches",
    "num_frames",
    "second_per_grid",
)  # names of towers' inputs
GRIDS = ("image_grid_thw", "spatial_shapes", "target_sizes", "image_grid_hw")  # patches of an image, by dimension
UNFLATTENED = ("kimi_k25", "paddleocr_vl")  # types whose processors leave a patch as it is, [3, height, width]
SEEN = ("pixel_values", "pixel_values_videos")  # of these, too, each by a call of its own
CALLS = "tower_calls"  # entry of a micro-batch: how often the tower runs in its forward, on every rank
TWO_RESOLUTIONS = ("deepseek_ocr2", "unlimited_ocr")  # types whose towers are two, of which SAM is the first
ENCODED = "mm_encoder_outputs"  # what a forward takes of images that transformers' generate has encoded
ENCODES = "_maybe_prepare_encoder_kwargs_for_generation"  # the method in which it does so, its arguments checked
AT_BLOCKS = "deepstack_features"  # of an output: tensors, or in Granite 4 pairs of a block and what is added there
RECORDS = ("last_hidden_state", "hidden_states", "attentions")  # of an encoder, in its output
GIVEN = "zero3d_blank_image"  # the attribute of a base model with what its processor made


class _Shared(dict[str, Tensor]):
    """Tensors that copies of a model share. taken: the model has been tried with them."""

    taken = False

    def __deepcopy__(self, memo: Any) -> _Shared:
        return self


def give_blank_image(model: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Keep what a model's own processor makes of a blank image [1, ...]: `image_inputs` returns it for the smallest."""
    base = image_model(model)
    takes = inspect.signature(base.get_image_features).parameters
    vars(base)[GIVEN] = _Shared({name: tensor for name, tensor in inputs.items() if name in takes})


def note_taken(model: nn.Module) -> None:
    """Note that a model's tower runs on the blank image that it was given."""
    vars(image_model(model))[GIVEN].taken = True


def takes_blank_image(model: nn.Module) -> bool:
    """Return whether that has been noted."""
    return bool(getattr(vars(image_model(model)).get(GIVEN), "taken", False))


def is_for_towers(name: str) -> bool:
    """Return whether a forward's argument of this name is of images or videos, and not of tokens."""
    return name in GRIDS or name.startswith(INPUTS)


def image_inputs(model: nn.Module, smallest: bool = False) -> dict[str, Tensor]:
    """Return what `forward` takes for one image [1, ...], on the CPU: pixels of ones, for some models omit zeros.

    smallest  of the sizes that a model takes; else the largest of a list, or SIDE x SIDE where there is no list
    Raises ConfigError where a model's config does not tell the form of its images.
    """
    base = image_model(model)
    if base is None:
        raise ConfigError(
            f"{type(model_of(model)).__name__} has no get_image_features, which makes tokens of an image."
        )
    if smallest and (given := vars(base).get(GIVEN)):
        return dict(given)
    return _of_config(model, SMALL if smallest else None)


def sized(model: nn.Module) -> bool:
    """Return whether a model takes images of any size, as patches beside a grid."""
    takes = inspect.signature(image_model(model).get_image_features).parameters
    return any(name in takes for name in GRIDS)


def image_of(model: nn.Module, patches: int | None = None, tokens: int | None = None) -> dict[str, Tensor]:
    """Return what `forward` takes for an image [1, ...] of at least so many patches, nearly square.

    patches  None: as many as MEGAPIXEL x MEGAPIXEL pixels have
    tokens   that it may have at most, where nobody says its patches
    Of a model that takes no images of any size it is one of those that it takes. Raises ConfigError as `image_inputs`.
    """
    if not sized(model):
        return image_inputs(model)
    of_token = max(1, patches_of(model, _of_config(model, (1, 1))))
    if patches is None:
        side = image_model(model).config.vision_config.patch_size
        least = (MEGAPIXEL // (side if isinstance(side, int) else side[0])) ** 2 // of_token
        room = tokens or least
        high = wide = max(1, int(min(least, room) ** 0.5))
    else:
        of_image = max(1, -(-patches // of_token))
        high = max(1, int(of_image**0.5))
        wide = -(-of_image // high)
    return _of_config(model, (high, wide))


def trial_image(model: nn.Module) -> dict[str, Tensor]:
    """Return what `forward` takes for one small image [1, ...] that is wider than high, if the model takes such.

    In a trial the smallest one would tell too little: positions of an image of one token are those of text, and in a
    square height and width may be taken for each other. Raises ConfigError as `image_inputs` does.
    """
    try:
        return _of_config(model, WIDE)
    except ConfigError:
        if given := vars(image_model(model)).get(GIVEN):
            return dict(given)
        raise


def _of_config(model: nn.Module, sides: Sides) -> dict[str, Tensor]:
    try:
        return _image_inputs(image_model(model), sides)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"the config of {type(model_of(model)).__name__} does not describe its images "
            f"({type(error).__name__}: {_line(error)})."
        ) from error


def _image_inputs(base: Any, sides: Sides) -> dict[str, Tensor]:
    """Return an image of so many tokens in height and width, where patches are counted; None: SIDE x SIDE pixels."""
    smallest = sides is not None
    config, takes = base.config, inspect.signature(base.get_image_features).parameters
    vision = getattr(config, "vision_config", None) or config
    if "image_position_ids" in takes:
        return _patches_with_places(vision, sides)
    if "image_token_pooling" in takes:
        return _crops_with_pooling(vision)
    channels = _first(vision, ("in_channels", "num_channels"), 3)
    if config.model_type == "inkling_mm_model":  # channels last
        count, side = 1 if smallest else (SIDE // vision.patch_size) ** 2, vision.patch_size
        return {"pixel_values": torch.ones(count, vision.temporal_patch_size, side, side, channels)}
    if grid := next((name for name in GRIDS if name in takes), None):
        return _patches_with_grid(config, grid, sides)
    if config.model_type == "fuyu":
        return {
            "pixel_values": torch.ones(
                1, 1 if smallest else (SIDE // config.patch_size) ** 2, channels * config.patch_size**2
            )
        }
    if vision is config and hasattr(config, "vq_config"):
        side = 2 ** len(config.vq_config.channel_multiplier) * 2 if smallest else SIDE
        sizes = {"image_sizes": torch.tensor([[side, side]])} if "image_sizes" in takes else {}
        return {"pixel_values": torch.ones(1, channels, side, side), **sizes}
    if config.model_type in TWO_RESOLUTIONS:
        vision = vision.sam_config
    size = getattr(vision, "image_size", UNSIZED[smallest])
    height, width = (size, size) if isinstance(size, int) else size
    pixels = torch.ones(1, channels, height, width)
    if "pixel_attention_mask" in takes:
        tiles = {"pixel_attention_mask": torch.ones(1, 1, dtype=torch.bool)} if "tile_fine_mask" in takes else {}
        return {"pixel_values": pixels[None], **tiles}
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


def _crops_with_pooling(vision: Any) -> dict[str, Tensor]:
    """Return an image of Molmo 2: two crops, the whole image and one of it, 2 x 2 patches of each to a token."""
    height, width = (size // vision.patch_size for size in vision.image_size)
    numbers = torch.arange(2 * height * width).view(2, height, width)
    pooled = numbers[:, : height // 2 * 2, : width // 2 * 2].reshape(2, height // 2, 2, width // 2, 2)
    return {
        "pixel_values": torch.ones(2, height * width, vision.num_channels * vision.patch_size**2),
        "image_token_pooling": pooled.transpose(2, 3).reshape(-1, 4),
        "image_grids": torch.tensor([[height // 2, width // 2] * 2]),
    }


def _patches_of(sides: Sides, patch: int, merge: int) -> tuple[int, int]:
    """Return how many patches an image is high and wide."""
    high, wide = sides or [max(SIDE // patch // merge, 2)] * 2
    return high * merge, wide * merge


def _patches_with_places(vision: Any, sides: Sides) -> dict[str, Tensor]:
    """Return an image of Gemma 4: patches beside their places. Those of gemma4_unified are pooled already."""
    pooled = hasattr(vision, "model_patch_size")
    patch, merge = (vision.model_patch_size, 1) if pooled else (vision.patch_size, vision.pooling_kernel_size)
    high, wide = _patches_of(sides, patch, merge)
    places = torch.cartesian_prod(torch.arange(high), torch.arange(wide)).flip(-1)
    return {"pixel_values": torch.ones(1, high * wide, 3 * patch**2), "image_position_ids": places[None]}


def _patches_with_grid(config: Any, grid: str, sides: Sides) -> dict[str, Tensor]:
    """Return an image as patches [patches, values of one] beside its grid: of time, height and width, or of two."""
    vision = config.vision_config
    patch, channels = vision.patch_size, _first(vision, ("in_channels", "num_channels"), 3)
    merge = _first(vision, ("spatial_merge_size", "merge_size", "merge_kernel_size", "window_kernel_size"), 1)
    if grid == "spatial_shapes":
        merge = _first(config, ("downsample_factor",), merge)
    merge = merge if isinstance(merge, int) else merge[0]
    high, wide = _patches_of(sides, patch, merge)
    frames = _first(vision, ("temporal_patch_size", "patch_temporal"), 1)
    shape = (channels, patch, patch) if config.model_type in UNFLATTENED else (channels * frames * patch**2,)
    if config.model_type == "inkling2":  # a token's patches in one, channels last
        high, wide, shape = high // merge, wide // merge, (patch * merge, patch * merge, channels)
    values = torch.ones(high * wide, *shape)
    size = torch.tensor([[high, wide]])
    if grid == "image_grid_thw":
        merges = {"image_merge_sizes": torch.tensor([merge])} if config.model_type == "video_llama_3" else {}
        return {"pixel_values": values, grid: torch.tensor([[1, high, wide]]), **merges}
    if grid == "spatial_shapes":
        return {"pixel_values": values[None], grid: size, "pixel_attention_mask": torch.ones(1, high * wide).long()}
    if grid == "target_sizes":  # patches of all images beside each other
        return {"pixel_values": torch.ones(1, channels, patch, patch * high * wide), grid: size.int()}
    return {"pixel_values": values, grid: size}


def _first(config: Any, names: Sequence[str], otherwise: Any) -> Any:
    """Return the first of these values that a config has."""
    return next((value for name in names if (value := getattr(config, name, None)) is not None), otherwise)


def patches(model: nn.Module) -> int:
    """Return how many patches one image has, as large as `image_inputs` makes it; 0 where a config does not tell."""
    try:
        return patches_of(model, image_inputs(model))
    except ConfigError:
        return 0


def patches_of(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Return how many patches these images have; 0 where a config does not tell."""
    try:
        vision = image_model(model).config.vision_config
        side = vision.patch_size
        height, width = (side, side) if isinstance(side, int) else side
        pixels = inputs["pixel_values"]
        channels: int = _first(vision, ("num_channels", "in_channels"), 3)
        frames: int = _first(vision, ("temporal_patch_size",), 1)
        return int(pixels.numel() // (height * width * channels * frames))
    except (AttributeError, KeyError, TypeError, ValueError):
        return 0


def _line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0].rstrip(".")


def repeated(one: Mapping[str, Tensor], count: int) -> dict[str, Tensor]:
    """Return the inputs of as many images alike, where `one` are those of one of them."""
    many = {name: value.repeat(count, *[1] * (value.dim() - 1)) for name, value in one.items()}
    if "target_sizes" in one:  # patches of all images beside each other
        many["pixel_values"] = one["pixel_values"].repeat(1, 1, 1, count)
    if "image_token_pooling" in one:  # numbers of patches, which go on from image to image
        patches = one["pixel_values"].shape[:2].numel() * torch.arange(count)
        many["image_token_pooling"] = (one["image_token_pooling"] + patches[:, None, None]).flatten(0, 1)
    return many


def image_features(model: nn.Module, inputs: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what takes the place of image tokens in the language model, [..., tokens, hidden] each."""
    return list(tensors_in(tower_output(model, inputs).pooler_output))


def tower_output(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    """Return what a model's tower makes of images; `pooler_output` takes the place of image tokens.

    Llama 4 has its projector outside of what makes features: it comes after.
    """
    return _projected(model, _encoded(model, inputs))


def _encoded(model: nn.Module, inputs: Mapping[str, Tensor]) -> Any:
    return image_model(model).get_image_features(**inputs, return_dict=True)


def _projected(model: nn.Module, output: Any) -> Any:
    base = image_model(model)
    if output.pooler_output is None and hasattr(base, "multi_modal_projector"):
        output.pooler_output = base.multi_modal_projector(output.last_hidden_state.flatten(0, -2))
    elif output.pooler_output is None and hasattr(output, "deepstack_features"):  # Granite 4: features at blocks alone
        output.pooler_output = output.deepstack_features[0][1]
    elif output.pooler_output is None:  # Fuyu's only layer
        output.pooler_output = output.last_hidden_state
    return output


def read_features(model: nn.Module, output: Mapping[str, Any]) -> list[Tensor]:
    """Return all that a language model reads of a tower's output: features at its entry, and at blocks (DeepStack).

    Hidden states and attentions are the encoder's record of itself. They reach layers that features do not, such as
    the last one of LLaVA's tower, which has no gradient where there are images either. The same holds of features that
    Granite 4 makes for a block which it does not have, or for one that later features are added at instead.
    """
    read = {name: value for name, value in output.items() if not name.endswith(RECORDS)}
    at_blocks = read.get(AT_BLOCKS) or ()
    if any(isinstance(features, tuple) and isinstance(features[0], int) for features in at_blocks):
        blocks = image_model(model).config.get_text_config().num_hidden_layers
        read[AT_BLOCKS] = {block: features for block, features in at_blocks if block in range(blocks)}
        read.pop("pooler_output", None)  # one of them, for its shape (`tower_output`)
    return list(tensors_in(read))


def no_blank_image(model: nn.Module, error: Exception) -> ConfigError:
    """Return what is said where a model's tower does not run on a blank image."""
    return ConfigError(
        f"{type(model_of(model)).__name__} cannot process a blank image ({type(error).__name__}: {_line(error)}), "
        "which stage 3 needs where a micro-batch has none: pass zero.stage=2, or a config without vision_config."
    )


def at_least_once(calls: int) -> int:
    """Return how often a tower runs where ranks cannot ask each other: once, even without an image."""
    return max(calls, 1)


class BlankImages:
    """Hooks by which a model's vision tower runs on blank images until it has run as often as on the other ranks.

    agree  takes how often this rank's images and videos make the tower run in a forward, and returns how often it runs
           on every rank; None where ranks run it apart. It is not asked where the micro-batch has an entry CALLS,
           which says so
    held   keeps gathered what the tower reads beside its modules, where it runs outside of a forward
    ran    how often the tower has been to run on every rank so far, in training

    Blank images run where images do: behind all embeddings (Gemma 4 has some by layer), before the language model. The
    features are multiplied by zero and added to the input embeddings: the loss is what it was, and the tower's
    gradients are zeros. Forwards with a cache, which `generate` makes, are left as they are, but for the first one
    inside `generating`.
    """

    def __init__(
        self,
        model: nn.Module,
        agree: Callable[[int], int | None] = at_least_once,
        held: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._model = model
        self._agree, self._held = agree, held
        self._told: int | None = None
        self._due = self.ran = 0
        self._due_first = 0
        self._encoded: list[Any] = []  # outputs of blank images of a generation, for its first forward
        model.register_forward_pre_hook(self._hear, prepend=True, with_kwargs=True)
        base = image_model(model)
        if isinstance(base.get_input_embeddings(), Placeholder):
            return  # the tower is with the first chunk of a pipeline
        self._inputs = image_inputs(model, smallest=True)
        base.register_forward_pre_hook(self._begin, with_kwargs=True)
        reader = base.get_encoder() if base.config.is_encoder_decoder else base.get_decoder()
        if reader is base:  # Chameleon's blocks are in the model itself, behind its embeddings
            base.get_input_embeddings().register_forward_hook(self._add_to)
        else:
            reader.register_forward_pre_hook(self._add, prepend=True, with_kwargs=True)

    def _hear(self, model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        """Take the entry that no model knows."""
        self._told = kwargs.get(CALLS)
        return None if self._told is None else (args, {name: t for name, t in kwargs.items() if name != CALLS})

    def _begin(self, base: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        told, self._told = self._told, None
        if kwargs.get("past_key_values") is not None:
            self._due, self._due_first = self._due_first, 0
            return
        own = calls_of(kwargs)
        calls = self._agree(own) if told is None else told
        if calls is None:
            self._due = 0
            return
        assert own <= calls, f"the tower runs {own} times here, where ranks have agreed on {calls}"
        self._due = calls - own
        self.ran += calls if torch.is_grad_enabled() else 0

    @contextmanager
    def generating(self, given: Mapping[str, Any]) -> Iterator[None]:
        """Run the tower as often on every rank in a model's own generate, which is given this and called inside.

        It runs the tower on its images in its first forward, or before that where the forward takes what this makes.
        Blank ones run there, too: ranks are in step behind arguments that generate refuses.
        """
        own, model = calls_of(given), inner_model(model_of(self._model))
        with torch.no_grad():
            calls = self._agree(own)
            due = 0 if calls is None else calls - own
            if ENCODED in inspect.signature(model.forward).parameters:
                with self._held() if calls else nullcontext(), self._encoding(model, due):
                    yield
                return
            self._due_first = due
            try:
                yield
            finally:
                self._due_first = 0

    @contextmanager
    def _encoding(self, model: nn.Module, due: int) -> Iterator[None]:
        """Let a model's generate run the tower on blank images, so often, where it runs it on images."""
        encode: Callable[..., Any] = getattr(model, ENCODES)

        def then_blank(*args: Any, **kwargs: Any) -> Any:
            made = encode(*args, **kwargs)
            self._encoded = self._blank(due, image_model(self._model).get_input_embeddings().weight)
            return made

        vars(model)[ENCODES] = then_blank
        try:
            yield
        finally:
            self._encoded = []
            del vars(model)[ENCODES]

    def _add(self, decoder: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
        if not self._due and not self._encoded:
            return None
        try:
            embedded: Tensor = kwargs["inputs_embeds"]
        except KeyError as error:
            raise no_blank_image(self._model, error) from error
        return args, kwargs | {"inputs_embeds": self._add_to(decoder, args, embedded)}

    def _add_to(self, module: nn.Module, args: Any, embedded: Tensor) -> Tensor:
        due, self._due, encoded, self._encoded = self._due, 0, self._encoded, []
        if not due and not encoded:
            return embedded
        outputs = encoded + self._blank(due, embedded)
        with self._or_refused():
            features = [t for output in outputs for t in read_features(self._model, _projected(self._model, output))]
        return embedded + torch.stack([(t * 0).sum() for t in features]).sum().to(embedded.dtype)

    def _blank(self, times: int, like: Tensor) -> list[Any]:
        """Run the tower on a blank image, so often, in a tensor's dtype and on its device; return its outputs."""
        with self._or_refused():
            inputs = {name: t.to(like if t.is_floating_point() else like.device) for name, t in self._inputs.items()}
            return [_encoded(self._model, inputs) for _ in range(times)]

    @contextmanager
    def _or_refused(self) -> Iterator[None]:
        try:
            yield
        except (TypeError, ValueError, AttributeError, KeyError) as error:
            raise no_blank_image(self._model, error) from error


def calls_of(given: Mapping[str, Any]) -> int:
    """Return how often a forward that is given this runs the tower: once for images, and once for videos."""
    return sum(given.get(name) is not None for name in SEEN)


def tower_parameters(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the parameters of a vision-language model outside its language model and head, with their names."""
    base = image_model(model)
    if base.get_decoder() is base:  # Chameleon's blocks are in the model itself, beside a model that is its tower
        tower = {p for child in base.children() if hasattr(child, "config") for p in child.parameters()}
    else:
        of_text = {*base.get_decoder().parameters(), *base.get_input_embeddings().parameters()}
        tower = set(base.parameters()) - of_text
    return {p: name for name, p in model.named_parameters() if p in tower}
