"""Sequences with images: tokens as without, pixels made when a batch is, in the worker that makes it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from zero3d.data.image_files import BadImage, decode
from zero3d.data.images import Vision
from zero3d.data.kept_images import KeptImages, Size
from zero3d.data.packing import Documents
from zero3d.data.sequences import IGNORED, Batch, Sample, Sequences
from zero3d.data.store import TokenStore
from zero3d.errors import DataError


@dataclass(frozen=True)
class ImageSource:
    """Where images come from, and what makes pixels of them. skip: another sample stands in for one with a damaged."""

    folder: Path
    vision: Vision
    skip: bool


class ImageSequences(Sequences):
    """Sequences of one document each, any of which may have images."""

    def __init__(
        self, store: TokenStore, documents: Documents, length: int, pad: int, multiple: int, images: ImageSource
    ) -> None:
        kept = KeptImages(store.folder)
        starts = numpy.asarray(store.documents().starts)
        at = numpy.searchsorted(starts, documents.starts)
        fits = numpy.asarray(kept.ends)[at] <= length
        super().__init__(store, documents.some(fits), length, False, pad, multiple)
        self.unfit = int((~fits).sum())
        self._starts, self._images = starts, images
        self._damaged = 0  # images met so far in this process

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
        """Return input_ids, labels, what tells images' tokens from others, and what the processor made of the images.

        Index len(self) is one of padding: the first sequence without a target, so that it has images if that has.
        With `skip` the next sequence with images stands in for one with a damaged image: one without targets would
        leave a micro-batch with nothing to average. Raises DataError where none is whole.
        """
        sample = self._whole(index % len(self))
        if index == len(self):
            sample["labels"] = torch.full_like(sample["labels"], IGNORED)
        return sample

    def _whole(self, index: int) -> dict[str, Any]:
        """Return this sample, or the one which stands in for it."""
        kept = KeptImages(self._store.folder)
        for taken in (*range(index, len(self)), *range(index)):
            pictures = kept[int(self._documents(self._spans[taken, 0]))]
            if taken != index and not pictures.names:
                continue
            try:
                images = [self._decode(*image) for image in zip(pictures.names, pictures.sizes, strict=True)]
                return self._images.vision.shown(super().__getitem__(taken), [images])
            except BadImage as error:
                place = f"sequence {taken:,}, with {', '.join(pictures.names)}"
                if not self._images.skip:
                    raise DataError(
                        f"{place}: {error}; or leave such samples out with data.skip_bad_lines=true."
                    ) from error
                self._damaged += 1
                warnings.warn(
                    f"{place}: {error}. Another sample with images stands in for it (damaged so far: "
                    f"{self._damaged:,}).",
                    stacklevel=2,
                )
        raise DataError("no image of the data is whole: copy them again.")

    def _documents(self, starts: Any) -> Any:
        """Return which documents of the store begin at these tokens."""
        return numpy.searchsorted(self._starts, starts)

    def _decode(self, name: str, size: Size) -> Any:
        """Return an image that is as large as when its tokens were made. Raises BadImage."""
        image = decode(self._images.folder, name)
        if image.size != size:
            raise BadImage(
                f"the image {self._images.folder / name} is {image.size[0]} x {image.size[1]} and was "
                f"{size[0]} x {size[1]} when its tokens were made: remove data.cache's folder, or put it back"
            )
        return image

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch: tokens padded on the right, pixels of all images in their order."""
        return self._images.vision.stacked(samples, super().stack)
