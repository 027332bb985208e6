"""A user's own data: `data.train: module:function`, whose items are read by index when a batch needs them.

    function() -> object with __len__() and __getitem__(index)
    item       {input_ids, labels}      token ids, and which are learnt (-100: not; without labels all)
               {text}, {prompt, completion}, {messages}      as a line of a jsonl file

An item is a sequence; nothing is packed or kept on disk. Index and order are ours, so a run goes on exactly where it
was as long as the object gives the same item for the same index. Workers call the function once more each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence as Listed
from typing import Any, Protocol

import numpy
import torch
from numpy.typing import NDArray

from zero3d.config.own_code import imported, in_one_line
from zero3d.data.encode import Counts, Encoder
from zero3d.data.image_files import BadImage, decode
from zero3d.data.image_tokens import ImageTokens
from zero3d.data.kept_images import Pictures
from zero3d.data.orders import Ints, Order
from zero3d.data.records import KEYS, BadRecord, record_of
from zero3d.data.sequences import IGNORED, Batch, Sample, stack
from zero3d.data.tokenizers import Tokenizer
from zero3d.errors import DataError, Zero3dError, short

WANTED = "{input_ids: [tokens], labels: [tokens]}, {text}, {prompt, completion} or {messages}"


class Items(Protocol):
    """Records that are read by index.

    name    what messages call all of them
    says    what decides them: a run goes on only with the same
    where   where one that cannot be used is put right: the function, the file
    unread  keys of records at which nobody looks
    """

    name: str
    count: int
    says: str
    where: str
    unread: Listed[str]

    def place(self, index: int) -> str:
        """Return what a message calls an item."""

    def item(self, index: int) -> Mapping[str, Any]:
        """Return an item. Raises DataError."""

    @property
    def lengths(self) -> Ints:
        """Tokens of each item [items]. Raises DataError, ConfigError where nobody knows."""


class OwnData:
    """What a function returned: checked access by index. Pickling carries the function's name."""

    where = "function"
    unread: Listed[str] = ()

    def __init__(self, name: str) -> None:
        self.name = name
        function = imported("data.train", name)
        self._items = self._try(function, "") if callable(function) else function
        kind = type(self._items).__name__
        missing = [method for method in ("__len__", "__getitem__") if not hasattr(type(self._items), method)]
        if missing:
            raise DataError(
                f"{name} returns a {kind} without {' and '.join(missing)}: what can be resumed exactly is read by "
                "index, so return an object with both."
            )
        self.count = self._try(lambda: len(self._items), " when asked for its length")
        if not self.count:
            raise DataError(f"{name} returns a {kind} of length 0: there is nothing to train on.")
        self.says = f"{name} {self.count}"

    def __reduce__(self) -> tuple[type[OwnData], tuple[str]]:
        return OwnData, (self.name,)

    def place(self, index: int) -> str:
        """Return what a message calls an item."""
        return f"{self.name} at index {index:,} of {self.count:,}"

    def item(self, index: int) -> Mapping[str, Any]:
        """Return an item. Raises DataError where the object has none, or no mapping."""
        item = self._try(lambda: self._items[index], f" at index {index:,} of {self.count:,}")
        if not isinstance(item, Mapping):
            raise DataError(f"{self.place(index)} gives a {type(item).__name__}; expected {WANTED}.")
        return item

    @property
    def lengths(self) -> Ints:
        """Tokens of each item, which the object says in `lengths` [items]."""
        found = getattr(self._items, "lengths", None)
        if found is None:
            raise DataError(
                f"data.group_by_length sorts by length, and what {self.name} returns does not say how long its items "
                "are: give it an attribute lengths [items], or set data.group_by_length=false."
            )
        lengths = whole_numbers(found, f"lengths of {self.name}")
        if len(lengths) != self.count:
            raise DataError(f"lengths of {self.name} has {len(lengths):,} numbers for {self.count:,} items.")
        return lengths

    def _try(self, action: Callable[[], Any], when: str) -> Any:
        try:
            return action()
        except Zero3dError:
            raise
        except Exception as error:  # whatever a user's code does
            raise DataError(f"{self.name} raised{when}: {in_one_line(error)}") from error


