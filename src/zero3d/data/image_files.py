"""Images: their sizes read from their headers, decoded only when a batch is made.

"a.jpg"                      a file of the data's folder, and none elsewhere
{"bytes": ..., "path": ...}  a file's bytes, as columns of images have them
PIL.Image                    what a dataset of one's own may give, taken as it is

Files are read in the FORMATS of pixels alone: a PostScript file would start another program. They are turned as their
EXIF orientation says, and so are the sizes of which tokens are made. Of a PNG that is read from the chunks before its
pixels, for others would take all of them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from types import NoneType
from typing import Any

from zero3d.errors import ConfigError, short

LARGEST = 1 << 26  # pixels of an image that is decoded: 8192 x 8192; more is a mistake or an attack
LARGEST_FILE = (
    1 << 30
)  # bytes of its file, which some decoders read whole; so many pixels without compression are fewer
FORMATS = (
    "PNG",
    "JPEG",
    "WEBP",
    "GIF",
    "BMP",
    "TIFF",
    "PPM",
    "JPEG2000",
    "AVIF",
)  # as far as Pillow was built with them
ORIENTATION = 0x0112  # a tag of EXIF
TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
LONGEST = 4096  # characters of a name, as of any path
ACROSS = 5  # from here on width and height change places


def is_image(value: Any) -> bool:
    """Say whether a value is one of the forms of an image."""
    if isinstance(value, Mapping):
        content, path = value.get("bytes"), value.get("path")
        wrong = not isinstance(content, (bytes, bytearray, memoryview, NoneType)) or not isinstance(
            path, (str, NoneType)
        )
        return not wrong and bool(content or path)
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
        across = _is_file(image) and _orientation(opened) >= ACROSS
    return (int(height), int(width)) if across else (int(width), int(height))


def decode(folder: Path, image: Any) -> Any:
    """Return an image as PIL's, in RGB and upright. Raises BadImage."""
    from PIL.Image import Transpose

    opened, name = _opened(folder, image)
    with opened:
        turn = TURNS.get(_orientation(opened)) if _is_file(image) else None
        try:
            pixels = opened.convert("RGB")
            return pixels if turn is None else pixels.transpose(Transpose[turn])
        except Exception as error:  # of a damaged file decoders raise anything
            raise BadImage(f"{name} is damaged ({short(str(error))}): copy it again") from error


def _is_file(image: Any) -> bool:
    return isinstance(image, (str, Mapping))


def _orientation(opened: Any) -> int:
    """Return how an image is to be turned: 1 is not at all, also where its EXIF data cannot be read."""
    if opened.format == "TIFF":  # Pillow turns it itself
        return 1
    if opened.format == "PNG" and not {"exif", "Raw profile type exif"} & opened.info.keys():
        return 1
    found = 1
    with suppress(Exception):  # of EXIF data that are damaged: the pixels may be whole
        found = opened.getexif().get(ORIENTATION, 1)
    return found if isinstance(found, int) and found in TURNS else 1


def _formats() -> list[str]:
    from PIL import Image

    Image.init()
    return [name for name in FORMATS if name in Image.OPEN]


def _opened(folder: Path, image: Any) -> tuple[Any, str]:
    """Open an image without decoding it; return it with what a message calls it."""
    from PIL import Image

    if not _is_file(image):
        return _small(image.copy(), "an image of the data")
    source, name = _source(folder, image)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # LARGEST is the bound
            opened = Image.open(source, formats=_formats())
    except Image.DecompressionBombError as error:
        raise BadImage(f"{name} is larger than any decoder takes ({short(str(error))}): make it smaller") from error
    except Exception as error:  # of a damaged file decoders raise anything
        raise BadImage(f"{name} is not an image in {', '.join(FORMATS)}: copy it again, or leave it out") from error
    return _small(opened, name)


def _source(folder: Path, image: str | Mapping[str, Any]) -> tuple[Path | BytesIO, str]:
    """Return what an image is opened from, and what a message calls it."""
    name = image if isinstance(image, str) else image.get("path") or ""
    if isinstance(image, Mapping) and image.get("bytes") is not None:
        return BytesIO(image["bytes"]), f"the image {short(name)} of the data" if name else "an image of the data"
    if "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
        raise BadImage(
            f"the image {short(name)} is not named within {folder}: set data.images to the folder of the "
            "images, and write names from there"
        )
    path = folder / name
    if len(name) > LONGEST or not os.path.isfile(path):
        why = "is not a regular file" if os.path.exists(path) else "does not exist"
        raise BadImage(f"the image {folder / short(name)} {why}: set data.images to the folder of the images")
    # Folders may be links, as those of LLaVA's data often are; an image that is one stays within its own.
    if path.is_symlink() and not any(path.resolve().is_relative_to(each.resolve()) for each in (folder, path.parent)):
        raise BadImage(
            f"the image {short(name)} is a link to {path.resolve()}, out of {folder}: copy it there, or set "
            "data.images to the folder that has it"
        )
    if (size := path.stat().st_size) > LARGEST_FILE:
        raise BadImage(f"the image {path} has {size:,} bytes, more than {LARGEST_FILE:,}: make it smaller")
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
