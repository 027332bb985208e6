"""Sequences with images: tokens as without, pixels made when a batch is, in the worker that makes it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence as Listed
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from zero3d.data.image_files import BadImage, decode
from zero3d.data.images import PIXELS, Vision, white
from zero3d.data.kept_images import KeptImages, Pictures, Size
from zero3d.data.packing import Budget, Documents, Plan, joined, plan
from zero3d.data.sequences import IGNORED, Batch, Sample, Sequences
from zero3d.data.store import TokenStore
from zero3d.errors import DataError


@dataclass(frozen=True)
class ImageSource:
    """Where images come from, and what makes pixels of them.

    skip     nothing is learnt of a document with a damaged image
    apart    packed rows are of documents with images, or of others
    patches  most in a row, of all its images
    rows     of a micro-batch, which share data.patches out
    """

    folder: Path
    vision: Vision
    skip: bool
    apart: bool = True
    patches: int | None = None
    rows: int = 1


class ImageSequences(Sequences):
    """Sequences of documents that may have images: whole ones, since no image is cut."""

    def __init__(
        self,
        store: TokenStore,
        documents: Documents,
        length: int,
        packing: bool | str,
        pad: int,
        multiple: int,
        images: ImageSource,
    ) -> None:
        self._starts, self._images = numpy.asarray(store.documents().starts), images
        self._kept = KeptImages(store.folder)
        at = self._documents(documents.starts)
        long = numpy.asarray(self._kept.ends[at] > length)
        many = numpy.asarray(self._kept.patches[at] > (images.patches or inf))
        super().__init__(store, documents.some(~(long | many)), length, packing, pad, multiple)
        self.unfit = int((long | many).sum())
        self.limits = self._limits(at, long, many) if self.unfit else ""
        self._damaged = 0  # images met so far in this process

    def _planned(self, documents: Documents) -> Plan:
        if not self.packing or not len(documents.starts):
            return super()._planned(documents)
        has, most = self._kept.has[self._documents(documents.starts)], self._images.patches
        budget = None if most is None else Budget(lambda starts: self._kept.patches[self._documents(starts)], most)
        kinds = [has, ~has] if self._images.apart else [numpy.ones(len(has), bool)]
        of = self.length, self.packing, self._store.targets, budget
        return joined([plan(documents.some(kind), *of) for kind in kinds if kind.any()])

    def _limits(self, documents: Any, long: NDArray[numpy.bool_], many: NDArray[numpy.bool_]) -> str:
        """Say why images of documents do not fit, and what to type where none with images does.

        documents   numbers of all
        long, many  which of them have images' tokens behind data.length, and more patches than a row may have
        """
        ends, patches, rows = self._kept.ends[documents], self._kept.patches[documents], self._images.rows
        told = []
        if long.any():
            told.append(
                f"{long.sum():,} with tokens of images behind data.length={self.length} (the shortest needs "
                f"{ends[long].min():,})"
            )
        if many.any():
            told.append(
                f"{many.sum():,} with more patches than data.patches / train.micro_batch = {self._images.patches:,} "
                f"(the smallest has {patches[many].min():,})"
            )
        has = numpy.flatnonzero(self._kept.has[documents])
        if not (long | many)[has].all():
            return ", ".join(told)
        least = min(has, key=lambda each: (patches[each], ends[each]))
        typed = [f"data.length={ends[least]}"] if long[least] else []
        typed += [f"data.patches={patches[least] * rows} (= {patches[least]} x {rows})"] if many[least] else []
        return f"{', '.join(told)}; no sample with images is left: type {' and '.join(typed)} at least"

    @property
    def identity(self) -> dict[str, int | str]:
        """What decides each sequence's tokens and pixels."""
        own: dict[str, int | str] = {"processor": self._images.vision.fingerprint, "patches": self._images.patches or 0}
        if self.packing:
            own["apart"] = int(self._images.apart)
        return super().identity | own

    @property
    def pictured(self) -> NDArray[numpy.bool_]:
        """Whether each sequence has an image [S]."""
        has = self._kept.has[self._documents(self._spans[:, 0])]
        found: NDArray[numpy.bool_] = numpy.logical_or.reduceat(has, self._pointers[:-1]) if len(has) else has
        return found

    def __getitem__(self, index: int) -> Sample:
        """Return input_ids, labels, what tells images' tokens from others, and what the processor made of the images.

        When packing also position_ids [length], or [4, length] of M-RoPE models.

        Index len(self) is one of padding: the first sequence without a target, so that it has images if that has.
        With `skip` nothing is learnt of a document with a damaged image, in whose place is a blank one. Where nothing
        is left to learn the next sequence with images stands in: one without targets would leave a micro-batch with
        nothing to average. Raises DataError where none is whole.
        """
        sample = self._whole(index % len(self))
        if index == len(self):
            sample["labels"] = torch.full_like(sample["labels"], IGNORED)
        return sample

    def _whole(self, index: int) -> dict[str, Any]:
        """Return this sample, or the one which stands in for it."""
        for taken in (*range(index, len(self)), *range(index)):
            documents = [int(document) for document in self._documents(self._spans_of(taken)[:, 0])]
            pictures = [self._kept[document] for document in documents]
            if taken != index and not any(each.names for each in pictures):
                continue
            sample, damaged = self._read(taken, documents, pictures)
            learnt = bool((sample["labels"] != IGNORED).any())
            for error in damaged:
                self._damaged += 1
                fate = "Nothing of its document is learnt" if learnt else "Another sample with images stands in for it"
                warnings.warn(f"{error}. {fate} (damaged so far: {self._damaged:,}).", stacklevel=2)
            if learnt or not damaged:
                return sample
        raise DataError("no image of the data is whole: copy them again.")

    def _read(self, index: int, numbers: Listed[int], pictures: Listed[Pictures]) -> tuple[dict[str, Any], list[str]]:
        """Return a sample, and what is wrong with images of it. Raises DataError where they may not be skipped.

        numbers, pictures  of each of its documents, in the store
        """
        row, at = super().__getitem__(index), 0
        documents: list[dict[str, Any]] = []
        damaged: list[str] = []
        for (start, stop), number, shown in zip(self._spans_of(index).tolist(), numbers, pictures, strict=True):
            part = slice(at, at := at + stop - start)
            document = {name: row[name][part] for name in ("input_ids", "labels")}
            try:
                document = self._shown(document, shown)
            except BadImage as error:
                where = [self._kept.place(number), f"sequence {index:,}", shown.named]
                told = f"{', '.join(filter(None, where))}: {error}"
                if not self._images.skip:
                    remedy = "or leave such samples out with data.skip_bad_lines=true."
                    raise DataError(f"{told}; {remedy}") from error
                damaged.append(told)
                document |= {"labels": torch.full_like(document["labels"], IGNORED)}
                document = self._images.vision.shown(document, [[white(size) for size in shown.sizes]])
            documents.append(document)
        if not self.packing:
            return documents[0], damaged
        if at < self.length:
            documents.append(self._images.vision.shown({name: row[name][at:] for name in ("input_ids", "labels")}, []))
        joined = {name: torch.cat([each[name] for each in documents]) for name in documents[0] if name != PIXELS}
        positions = row["position_ids"] if self._images.vision.positions is None else self._positions(documents)
        pixels = [outputs for each in documents for outputs in each[PIXELS]]
        return joined | {"position_ids": positions, PIXELS: pixels}, damaged

    def _shown(self, document: dict[str, Any], pictures: Pictures) -> dict[str, Any]:
        """Return a document as `Vision.shown` does. Raises BadImage."""
        images = [self._decode(*image) for image in zip(pictures.names, pictures.sizes, strict=True)]
        return self._images.vision.shown(document, [images])

    def _positions(self, documents: Listed[dict[str, Any]]) -> Tensor:
        """Return the positions [4, length] of a row."""
        make, made = self._images.vision.positions, []
        assert make is not None
        for document in documents:
            kinds = {name: values for name, values in document.items() if name not in ("input_ids", "labels", PIXELS)}
            made.append(make(document["input_ids"], kinds, *document[PIXELS]))
        return torch.cat(made, -1)

    def _documents(self, starts: Any) -> Any:
        """Return which documents of the store these tokens are in."""
        return numpy.searchsorted(self._starts, starts, side="right") - 1

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
