"""Steps whose sequences have images all, or none, as LLaVA trains: a step then takes the time of one kind.

    pass of 20 sequences, batches of 4      i t i i | t i t t | i i ...     as they are drawn
                                            i i i i | t t t t | i i i i | i i t t

Each pass is made of whole batches of one kind, in an order of their own; what is left of both kinds comes last.
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from zero3d.data.image_sequences import ImageSequences
from zero3d.data.mixture import Mixture
from zero3d.data.orders import Ints, Stream
from zero3d.data.sequences import Samples, Sequences


def pictured(samples: Samples) -> NDArray[numpy.bool_] | None:
    """Return which samples have an image [S]; None where that is known only when they are read."""
    if isinstance(samples, Mixture):
        found = [pictured(member.samples) for member in samples.members]
        known = [kinds for kinds in found if kinds is not None]
        return numpy.concatenate(known) if len(known) == len(found) else None
    if isinstance(samples, ImageSequences):
        return samples.pictured
    return numpy.zeros(len(samples), bool) if isinstance(samples, Sequences) else None


def mixed(kinds: NDArray[numpy.bool_] | None) -> bool:
    """Return whether some samples are known to have an image, and some to have none."""
    return kinds is not None and bool(kinds.any()) and not kinds.all()


class ModalityOrder:
    """A stream whose batches are of one kind.

    kinds   [S]   bool, of all samples
    batch   sequences of a step
    """

    def __init__(self, stream: Stream, kinds: NDArray[numpy.bool_], batch: int, seed: int) -> None:
        self.count = stream.count
        self._stream, self._kinds = stream, kinds
        self._batch, self._seed = batch, seed
        self._passes: dict[int, Ints] = {}

    def samples(self, start: int, stop: int) -> list[int]:
        """Return the indices at these places of the stream."""
        found = []
        for place in range(start, stop):
            first = place - place % self.count
            if first not in self._passes:
                self._passes = {of: order for of, order in self._passes.items() if of == first - self.count}
                self._passes[first] = self._pass(first)
            found.append(int(self._passes[first][place - first]))
        return found

    def _pass(self, first: int) -> Ints:
        """Return the order of the pass that begins at a place."""
        drawn = numpy.asarray(self._stream.samples(first, first + self.count), numpy.int64)
        head = -first % self._batch  # places of a batch that the pass before began
        whole = (self.count - head) // self._batch
        # places in `drawn`: a source with a weight may be drawn from more than once in a pass
        of_kind = [numpy.flatnonzero(self._kinds[drawn] == kind) for kind in (True, False)]
        batches = [part for places in of_kind for part in self._cut(places)][:whole]
        used = numpy.concatenate([numpy.zeros(0, numpy.int64), *batches])
        rest = numpy.concatenate(of_kind)
        rest = rest[~numpy.isin(rest, used)]
        turns = numpy.random.default_rng([self._seed, first]).permutation(len(batches))
        order: Ints = drawn[numpy.concatenate([rest[:head], *(batches[turn] for turn in turns), rest[head:]])]
        return order

    def _cut(self, places: Ints) -> list[Ints]:
        return [places[at : at + self._batch] for at in range(0, len(places) - self._batch + 1, self._batch)]
