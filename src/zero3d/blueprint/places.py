"""Which records of model states leave the device, and how long they are. Pure arithmetic, no torch.

A unit's share of states on a rank is cut into buckets; each bucket's states are one record, which moves as a whole:

    on the host    [master | states]               master: int16 remainder, fp32, or nothing where the weight is it
    on a disk      [weight | remainder | states]   so that a file has the whole of an optimizer's states, if weights are
                                                   not there, too: a tier's row says that (spec/tiers.py)
    parameters     [weight]                        records of their own, one a unit, since a forward needs only them

    bytes per parameter   fp32 master, moments   split master   split, bf16 moments
    host                  12                     10             6
    disk (one slot)       12                     12             8
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from zero3d.blueprint.policy import REMAINDER
from zero3d.blueprint.state_spans import Segments
from zero3d.blueprint.unit import UnitPlan
from zero3d.memory.blocks import padded
from zero3d.spec.offload import Offload
from zero3d.spec.tiers import DEVICE, TIERS

OPTIMIZER, PARAMETERS, FROZEN, GRADIENTS = "optimizer", "parameters", "frozen", "gradients"  # kinds of records


class RecordWidths(NamedTuple):
    """Bytes per element of a record's parts."""

    weight: int
    master: int
    states: int

    @property
    def total(self) -> int:
        """Return all of them."""
        return sum(self)


def record_widths(weight: int, master: int, states: int, place: str) -> RecordWidths:
    """Return what a record of optimizer states holds at a place; on the device its bytes before it leaves.

    weight  bytes of a compute weight
    master  bytes of a master stored beside it: 4, 2 for a remainder, 0 where the weight is the master
    states  bytes of all its optimizer states
    """
    whole = place in TIERS and TIERS[place].whole
    return RecordWidths(weight if whole and master == REMAINDER else 0, master, states)


def bucket_ranges(elements: int, bucket: int) -> Iterator[tuple[int, int]]:
    """Cut what a rank updates of a unit into buckets of one size, but for the last.

    >>> list(bucket_ranges(40, 16))
    [(0, 16), (16, 32), (32, 40)]
    """
    for start in range(0, elements, bucket):
        yield start, min(start + bucket, elements)


def leave_device(nbytes: Sequence[int], fraction: float, place: str) -> list[str]:
    """Return the place of each record, given their bytes in the order in which a forward needs them.

    The last-needed leave, whole, until at least `fraction` of all bytes have left.

    >>> leave_device([10, 10, 10, 10], 0.5, "host")
    ['device', 'device', 'host', 'host']
    """
    places, left, wanted = [DEVICE] * len(nbytes), 0, fraction * sum(nbytes)
    for index in reversed(range(len(nbytes))):
        if left >= wanted:
            break
        places[index] = place
        left += nbytes[index]
    return places


class UnitStates(NamedTuple):
    """What a rank updates of a unit: elements of its storage, padding among them, and bytes of each, as above.

    states  (elements, bytes of all their optimizer states), cut where these differ
    """

    elements: int
    weight: int
    master: int
    states: Sequence[tuple[int, int]]
    gradient: int = 4
    trainable: bool = True

    @classmethod
    def of(cls, unit: UnitPlan, elements: int, segments: Segments, widths: Mapping[str, int]) -> UnitStates:
        """Return the states of a unit on a rank: so many updated elements, cut where their states differ.

        widths  bytes of an element of each state
        """
        kind, policy, weight = unit.kind, unit.policy, unit.kind.dtype.itemsize
        states = [(stop - start, sum(widths[name] for name in names)) for start, stop, names in segments]
        return cls(elements, weight, policy.stored(weight), states, policy.held.itemsize, kind.trainable)


class PlacedRecord(NamedTuple):
    """A record's place.

    unit   the number of its unit
    kind   optimizer, parameters, frozen (parameters) or gradients
    slots  how often it is there: as its tier's row says, but for frozen weights
    start  of its bucket, in what a rank updates of the unit
    """

    unit: int
    kind: str
    place: str
    elements: int
    nbytes: int
    slots: int = 1
    start: int = 0

    @property
    def held(self) -> int:
        """Return what it takes there: whole blocks off the device."""
        return self.nbytes if self.place == DEVICE else self.slots * padded(self.nbytes)


def placed_records(units: Sequence[UnitStates], offload: Offload, bucket: int) -> Iterator[PlacedRecord]:
    """Yield all records of a rank some of whose states leave the device: optimizer states, weights, gradients.

    units  in the order in which a forward needs them
    """
    trained = [number for number, unit in enumerate(units) if unit.trainable]
    cuts = [(n, *cut) for n in trained for cut in _buckets(units[n].states, bucket)]

    def nbytes(number: int, elements: int, states: int, place: str) -> int:
        widths = record_widths(units[number].weight, units[number].master, states, place)
        beside = widths.weight if offload.params != "none" else 0  # which are records of their own then
        return (widths.total - beside) * elements

    places = [DEVICE] * len(cuts)
    if offload.optimizer != "none":
        sizes = [nbytes(number, elements, states, DEVICE) for number, _, elements, states in cuts]
        places = leave_device(sizes, offload.fraction, offload.optimizer)
    for (number, start, elements, states), place in zip(cuts, places, strict=True):
        there = place if nbytes(number, elements, states, place) else DEVICE  # no states, of weights that are masters
        yield PlacedRecord(
            number, OPTIMIZER, there, elements, nbytes(number, elements, states, there), _slots(there), start
        )
    for number, unit in enumerate(units if offload.params != "none" else ()):
        kind = PARAMETERS if unit.trainable else FROZEN
        slots = _slots(offload.params) if unit.trainable else 1
        yield PlacedRecord(number, kind, offload.params, unit.elements, unit.weight * unit.elements, slots)
    for number in trained if offload.gradients_leave else ():
        elements = units[number].elements
        yield PlacedRecord(number, GRADIENTS, offload.gradients, elements, units[number].gradient * elements)


def _slots(place: str) -> int:
    return TIERS[place].slots if place in TIERS else 1


def _buckets(segments: Sequence[tuple[int, int]], bucket: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, elements and bytes of all states of each bucket; none reaches over where these differ."""
    begin = 0
    for elements, states in segments:
        for start, stop in bucket_ranges(elements, bucket):
            yield begin + start, stop - start, states
        begin += elements
