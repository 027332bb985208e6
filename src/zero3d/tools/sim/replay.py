"""A log of storages read again: the peak with its largest tensors, and a timeline by category.

A timeline has at most POINTS samples: of each stretch of the log the instant with the most bytes, so that the
peak is exact and every sample is a sum of what was alive together.
"""

from __future__ import annotations

from fractions import Fraction
from heapq import nlargest
from operator import itemgetter

from zero3d.tools.sim.memory import CATEGORIES, PADDING, Log
from zero3d.tools.sim.result import Instant, LiveTensor, Mark, Peak, Timeline

POINTS, LARGEST = 2000, 10


def peak_of(log: Log) -> Peak:
    """Return the instant with the most bytes alive, and the ten largest tensors of it."""
    sizes: dict[int, int] = {}
    for number, change in zip(log.who[: log.peak_event + 1], log.changes, strict=False):
        sizes[number] = sizes.get(number, 0) + change
    totals: dict[str, Fraction] = dict.fromkeys(CATEGORIES, Fraction(0))
    for number, nbytes in sizes.items():
        storage = log.storages[number]
        padding = storage.padding if nbytes else 0
        totals[storage.category] += nbytes - padding
        totals[PADDING] += padding
    position = log.peak_position
    largest = []
    for number, nbytes in nlargest(LARGEST, ((n, size) for n, size in sizes.items() if size), key=itemgetter(1)):
        storage = log.storages[number]
        largest.append(LiveTensor(nbytes, storage.category, storage.dtype, storage.shape, Instant(*storage.born)))
    return Peak(
        log.peak,
        log.peak_event,
        Instant(*position),
        dict(zip(CATEGORIES, _whole(list(totals.values()), log.peak), strict=True)),
        tuple(largest),
    )


def timeline_of(log: Log, points: int = POINTS) -> Timeline:
    """Return the bytes by category over the events of the log, and where phases begin."""
    index = {category: i for i, category in enumerate(CATEGORIES)}
    live, total = [Fraction(0)] * len(CATEGORIES), 0
    stretch = max(1, -(-len(log.who) // points))
    events: list[int] = []
    rows: list[tuple[int, ...]] = []
    most = -1
    for event, (number, change) in enumerate(zip(log.who, log.changes, strict=True)):
        storage = log.storages[number]
        padding = storage.padding if change > 0 else -storage.padding
        live[index[storage.category]] += change - padding
        live[index[PADDING]] += padding
        total += change
        if event % stretch == 0:
            most = -1
            events.append(event)
            rows.append(())
        if total > most:
            most, events[-1], rows[-1] = total, event, tuple(_whole(live, total))
    marks = tuple(Mark(event, Instant(*position)) for event, position in log.marks)
    return Timeline(CATEGORIES, tuple(events), tuple(rows), marks, len(log.who))


def _whole(values: list[Fraction], total: int) -> list[int]:
    """Round bytes by category; a rank's share of a unit's padding may be a fraction, the sum is whole."""
    whole = [int(value) for value in values]
    whole[CATEGORIES.index(PADDING)] += total - sum(whole)
    return whole
