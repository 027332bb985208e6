"""The processor of a model that takes images, where a run's data have some."""

from __future__ import annotations

import inspect
from contextlib import suppress
from typing import Any

from torch import Tensor

from zero3d.config import Config
from zero3d.data.conversations import as_texts, has_images
from zero3d.data.files import find_sources, function_of, parts_of_data
from zero3d.data.image_files import BadImage, require_pillow
from zero3d.data.images import Size, Vision, white
from zero3d.data.own import OwnData
from zero3d.data.records import BadRecord, Pictured, Record, first_record, has_pictures, record_of
from zero3d.errors import ConfigError
from zero3d.models.bases import sees_images
from zero3d.models.document_positions import DocumentPositions
from zero3d.models.image_trial import not_taken
from zero3d.models.images import give_blank_image, note_taken
from zero3d.models.open import Opened

SETTINGS = (
    "image_size", "patch_size", "spatial_merge_size", "merge_size", "temporal_patch_size", "mm_tokens_per_image",
    "image_seq_length", "downsample_ratio", "scale_factor", "vision_feature_select_strategy", "image_grid_pinpoints",
)  # fmt: skip
WIDE = (1000, 600)  # of an image worth several tiles: one of the smallest size may have as many tokens by chance


def open_vision(config: Config, opened: Opened) -> Vision | None:
    """Return the processor of the model's folder; None where neither data.images nor the data speak of images.

    Raises ConfigError: a model without images, a processor that cannot be used.
    """
    if config.data.images is None and not _has_images(config):
        return None
    takes = frozenset(inspect.signature(opened.module.forward).parameters)
    sees = "pixel_values" in takes and sees_images(opened.module)
    if not sees and config.data.images is None and _all_are_texts(config):
        return None  # conversations of texts, in LLaVA's form
    if not sees or opened.folder is None:
        raise ConfigError(
            f"the data have images, and {type(opened.module).__name__} of model.path={config.model.path} takes none: "
            "give the folder of a vision-language model."
        )
    require_pillow()
    vision = Vision(opened.folder, takes, DocumentPositions.of(opened.module))
    wanted = getattr(opened.module.config, "image_token_id", None)
    if wanted is not None and wanted != vision.image:
        raise ConfigError(
            f"{opened.folder}: images are token {wanted} in config.json and token {vision.image} in the tokenizer: "
            "give model.path a folder whose model and processor belong together."
        )
    with suppress(BadImage):  # then the config tells the form
        blank, size = vision.blank()
        give_blank_image(opened.module, blank)
        _check_taken(opened, vision, blank, size)
        note_taken(opened.module)
        if vision.tokens([WIDE]) != vision.tokens([size]):
            _check_taken(opened, vision, vision.pixels([vision.outputs([white(WIDE)])]), WIDE, quick=True)
    return vision


def _check_taken(opened: Opened, vision: Vision, inputs: dict[str, Tensor], size: Size, quick: bool = False) -> None:
    """Refuse a processor whose images the model does not take: one of another model. Raises ConfigError."""
    tokens = vision.tokens([size])
    found = not_taken(opened.module, inputs, tokens, vision.image, quick)
    if found is None:
        return
    config: Any = opened.module.config
    tower = getattr(config, "vision_config", None)
    told = [f"{name} {value}" for name in SETTINGS if (value := _first(name, tower, config)) is not None]
    shapes = ", ".join(f"{name} {list(t.shape)}" for name, t in inputs.items())
    raise ConfigError(
        f"the processor of {opened.folder} is not that of its model: of an image of {size[0]} x {size[1]} pixels it "
        f"makes {shapes} and {tokens:,} token{'' if tokens == 1 else 's'}, and the model {found}. The processor has "
        f"{vision.settings()}; config.json has {', '.join(told)}. Save the model's own there, "
        "AutoProcessor.from_pretrained(MODEL).save_pretrained(FOLDER), or correct what differs."
    )


def _first(name: str, *configs: Any) -> Any:
    return next((value for each in configs if (value := getattr(each, name, None)) is not None), None)


def _has_images(config: Config) -> bool:
    """Say whether the first record of any file or function has images, or is a conversation of LLaVA's."""
    for part in parts_of_data(config.data):
        if function := function_of(part):
            if has_images(OwnData(function).item(0)):
                return True
        elif any(has_pictures(source) for source in find_sources(part.paths, part.format, part.split)):
            return True
    return False


def _all_are_texts(config: Config) -> bool:
    for part in parts_of_data(config.data):
        if function := function_of(part):
            firsts: list[Record | None] = [record_of(OwnData(function).item(0), function)]
        else:
            firsts = [first_record(source) for source in find_sources(part.paths, part.format, part.split)]
        for record in firsts:
            if isinstance(record, BadRecord):
                return False
            if isinstance(record, Pictured) and (record.images or as_texts(record.messages) is None):
                return False
    return True