class OwnSamples:
    """The items at `indices` as samples of at most `length` tokens; longer ones are truncated."""

    packing = False
    truncated = dropped = 0

    def __init__(
        self,
        own: Items,
        indices: Ints,
        length: int,
        tokenizer: Tokenizer | None,
        *,
        vocabulary: int | None = None,
        multiple: int = 1,
        images: ImageTokens | None = None,
    ) -> None:
        self.length = length
        self.documents = len(indices)
        self._own, self._indices = own, indices
        self._encoder = Encoder(tokenizer, remedy=f"Correct it in the {own.where}.", images=images)
        self._pad = tokenizer.pad if tokenizer else 0
        self._vocabulary, self._multiple = vocabulary, multiple

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        """Return input_ids and labels [tokens]; index len(self) is padding. Raises DataError."""
        if index == len(self):
            return self._sample(numpy.full(1, self._pad), numpy.full(1, IGNORED), Pictures(), "")
        return self._read(int(self._indices[index]))

    def _sample(self, ids: Ints, labels: Ints, pictures: Pictures, place: str) -> Sample:
        """Return a sample as a batch takes it. Raises DataError."""
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}

    def _read(self, index: int) -> Sample:
        item, place = self._own.item(index), self._own.place(index)
        ids, labels, pictures = self._given(item, place) if "input_ids" in item else self._encoded(item, place)
        highest = int(ids.max())
        if int(ids.min()) < 0 or (self._vocabulary is not None and highest >= self._vocabulary):
            wrong = int(ids.min()) if int(ids.min()) < 0 else highest
            rows = "" if self._vocabulary is None else f": the model's vocabulary has {self._vocabulary:,}"
            raise DataError(f"{place} gives the token id {wrong:,}, which is none{rows}.")
        if pictures.end > self.length:
            raise DataError(
                f"{place} has images' tokens up to number {pictures.end:,}, which data.length={self.length:,} would "
                f"cut: set a larger one, or leave it out in the {self._own.where}."
            )
        ids, labels = ids[: self.length], labels[: self.length].copy()
        labels[0] = IGNORED  # nothing predicts it
        if (labels == IGNORED).all():
            raise DataError(
                f"{place} has no target among its first {len(ids):,} tokens, and a loss without one is 0/0: leave it "
                f"out in the {self._own.where}, or set a larger data.length."
            )
        return self._sample(ids, labels, pictures, place)

    def _given(self, item: Mapping[str, Any], place: str) -> tuple[Ints, Ints, Pictures]:
        ids = whole_numbers(item["input_ids"], f"input_ids of {place}")
        if item.get("labels") is None:
            return ids, ids, Pictures()
        labels = whole_numbers(item["labels"], f"labels of {place}")
        if len(labels) != len(ids):
            raise DataError(f"{place} gives {len(labels):,} labels for {len(ids):,} input_ids: expected one for each.")
        odd = labels[(labels != IGNORED) & ((labels < 0) | (labels >= (self._vocabulary or 1 << 32)))]
        if len(odd):
            raise DataError(f"{place} gives the label {int(odd[0]):,}: expected a token id, or {IGNORED}.")
        return ids, labels, Pictures()

    def _encoded(self, item: Mapping[str, Any], place: str) -> tuple[Ints, Ints, Pictures]:
        if not any(key in item for key in (*KEYS, "conversations")):
            raise DataError(f"{place} gives the keys {', '.join(map(short, item)) or 'none'}; expected {WANTED}.")
        record = record_of(item, place)
        if isinstance(record, BadRecord):
            raise DataError(f"{place}: {record.why.removesuffix('.')}. Correct it in the {self._own.where}.")
        ids, targets, *_, pictures = next(self._encoder.encode([record]))
        if not len(ids):
            raise DataError(f"{place} is empty: leave it out in the {self._own.where}.")
        return ids, ids if targets is None else numpy.where(targets == 0, IGNORED, ids), pictures

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch, padded on the right."""
        return stack(samples, self._pad, self._multiple)

    @property
    def counts(self) -> Counts:
        """Return the counts of the items that this process has read."""
        return self._encoder.counts

    @property
    def identity(self) -> dict[str, int | str]:
        """Return what tells these items from others: the name of the function, and how many it gives."""
        digest = hashlib.sha256(self._own.says.encode()).hexdigest()[:16]
        return {
            "length": self.length,
            "packing": False,
            "sequences": len(self),
            "documents": len(self),
            "digest": digest,
        }

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample [S], as the object says. Raises DataError where it does not."""
        return numpy.minimum(self._own.lengths[self._indices], self.length)

    def order(self, seed: int, shuffle: bool) -> Order:
        """Return the stream of a run: all items, an epoch after another."""
        return Order(len(self), seed, shuffle)


def whole_numbers(value: Any, what: str) -> Ints:
    """Return token ids of a list, an array or a tensor as int64 [n]. Raises DataError for anything else."""
    try:
        array: NDArray[Any] = numpy.asarray(value)
    except (TypeError, ValueError, RuntimeError):  # ragged lists, tensors of a device
        raise DataError(
            f"{what} is a {type(value).__name__} that makes no array; expected whole numbers [n]."
        ) from None
    if not array.size:
        raise DataError(f"{what} is empty.")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{what} is {array.dtype} of shape {list(array.shape)}; expected whole numbers [n].")
    return array.astype(numpy.int64)


class ImageItems(OwnSamples):
    """Items at `indices`, any of which may have images: files, a file's bytes, or images of PIL's."""

    def __init__(
        self,
        own: Items,
        indices: Ints,
        length: int,
        tokenizer: Tokenizer | None,
        *,
        vocabulary: int | None = None,
        multiple: int = 1,
        images: ImageTokens,
    ) -> None:
        super().__init__(own, indices, length, tokenizer, vocabulary=vocabulary, multiple=multiple, images=images)
        self._images = images

    def _sample(self, ids: Ints, labels: Ints, pictures: Pictures, place: str) -> Sample:
        try:
            images = [decode(self._images.folder, image) for image in pictures.names]
            return self._images.vision.shown(super()._sample(ids, labels, pictures, place), [images])
        except BadImage as error:
            raise DataError(f"{', '.join(filter(None, (place, pictures.named)))}: {error}.") from error

    @property
    def identity(self) -> dict[str, int | str]:
        """Return what tells these items from others, and the processor that makes their pixels."""
        return super().identity | {"processor": self._images.vision.fingerprint}

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch: tokens padded on the right, pixels of all images in their order."""
        return self._images.vision.stacked(samples, super().stack)
