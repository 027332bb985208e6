"""Images: their sizes read from their headers, decoded only when a batch is made.

"a.jpg"                      a file of the data's folder
{"bytes": ..., "path": ...}  a file's bytes, as columns of images have them
PIL.Image                    what a dataset of one's own may give
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError, short

LARGEST = 1 << 26  # pixels of an image that is decoded: 8192 x 8192; more is a mistake or an attack


def is_image(value: Any) -> bool:
    """Say whether a value is one of the forms of an image."""
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes") or value.get("path"), (bytes, str))
    return (isinstance(value, str) and bool(value)) or (hasattr(value, "convert") and hasattr(value, "size"))


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


def size_of(folder: Path, image: Any) -> tuple[int, int]:
    """Return (width, height) of an image, from its header. Raises BadImage."""
    with _opened(folder, image)[0] as opened:
        width, height = opened.size
    return int(width), int(height)


def decode(folder: Path, image: Any) -> Any:
    """Return an image as PIL's, in RGB. Raises BadImage."""
    opened, name = _opened(folder, image)
    with opened:
        try:
            return opened.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:  # as PIL's decoders say that a file is damaged
            raise BadImage(f"{name} is damaged ({short(str(error))}): copy it again") from error


def _opened(folder: Path, image: Any) -> tuple[Any, str]:
    """Open an image without decoding it; return it with what a message calls it."""
    from PIL import Image, UnidentifiedImageError

    if not isinstance(image, (str, Mapping)):
        return _small(image.copy(), "an image of the data")
    source, name = _source(folder, image)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # LARGEST is the bound
            opened = Image.open(source)
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        why = "is larger than any decoder takes" if isinstance(error, Image.DecompressionBombError) else "is no image"
        raise BadImage(f"{name} {why} ({short(str(error))}): copy it again, or leave it out") from error
    return _small(opened, name)


def _source(folder: Path, image: str | Mapping[str, Any]) -> tuple[Path | BytesIO, str]:
    """Return what an image is opened from, and what a message calls it."""
    name = image if isinstance(image, str) else image.get("path") or ""
    if isinstance(image, Mapping) and image.get("bytes") is not None:
        return BytesIO(image["bytes"]), f"the image {short(name)} of the data" if name else "an image of the data"
    path = folder / name
    if "\0" in name or not path.is_file():
        raise BadImage(f"the image {short(str(path))} does not exist: set data.images to the folder of the images")
    return path, f"the image {path}"


def _small(opened: Any, name: str) -> tuple[Any, str]:
    """Return both for an image of not more than LARGEST pixels. Raises BadImage."""
    width, height = opened.size
    if width * height > LARGEST:
        opened.close()
        raise BadImage(
            f"{name} has {width} x {height} = {width * height:,} pixels, more than {LARGEST:,}: make it smaller"
        )
    return opened, name
