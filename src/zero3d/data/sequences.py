"""Sequences of tokens as tensors: what a model gets, one at a time and stacked.

    tokens           A A A A B B | B C C . .     two sequences of 6, packed
    input_ids        a b c d e f | g h i p p p
    position_ids     0 1 2 3 0 1 | 0 0 1 0 1 2   start again in every span, and in the padding
    labels           - b c d - f | - - i - - -   - is -100: a span's first token would be predicted
                                                 from another document; padding; what is no target

Labels stand where their token stands: Hugging Face models shift them. Without packing there is one
span per sequence, no position_ids, and a micro-batch is padded on the right to its longest: causal
attention never looks right, so padding needs no attention mask. Ranks that each take a slice of every
sequence need lengths that are a `multiple` of their number.
"""

from __future__ import annotations

from collections.abc import Sequence as Listed
from typing import Protocol

import numpy
import torch
from torch import Tensor

from zero3d.data.orders import Order, Stream
from zero3d.data.packing import Documents, Ints, Plan, count_targets, plan
from zero3d.data.store import TokenStore

IGNORED = -100
Sample = dict[str, Tensor]  # int64 [tokens] each; position_ids of M-RoPE models [4, tokens]
Batch = dict[str, Tensor]  # int64 [micro_batch, tokens] each; such positions [4, micro_batch, tokens]


class Samples(Protocol):
    """What is trained on and evaluated on: numbered samples, which a run takes in its own order.

    length     tokens of the longest
    documents, truncated, dropped   counts for people
    """

    length: int
    documents: int
    truncated: int
    dropped: int

    @property
    def packing(self) -> bool | str:
        """Whether a sample is of several documents, and how they are put together."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Sample:
        """Return a sample; len(self) is one of padding, without a target."""

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch."""

    @property
    def identity(self) -> dict[str, int | str]:
        """What decides each sample, equal for the same samples wherever they are kept."""

    @property
    def lengths(self) -> Ints:
        """Tokens of each sample [S]."""

    def order(self, seed: int, shuffle: bool) -> Stream:
        """Return the endless stream of indices that a run takes."""


class Sequences:
    """The sequences of a set of documents. Only numpy arrays and a path travel to a worker.

    unfit   documents left out because their images do not fit into a sequence
    limits  which limits they do not fit into
    """

    unfit, limits = 0, ""

    def __init__(
        self, store: TokenStore, documents: Documents, length: int, packing: bool | str, pad: int, multiple: int = 1
    ) -> None:
        self.length, self._multiple = length, multiple
        self.packing = packing
        self.documents = len(documents.starts)
        self._store = store
        self._pad = pad
        table = self._planned(documents)
        self._spans, self._pointers = table.spans, table.pointers
        self.truncated = table.truncated
        self.dropped = table.dropped

    def _planned(self, documents: Documents) -> Plan:
        """Return which spans of documents make which sequence."""
        return plan(documents, self.length, self.packing, self._store.targets)

    def __len__(self) -> int:
        return len(self._pointers) - 1

    @property
    def identity(self) -> dict[str, int | str]:
        """What decides each sequence's tokens: equal for the same sequences, wherever they are kept."""
        return {
            "length": self.length,
            "packing": self.packing,
            "sequences": len(self),
            "documents": self.documents,
            "digest": self._store.meta.digest,
        }

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence [S]."""
        sums = numpy.concatenate([[0], numpy.cumsum(self._spans[:, 1] - self._spans[:, 0])])
        return numpy.diff(sums[self._pointers])

    def order(self, seed: int, shuffle: bool) -> Order:
        """Return the stream of a run: all sequences, an epoch after another."""
        return Order(len(self), seed, shuffle)

    def count(self) -> tuple[int, int]:
        """Count tokens and targets of all sequences."""
        ascending = self._spans[numpy.argsort(self._spans[:, 0])]
        tokens = int((ascending[:, 1] - ascending[:, 0]).sum())
        return tokens, int(count_targets(ascending, self._store.targets).sum())

    def __getitem__(self, index: int) -> Sample:
        """Return input_ids, labels and, when packing, position_ids: [length] if packing, else of the document's length.

        Index len(self) is a sequence of padding, which has no target.
        """
        spans = self._spans_of(index)
        used = sum(int(stop - start) for start, stop in spans)
        size = self.length if self.packing else max(used, 1)
        ids = numpy.full(size, self._pad, numpy.int64)
        labels = numpy.full(size, IGNORED, numpy.int64)
        positions = numpy.arange(size)
        at = 0
        for start, stop in spans:
            end = at + int(stop - start)
            ids[at:end] = self._store.tokens[start:stop]
            labels[at + 1 : end] = ids[at + 1 : end]
            if self._store.targets is not None:
                labels[at + 1 : end][self._store.targets[start + 1 : stop] == 0] = IGNORED
            positions[at:end] -= at
            at = end
        positions[at:] -= at
        sample = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        return sample | {"position_ids": torch.from_numpy(positions)} if self.packing else sample

    def _spans_of(self, index: int) -> Ints:
        """Return the spans [spans, 2] of a sequence; none of one of padding."""
        if index == len(self):
            return numpy.zeros((0, 2), numpy.int64)
        return self._spans[self._pointers[index] : self._pointers[index + 1]]

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch, padded on the right to the longest one and to a multiple of `multiple`."""
        return stack(samples, self._pad, self._multiple)


def stack(samples: Listed[Sample], pad: int, multiple: int) -> Batch:
    """Stack samples, padded on the right with `pad` to the longest one and to a multiple of `multiple` tokens.

    Of entries [.., tokens] the micro-batch's rows are the last dimension but one.
    """
    longest = max(len(sample["input_ids"]) for sample in samples)
    longest += -longest % multiple
    fill = {"input_ids": pad, "labels": IGNORED}  # else 0

    def row(values: Tensor, name: str) -> Tensor:
        return torch.nn.functional.pad(values, (0, longest - values.shape[-1]), value=fill.get(name, 0))

    return {name: torch.stack([row(sample[name], name) for sample in samples], -2) for name in samples[0]}


def padded_alike(batches: Listed[Batch], pad: int) -> list[Batch]:
    """Return micro-batches padded on the right to one length: tokens with `pad`, labels as no targets, others with 0.

    What has another shape than tokens, such as pixels, stays as it is.
    """
    longest = max(batch["input_ids"].shape[-1] for batch in batches)
    fill = {"input_ids": pad, "labels": IGNORED}

    def to_longest(batch: Batch) -> Batch:
        ids = batch["input_ids"]
        missing = longest - ids.shape[-1]
        if not missing:
            return batch
        rows = {name for name, t in batch.items() if t.shape[-2:] == ids.shape and not t.is_floating_point()}
        return {
            name: torch.nn.functional.pad(t, (0, missing), value=fill.get(name, 0)) if name in rows else t
            for name, t in batch.items()
        }

    return [to_longest(batch) for batch in batches]
