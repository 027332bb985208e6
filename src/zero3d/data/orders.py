"""The order of samples: an endless stream, each place of which is known without those before it.

    Order          the samples of one source, each pass in an order of its own
    MixedOrder     those of several sources by their weights
    GroupedOrder   either, with samples of similar length in a batch

A place is a number of samples from the beginning of a run. What is there depends on the seed and on the data,
never on ranks, workers or where a run was interrupted.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Protocol

import numpy
from numpy.typing import NDArray

Ints = NDArray[numpy.int64]
WINDOW = 64  # batches among which samples are sorted by length


class Stream(Protocol):
    """An endless stream of indices of samples; `count` are a pass."""

    count: int

    def samples(self, start: int, stop: int) -> list[int]:
        """Return the indices at these places of the stream."""


class Order:
    """The samples of one source, a pass after another; `source` numbers it among several."""

    def __init__(self, count: int, seed: int, shuffle: bool, source: int = 0) -> None:
        self.count = count
        self._seed = (seed, source)
        self._shuffle = shuffle
        self._passes: dict[int, Ints] = {}

    def samples(self, start: int, stop: int) -> list[int]:
        """Return the indices at these places of the stream."""
        return [int(self._pass(place // self.count)[place % self.count]) for place in range(start, stop)]

    def _pass(self, number: int) -> Ints:
        if number not in self._passes:
            seed, source = self._seed
            generator = numpy.random.default_rng([seed, number, source] if source else [seed, number])
            order = generator.permutation(self.count) if self._shuffle else numpy.arange(self.count)
            self._passes = {of: indices for of, indices in self._passes.items() if of == number - 1} | {number: order}
        return self._passes[number]


class MixedOrder:
    """Several sources by weights: place k -> (source, place in that source's own order), in closed form.

        place          0 1 2 3 4 5 6 7 8 9      weights 1/2, 1/3, 1/6
        source 0       0   1   2   3   4        every place whose ceil(k / 2) grows
        the others       0   1   2   3   4      source 1 takes those of them whose ceil(k' * 2/3) grows, ...

    So a source never is further from its share than there are sources, and none has a sample twice within a pass
    over it. Indices count through all sources: source i's begin at the sum of the counts before.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[Fraction], seed: int, shuffle: bool) -> None:
        self.count = sum(counts)
        self._orders = [Order(count, seed, shuffle, source) for source, count in enumerate(counts)]
        self._firsts = [sum(counts[:source]) for source in range(len(counts))]
        self._of_rest = [weight / sum(weights[source:]) for source, weight in enumerate(weights)]

    def samples(self, start: int, stop: int) -> list[int]:
        """Return the indices at these places of the stream."""
        found = []
        for place in range(start, stop):
            source, own = self.locate(place)
            found.append(self._firsts[source] + self._orders[source].samples(own, own + 1)[0])
        return found

    def locate(self, place: int) -> tuple[int, int]:
        """Return the source at a place, and how many samples of it came before."""
        for source, share in enumerate(self._of_rest):
            taken = _ceil(share, place)
            if _ceil(share, place + 1) > taken:
                return source, taken
            place -= taken
        raise AssertionError("the last source takes all that is left")

    def taken(self, place: int) -> list[int]:
        """Return how many samples of each source come before a place."""
        counts = []
        for share in self._of_rest:
            counts.append(_ceil(share, place))
            place -= counts[-1]
        return counts


class GroupedOrder:
    """A stream with samples of similar length in each batch.

    Each pass is cut into windows of WINDOW batches. In one, samples are sorted by length and handed to its batches,
    which come in an order of their own; a batch that two windows share gets a run of each.

    lengths   [S]   of all samples, in tokens
    """

    def __init__(self, stream: Stream, lengths: Ints, batch: int, seed: int) -> None:
        self.count = stream.count
        self._stream, self._lengths = stream, lengths
        self._batch, self._seed = batch, seed
        self._windows: dict[int, list[int]] = {}

    def samples(self, start: int, stop: int) -> list[int]:
        """Return the indices at these places of the stream."""
        found = []
        for place in range(start, stop):
            first = self._first_of_window(place)
            if first not in self._windows:
                self._windows = {first: self._window(first)}
            found.append(self._windows[first][place - first])
        return found

    def _first_of_window(self, place: int) -> int:
        begin = place - place % self.count
        size = WINDOW * self._batch
        return begin + (place - begin) // size * size

    def _window(self, first: int) -> list[int]:
        end_of_pass = first - first % self.count + self.count
        last = min(first + WINDOW * self._batch, end_of_pass)
        indices = numpy.asarray(self._stream.samples(first, last), numpy.int64)
        ascending = indices[numpy.argsort(self._lengths[indices], kind="stable")]
        cells = numpy.split(numpy.arange(first, last), numpy.arange(-first % self._batch, last - first, self._batch))
        cells = [cell for cell in cells if len(cell)]
        placed = numpy.empty(last - first, numpy.int64)
        at = 0
        for cell in numpy.random.default_rng([self._seed, first]).permutation(len(cells)):
            placed[cells[cell] - first] = ascending[at : at + len(cells[cell])]
            at += len(cells[cell])
        return [int(index) for index in placed]


def _ceil(share: Fraction, place: int) -> int:
    return -(-share.numerator * place // share.denominator)
