"""Counts the pixels that an image processor makes of an image, by its settings: a typo would take all memory.

size, crop_size ...   {height, width}                  their product
                      {shortest_edge, longest_edge}    the smaller one, squared, of a square image
                      {shortest_edge} as min_pixels    at least so many, where a class counts pixels (Qwen2-VL, GLM-4V)
patch_size            x merge_size                     at least one patch, squared
temporal_patch_size                                    as often: an image is repeated over the frames of a patch
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero3d.data.image_files import LARGEST
from zero3d.errors import ConfigError

MADE_WHERE = {"size": "do_resize", "max_image_size": "do_resize", "crop_size": "do_center_crop", "pad_size": "do_pad"}
BYTES = 3 * 4  # of a pixel: three colours in fp32


def check_sizes(image_processor: Any, folder: Path, files: tuple[str, ...]) -> None:
    """Refuse a processor that would make more pixels of an image than one of a file may have. Raises ConfigError.

    files  of the folder, one of which has the settings
    """
    for key, number, told, pixels in _made(image_processor):
        if pixels > LARGEST:
            name, file = _written(key, number, folder, files)
            raise ConfigError(
                f"{folder / file}: with {name} {number:,} the processor makes {told} pixels of an image, x 3 colours "
                f"x 4 bytes = {pixels * BYTES:,} bytes, and more than {LARGEST:,} pixels are refused: correct it, or "
                "save the model's own there, AutoProcessor.from_pretrained(MODEL).save_pretrained(FOLDER)."
            )


def _made(image_processor: Any) -> Iterator[tuple[str, int, str, int]]:
    """Yield settings, the number that decides, how many pixels it makes in words, and in numbers."""
    counts = _counts_pixels(type(image_processor))
    for key, switch in MADE_WHERE.items():
        if getattr(image_processor, switch, None) is not False:
            yield from _of_size(key, getattr(image_processor, key, None), counts)
    patch, merge = (getattr(image_processor, name, None) for name in ("patch_size", "merge_size"))
    if isinstance(patch, int):
        side = patch * (merge if isinstance(merge, int) else 1)
        yield "patch_size", patch, f"patches of at least {_product(side, side)}", side * side
        frames = getattr(image_processor, "temporal_patch_size", None)
        if isinstance(frames, int):
            told = f"patches of at least {side:,} x {side:,} x {frames:,} frames = {side * side * frames:,}"
            yield "temporal_patch_size", frames, told, side * side * frames


def _counts_pixels(kind: type) -> bool:
    """Return whether edges of a processor's size are numbers of pixels: its options, or its file, say min_pixels."""
    files = (vars(sys.modules[each.__module__]).values() for each in kind.__mro__ if each.__module__ in sys.modules)
    resizes = (each for file in files for each in file if inspect.isfunction(each))
    options = getattr(getattr(kind, "valid_kwargs", None), "__annotations__", {})
    return "min_pixels" in options or any("min_pixels" in each.__code__.co_varnames for each in resizes)


def _of_size(key: str, size: Any, counts: bool) -> Iterator[tuple[str, int, str, int]]:
    numbers = size if isinstance(size, Mapping) else getattr(size, "__dict__", {})
    # of what is no number the processor says so itself
    height, width, shortest, longest, high, wide = (
        int(value) if isinstance(value := numbers.get(name), int | float) else 0
        for name in ("height", "width", "shortest_edge", "longest_edge", "max_height", "max_width")
    )
    height, width = height or high, width or wide
    if height and width:
        yield key, max(height, width), _product(height, width), height * width
    elif counts:
        yield key, shortest, f"at least {shortest:,}", shortest
    elif side := min(filter(None, (shortest, longest)), default=0):
        yield key, side, _product(side, side), side * side


def _product(height: int, width: int) -> str:
    return f"{height:,} x {width:,} = {height * width:,}"


def _written(key: str, number: int, folder: Path, files: tuple[str, ...]) -> tuple[str, str]:
    """Return the name by which a file of a folder has this number, and the file."""
    for file in files:
        try:
            settings = json.loads((folder / file).read_text())
        except (OSError, ValueError):
            continue
        for part in (settings.get("image_processor"), settings):
            for name, value in part.items() if isinstance(part, dict) else ():
                if value == number and (name == key or key == "size"):
                    return name, file
                if name == key and isinstance(value, dict) and number in value.values():
                    return f"{name}.{next(own for own, each in value.items() if each == number)}", file
    return key, files[0]
