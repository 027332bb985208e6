"""A sum for each tensor beside its file's checksum: that says whether bytes have changed, this says of which tensor.

Elements are taken as whole numbers of their width, and added modulo 2^(8 x width). One element that has changed always
changes the sum; two may cancel each other. It takes a few hundredths of what the SHA-256 of the same bytes takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy


class Place(NamedTuple):
    """Says where a tensor's bytes end among those of all, and how many bytes an element has."""

    key: str
    stop: int
    width: int


class TensorSums:
    """Adds up tensors whose bytes come by in order, in parts none of which is of two tensors.

    sums  key -> the sum in hexadecimal digits
    """

    def __init__(self, places: Iterable[Place]) -> None:
        self._places = list(places)
        self.sums = {place.key: "0" for place in self._places}
        self._at = self._index = 0

    def add(self, data: bytes | memoryview) -> None:
        """Take the next bytes."""
        if not memoryview(data).nbytes:
            return
        while self._at == self._places[self._index].stop:  # those without elements have no bytes
            self._index += 1
        key, _, width = self._places[self._index]
        self._at += memoryview(data).nbytes
        self.sums[key] = f"{(int(self.sums[key], 16) + word_sum(data, width)) % (1 << 8 * width):x}"


def word_sum(data: bytes | memoryview, width: int) -> int:
    """Return the sum of elements of this width, modulo 2^(8 x width)."""
    words = numpy.frombuffer(data, f"<u{width}")
    return int(words.sum(dtype=words.dtype))
