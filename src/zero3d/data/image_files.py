"""Files of images: found in a folder, their sizes read from their headers, decoded only when a batch is made."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError, short

LARGEST = 1 << 26  # pixels of an image that is decoded: 8192 x 8192; more is a mistake or an attack


class BadImage(ValueError):
    """Says what is wrong with an image's file, and what to do."""


def require_pillow() -> None:
    """Refuse to go on without the library that decodes images. Raises ConfigError."""
    try:
        import PIL  # noqa: F401
    except ImportError:
        raise ConfigError(
            "the data have images, and decoding them needs Pillow: type pip install 'zero3d[vlm]'."
        ) from None


def size_of(folder: Path, name: str) -> tuple[int, int]:
    """Return (width, height) of an image of this folder, from its header. Raises BadImage."""
    with _opened(folder, name) as image:
        width, height = image.size
    return int(width), int(height)


def decode(folder: Path, name: str) -> Any:
    """Return an image as PIL's, in RGB. Raises BadImage."""
    with _opened(folder, name) as image:
        try:
            return image.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:  # as PIL's decoders say that a file is damaged
            raise BadImage(f"the image {folder / name} is damaged ({short(str(error))}): copy it again") from error


def _opened(folder: Path, name: str) -> Any:
    """Open a file without decoding it."""
    from PIL import Image, UnidentifiedImageError

    path = folder / name
    if "\0" in name or not path.is_file():
        raise BadImage(f"the image {short(str(path))} does not exist: set data.images to the folder of the images")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # LARGEST is the bound
            image = Image.open(path)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        why = "is larger than any decoder takes" if isinstance(error, Image.DecompressionBombError) else "is no image"
        raise BadImage(f"{path} {why} ({short(str(error))}): copy it again, or leave it out") from error
    width, height = image.size
    if width * height > LARGEST:
        image.close()
        raise BadImage(
            f"the image {path} has {width} x {height} = {width * height:,} pixels, more than {LARGEST:,}: make it "
            "smaller"
        )
    return image
