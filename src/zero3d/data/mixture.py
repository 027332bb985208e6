"""Several sources as one set of sequences: each with a weight, an order and a held-out loss of its own.

A pass (an epoch) is as many sequences as all sources have together. Without weights each counts by its size, and a
pass shows every sequence once; with weights a source is passed over more or less often than that.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence as Listed
from fractions import Fraction
from typing import NamedTuple

import numpy

from zero3d.data.orders import Ints, MixedOrder
from zero3d.data.sequences import Batch, Sample, Samples


class Member(NamedTuple):
    """One source of a mixture. weight: relative; None where each counts by its size."""

    name: str
    samples: Samples
    weight: float | None = None


class Mixture:
    """The sequences of all members, numbered through."""

    def __init__(self, members: Listed[Member]) -> None:
        self.members = members
        first = members[0].samples
        self.length, self.packing = first.length, first.packing
        self.truncated = sum(member.samples.truncated for member in members)
        self.dropped = sum(member.samples.dropped for member in members)
        self.documents = sum(member.samples.documents for member in members)
        self._stack = first.stack
        counts = [len(member.samples) for member in members]
        self._stops = [sum(counts[: source + 1]) for source in range(len(counts))]
        self.weights = [
            Fraction(repr(member.weight)) if member.weight is not None else Fraction(count)
            for member, count in zip(members, counts, strict=True)
        ]

    def __len__(self) -> int:
        return self._stops[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return a sample; len(self) is one of padding."""
        source = min(bisect_right(self._stops, index), len(self.members) - 1)
        samples = self.members[source].samples
        return samples[index - self._stops[source] + len(samples)]

    def stack(self, samples: Listed[Sample]) -> Batch:
        """Stack samples to a micro-batch, as each member does."""
        return self._stack(samples)

    @property
    def identity(self) -> dict[str, int | str]:
        """What decides each sequence's tokens, and from which source each comes."""
        of_members = [member.samples.identity for member in self.members]
        digests = hashlib.sha256(" ".join(str(each["digest"]) for each in of_members).encode())
        return {
            **of_members[0],
            "sequences": len(self),
            "documents": self.documents,
            "digest": digests.hexdigest()[:16],
            "weights": ", ".join(f"{float(weight):g}" for weight in self.weights),
        }

    @property
    def lengths(self) -> Ints:
        """Tokens of each sequence [S]."""
        return numpy.concatenate([member.samples.lengths for member in self.members])

    def order(self, seed: int, shuffle: bool) -> MixedOrder:
        """Return the stream of a run."""
        return MixedOrder([len(member.samples) for member in self.members], self.weights, seed, shuffle)

    def describe(self) -> Iterator[str]:
        """Yield for each source its share, and how often an epoch passes over it."""
        total = sum(self.weights)
        for member, weight in zip(self.members, self.weights, strict=True):
            share = weight / total
            passes = float(share * len(self) / len(member.samples))
            yield f"source {member.name}: {float(share):.1%} of the samples; an epoch passes {passes:.3g} times over it"


def parts_of(samples: Samples) -> list[tuple[str, Samples]]:
    """Return the sources of a set with their names; one without a name where it is no mixture."""
    if isinstance(samples, Mixture):
        return [(member.name, member.samples) for member in samples.members]
    return [("", samples)]
