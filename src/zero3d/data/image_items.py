"""Items with images, read by index: of a user's own function, or of files that are streamed."""

from __future__ import annotations

from collections.abc import Sequence as Listed

from zero3d.data.image_files import BadImage, decode
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.kept_images import Pictures
from zero3d.data.orders import Ints
from zero3d.data.own import Items, OwnSamples
from zero3d.data.sequences import Batch, Sample
from zero3d.data.tokenizers import Tokenizer
from zero3d.errors import DataError


class ImageItems(OwnSamples):
    """Items at `indices`, any of which may have images: files, a file's bytes, or images of PIL's."""

    def __init__(
        self, own: Items, indices: Ints, length: int, tokenizer: Tokenizer | None, *,
        vocabulary: int | None = None, multiple: int = 1, images: ImageTokens,
    ) -> None:  # fmt: skip
        super().__init__(own, indices, length, tokenizer, vocabulary=vocabulary, multiple=multiple, images=images)
        self._images = images

    def _sample(self, ids: Ints, labels: Ints, pictures: Pictures, place: str) -> Sample:
        try:
            images = [decode(self._images.folder, image) for image in pictures.names]
        except BadImage as error:
            raise DataError(f"{place}: {error}.") from error
        return self._images.vision.shown(super()._sample(ids, labels, pictures, place), images)

    @property
    def identity(self) -> dict[str, int | str]:
        """What the items say of themselves, and what makes pixels."""
        return super().identity | {"processor": self._images.vision.fingerprint}

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch: tokens padded on the right, pixels of all images in their order."""
        return self._images.vision.stacked(samples, super().stack)
