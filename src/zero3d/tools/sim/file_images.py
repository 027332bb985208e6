"""How many patches the sequences of a run's data have: of a sample of its records, by sizes in headers of images.

    records ... -> SAMPLE of them (sampled_records.py)
                -> tokens and patches of each, by the folder's processor
                -> sequences: one each, or packed one after the other up to data.length; those of text are apart

A few of the files are decoded and run through the processor: as fast does a core of this machine prepare images.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from zero3d.config import Config
from zero3d.data.files import FILL_ME
from zero3d.data.image_files import BadImage, decode, require_pillow, size_of
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.images import KINDS, Vision
from zero3d.data.records import Pictured, Record
from zero3d.data.tokenizers import load_tokenizer
from zero3d.errors import Zero3dError
from zero3d.tools.plan.images import FileImages, Speed, percentile
from zero3d.tools.plan.spec import Patches
from zero3d.tools.sim.sampled_records import sampled

SAMPLE = 256  # records that are looked at
TIMED = 8  # files that are decoded


class _Document(NamedTuple):
    """A record with images, or a sequence of several: its tokens, patches and images."""

    tokens: int
    patches: int
    images: int


def file_images(config: Config) -> tuple[FileImages | None, str]:
    """Return what a sample of the run's data says of images; None where it says nothing, and why in words."""
    folder = Path(config.model.path).expanduser()
    if not config.data.train or FILL_ME in config.data.train:
        return None, " (the file names no data)"
    try:
        require_pillow()
        vision = Vision(folder, frozenset({"pixel_values", *KINDS}))
        tokenizer = load_tokenizer(config.data.tokenizer, str(folder))
        found = sampled(config, SAMPLE)
        makers = {place: ImageTokens(tokenizer, vision, place, files=False) for place, _ in found}
        documents = list(_documents(found, makers, config.data.length))
    except (Zero3dError, OSError, ValueError) as error:
        return None, f" (its data could not be read: {str(error).splitlines()[0].rstrip('.')})"
    sequences = _packed(documents, config.data.length) if config.data.packing else documents
    shown = sorted(sequences, key=lambda each: each.patches)
    if not shown:
        return None, " (no record of its data that was looked at has an image)"
    budget = None if config.data.patches is None else config.data.patches // max(1, config.train.micro_batch or 1)
    at = shown[percentile([each.patches for each in shown])]
    number = at.patches if budget is None else max(1, min(at.patches, budget))
    pixels = vision.outputs([_white()])["pixel_values"]
    return FileImages(
        Patches(number, at.images, tiles=pixels.dim() > 3),
        sum(each.patches for each in shown) / len(shown),
        shown[-1].patches,
        sum(each.images for each in shown) / len(shown),
        len(found),
        len(documents),
        _speed(vision, found),
    ), ""


def _white() -> object:
    from PIL import Image

    return Image.new("RGB", (448, 448), "white")


def _documents(found: list[tuple[Path, Record]], makers: dict[Path, ImageTokens], length: int) -> Iterator[_Document]:
    """Yield those with images that can be read and fit into a sequence."""
    for folder, record in found:
        if not isinstance(record, Pictured) or not record.images:
            continue
        with suppress(ValueError, Zero3dError, OSError):
            tokens, pictures = makers[folder].encode(record.messages, record.images, record.options)
            if pictures.end <= length:
                yield _Document(min(length, len(tokens.ids)), pictures.patches, len(pictures.sizes))


def _packed(documents: list[_Document], length: int) -> Iterator[_Document]:
    """Yield sequences that are filled with one document after the other."""
    row = _Document(0, 0, 0)
    for each in documents:
        if row.tokens + each.tokens > length:
            yield row
            row = _Document(0, 0, 0)
        row = _Document(*(a + b for a, b in zip(row, each, strict=True)))
    if row.tokens:
        yield row


def _speed(vision: Vision, found: list[tuple[Path, Record]]) -> Speed | None:
    """Time a few files on one core: decoding, and the processor. The first one is not timed."""
    names = [(folder, name) for folder, record in found if isinstance(record, Pictured) for name in record.images]
    seconds, files, threads = 0.0, -1, torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for folder, name in names[: TIMED + 1]:
            with suppress(BadImage, OSError):
                size_of(folder, name)
                begun = time.perf_counter()
                vision.outputs([decode(folder, name)])
                seconds += (time.perf_counter() - begun) * (files >= 0)
                files += 1
    finally:
        torch.set_num_threads(threads)
    return Speed(files, seconds) if files > 0 else None
