"""Sequences with images: tokens as without, pixels made when a batch is, in the worker that makes it."""

from __future__ import annotations

from collections.abc import Sequence as Listed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero3d.data.image_files import BadImage, decode
from zero3d.data.images import Vision
from zero3d.data.kept_images import KeptImages, Pictures
from zero3d.data.packing import Documents
from zero3d.data.sequences import IGNORED, Batch, Sample, Sequences
from zero3d.data.store import TokenStore
from zero3d.errors import DataError

PIXELS = "images"  # the entry of a sample that has its decoded images


@dataclass(frozen=True)
class ImageSource:
    """Where images come from, and what makes pixels of them. skip: a damaged one costs its targets, not the run."""

    folder: Path
    vision: Vision
    skip: bool


class ImageSequences(Sequences):
    """Sequences of one document each, any of which may have images."""

    def __init__(
        self, store: TokenStore, documents: Documents, length: int, pad: int, multiple: int, images: ImageSource
    ) -> None:  # fmt: skip
        kept = KeptImages(store.folder)
        starts = numpy.asarray(store.documents().starts)
        at = numpy.searchsorted(starts, documents.starts)
        fits = numpy.asarray(kept.ends)[at] <= length
        super().__init__(store, documents.some(fits), length, False, pad, multiple)
        self.unfit = int((~fits).sum())
        self._starts, self._images = starts, images

    @property
    def identity(self) -> dict[str, int | str]:
        """What decides each sequence's tokens and pixels."""
        return super().identity | {"processor": self._images.vision.fingerprint}

    @property
    def pictured(self) -> NDArray[numpy.bool_]:
        """Whether each sequence has an image [S]."""
        has: NDArray[numpy.bool_] = KeptImages(self._store.folder).has[self._documents(self._spans[:, 0])]
        return has

    def __getitem__(self, index: int) -> Sample:
        """Return input_ids, labels, what tells images' tokens from others, and the decoded images.

        Index len(self) is one of padding: the first sequence without a target, so that it has images if that has.
        """
        sample: dict[str, Any] = super().__getitem__(index if index < len(self) else 0)
        pictures = KeptImages(self._store.folder)[int(self._documents(self._spans[index % len(self), 0]))]
        images, whole = self._decode(pictures)
        if index >= len(self) or not whole:
            sample["labels"] = torch.full_like(sample["labels"], IGNORED)
        sample |= self._images.vision.kinds(sample["input_ids"], sample["labels"])
        return sample | {PIXELS: images}

    def _documents(self, starts: Any) -> Any:
        """Return which documents of the store begin at these tokens."""
        return numpy.searchsorted(self._starts, starts)

    def _decode(self, pictures: Pictures) -> tuple[list[Any], bool]:
        """Return a document's images, and whether all are whole. Raises DataError."""
        from PIL import Image

        images, whole = [], True
        for name, size in zip(pictures.names, pictures.sizes, strict=True):
            try:
                image = decode(self._images.folder, name)
                if image.size != size:
                    raise BadImage(
                        f"the image {self._images.folder / name} is {image.size[0]} x {image.size[1]} and was "
                        f"{size[0]} x {size[1]} when its tokens were made: remove data.cache's folder, or put it back"
                    )
            except BadImage as error:
                if not self._images.skip:
                    raise DataError(f"{error}; or leave such samples out with data.skip_bad_lines=true.") from error
                image, whole = Image.new("RGB", size), False
            images.append(image)
        return images, whole

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch: tokens padded on the right, pixels of all images in their order."""
        plain = [{name: value for name, value in sample.items() if name != PIXELS} for sample in samples]
        images = [image for sample in samples for image in sample[PIXELS]]
        return super().stack(plain) | (self._pixels(images) if images else {})

    def _pixels(self, images: Listed[Any]) -> dict[str, Tensor]:
        return self._images.vision.pixels(images)
