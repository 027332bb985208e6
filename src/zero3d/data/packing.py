"""Which tokens make which sequence: a table of spans, made with numpy. No torch.

    text, packed      documents one after another, cut every `length` tokens; nothing is lost
                      | A A A A A B B B | B B C C C C D D | D D D . . . . . |
    examples, packed  whole ones into the fullest sequence that has room (best fit, longest first);
                      longer ones are truncated
    texts, best fit   the same, longer ones are cut
    not packed        one document, or piece of one, per sequence
    with a budget     of patches of images beside the tokens: the fullest sequence that has room for both

A span is tokens of one document that see only each other. It starts without its past, so its first
token is no target; sequences in which nothing is left to learn are dropped (their loss would be 0/0).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

from zero3d.errors import ConfigError

Ints = NDArray[numpy.int64]
BEST_FIT = "best_fit"
COUNTED = 1 << 12  # spans whose targets are counted at once: their tokens are in memory


class Documents(NamedTuple):
    """Where documents lie among the tokens: ascending `starts`, `stops` [documents], and which are examples."""

    starts: Ints
    stops: Ints
    examples: NDArray[numpy.bool_]

    def some(self, chosen: NDArray[Any]) -> Documents:
        """Return the documents at these indices, or where this mask is true."""
        return Documents(self.starts[chosen], self.stops[chosen], self.examples[chosen])


class Plan(NamedTuple):
    """The table of spans: sequence i is the spans [pointers[i], pointers[i + 1])."""

    spans: Ints  # [R, 2] start and stop
    pointers: Ints  # [S + 1]
    truncated: int  # examples longer than a sequence
    dropped: int  # sequences, or examples, without a target


def hold_out(documents: Documents, fraction: float) -> tuple[Documents, Documents, str]:
    """Split off a fraction for validation, the same in every run; also the line that says how.

    Documents are chosen at even distances, at least one. Of a single text the end is held out.
    """
    count = len(documents.starts)
    if count == 1:
        return _hold_out_end(documents, fraction)
    chosen = numpy.zeros(count, bool)
    wanted = min(max(1, round(count * fraction)), count - 1)
    chosen[((numpy.arange(wanted) + 0.5) * count / wanted).astype(numpy.int64)] = True
    note = f"{count:,} documents (empty files have none): {wanted:,} held out, {count - wanted:,} to train on"
    return documents.some(~chosen), documents.some(chosen), note


def _hold_out_end(documents: Documents, fraction: float) -> tuple[Documents, Documents, str]:
    starts, stops, examples = documents
    tokens = int(stops[0] - starts[0])
    wanted = max(2, round(tokens * fraction))
    if examples[0] or tokens - wanted < 2:
        raise ConfigError(
            f"data.validation={fraction:g} of one document of {tokens:,} tokens leaves nothing: name files instead."
        )
    cut = stops - wanted
    note = f"the last {wanted:,} of {tokens:,} tokens held out (there is one document)"
    return Documents(starts, cut, examples), Documents(cut, stops, examples), note


class Budget(NamedTuple):
    """Limits patches of images in a sequence to `most`. of: those of spans that begin at these tokens."""

    of: Callable[[Ints], Ints]
    most: int


def plan(
    documents: Documents,
    length: int,
    packing: bool | str,
    targets: NDArray[numpy.uint8] | None,
    budget: Budget | None = None,
) -> Plan:
    """Return the table of spans. `targets` marks what is learnt, None if all is. packing: also BEST_FIT.

    budget  of patches, which no document exceeds
    """
    if packing and packing != BEST_FIT and not documents.examples.any():
        return _stream(documents, length)
    spans, truncated = _pieces(documents, length)
    kept = count_targets(spans, targets) > 0
    dropped = int(len(kept) - kept.sum())
    spans = spans[kept]
    if not packing:
        return Plan(spans, numpy.arange(len(spans) + 1), truncated, dropped)
    sizes = spans[:, 1] - spans[:, 0]
    if budget is None:
        order, pointers = best_fit(sizes, length)
    else:
        order, pointers = best_fit_in_two(sizes, length, budget.of(spans[:, 0]), budget.most)
    return Plan(spans[order], pointers, truncated, dropped)


def joined(plans: Sequence[Plan]) -> Plan:
    """Return the sequences of several plans, one plan's after another's."""
    ends = numpy.cumsum([0, *(len(each.spans) for each in plans)])
    pointers = [each.pointers[:-1] + end for each, end in zip(plans, ends[:-1], strict=True)]
    return Plan(
        numpy.concatenate([each.spans for each in plans]),
        numpy.concatenate([*pointers, ends[-1:]]),
        sum(each.truncated for each in plans),
        sum(each.dropped for each in plans),
    )


def _stream(documents: Documents, length: int) -> Plan:
    """Put documents one after another and cut them every `length` tokens."""
    ends = numpy.cumsum(documents.stops - documents.starts)
    begins = ends - (documents.stops - documents.starts)
    owner, starts, stops = _cut(begins, ends, length)
    sequence = starts // length
    targets = numpy.bincount(sequence, weights=stops - starts - 1)  # every token but the first of a span
    kept = targets > 0
    moved = (documents.starts - begins)[owner]  # from a place in the concatenation to one in the store
    spans = numpy.stack([starts + moved, stops + moved], axis=1)[kept[sequence]]
    return Plan(spans, _pointers(numpy.bincount(sequence)[kept]), 0, int(len(kept) - kept.sum()))


def _pieces(documents: Documents, length: int) -> tuple[Ints, int]:
    """Return spans of at most `length` tokens (texts cut, examples truncated), and how many were truncated."""
    sizes = documents.stops - documents.starts
    used = numpy.where(documents.examples, numpy.minimum(sizes, length), sizes)
    owner, starts, stops = _cut(numpy.zeros_like(used), used, length)
    moved = documents.starts[owner]
    return numpy.stack([starts + moved, stops + moved], axis=1), int((used < sizes).sum())


def _cut(begins: Ints, ends: Ints, length: int) -> tuple[Ints, Ints, Ints]:
    """Cut ranges at the multiples of `length`: the range each part is of, and the part's start and stop."""
    first = begins // length
    parts = (ends - 1) // length - first + 1
    owner = numpy.repeat(numpy.arange(len(parts)), parts)
    cell = numpy.arange(len(owner)) + (first - (numpy.cumsum(parts) - parts))[owner]
    return owner, numpy.maximum(begins[owner], cell * length), numpy.minimum(ends[owner], (cell + 1) * length)


def count_targets(spans: Ints, targets: NDArray[numpy.uint8] | None) -> Ints:
    """Count the targets of each span, the first token left out. Spans ascend."""
    if targets is None:
        return spans[:, 1] - spans[:, 0] - 1
    counts = numpy.zeros(len(spans), numpy.int64)
    for first in range(0, len(spans), COUNTED):
        part = spans[first : first + COUNTED]
        low, high = int(part[0, 0]), int(part[-1, 1])
        sums = numpy.concatenate([[0], numpy.cumsum(targets[low:high], dtype=numpy.int64)])
        counts[first : first + COUNTED] = sums[part[:, 1] - low] - sums[part[:, 0] + 1 - low]
    return counts


def best_fit(sizes: Ints, length: int) -> tuple[Ints, Ints]:
    """Pack items of 1..length into bins of `length`: their order, and the bins' pointers into it.

    Longest first, each into the fullest bin that has room. All items of a size are placed together into
    all bins with the same room, so the work grows with the distinct (size, room) pairs, not with the items.
    Bins are in the order of their first item, items inside in their own.
    """
    if not len(sizes):
        return numpy.zeros(0, numpy.int64), numpy.zeros(1, numpy.int64)
    bin_of = numpy.empty(len(sizes), numpy.int64)
    by_size = numpy.argsort(-sizes, kind="stable")
    bounds = numpy.flatnonzero(numpy.diff(sizes[by_size])) + 1
    rooms: dict[int, list[Ints]] = {}  # bins by the room they have left
    known: list[int] = []  # the same rooms, ascending
    bins = 0
    for items in numpy.split(by_size, bounds):
        size = int(sizes[items[0]])
        while len(items):
            at = bisect_left(known, size)
            if at == len(known):
                fresh = -(-len(items) // (length // size))
                room, group = length, numpy.arange(bins, bins + fresh)
                bins += fresh
            else:
                room = known.pop(at)
                group = numpy.concatenate(rooms.pop(room))
            per_bin = room // size
            used = min(len(group), -(-len(items) // per_bin))
            placed = min(used * per_bin, len(items))
            bin_of[items[:placed]] = numpy.repeat(group[:used], per_bin)[:placed]
            full = placed // per_bin  # the last bin used may have got fewer
            left = [(room - per_bin * size, group[:full]), (room, group[used:])]
            left.append((room - (placed - full * per_bin) * size, group[full:used]))
            for rest, some in left:
                if len(some) and rest:
                    if rest not in rooms:
                        insort(known, rest)
                    rooms.setdefault(rest, []).append(some)
            items = items[placed:]
    return _in_order(bin_of, bins)


def best_fit_in_two(sizes: Ints, length: int, patches: Ints, most: int) -> tuple[Ints, Ints]:
    """Pack items of 1..length tokens and 0..most patches into bins that have room for both, as `best_fit` does.

    Longest first, those with more patches before others; each into the bin with the least room for tokens that has
    room, of several into the one with the most room for patches. A tree over rooms for tokens knows the most room for
    patches below each node, so an item takes steps in the number of the logarithm of `length`.
    """
    bin_of, leaves = numpy.empty(len(sizes), numpy.int64), 1 << length.bit_length()
    highest = [-1] * (2 * leaves)  # room for patches, by node; -1: no bin
    bins: list[list[tuple[int, int]]] = [[] for _ in range(leaves)]  # heaps of (-room for patches, bin)
    made = 0

    def note(room: int) -> None:
        node = leaves + room
        highest[node] = -bins[room][0][0] if bins[room] else -1
        while node := node // 2:
            highest[node] = max(highest[2 * node], highest[2 * node + 1])

    for item in numpy.lexsort((-patches, -sizes)).tolist():
        size, wanted = int(sizes[item]), int(patches[item])
        room = _least_room(highest, leaves, size, wanted)
        if room is None:
            room, left, chosen = length, most, made
            made += 1
        else:
            negative, chosen = heappop(bins[room])
            left = -negative
            note(room)
        bin_of[item] = chosen
        heappush(bins[room - size], (wanted - left, chosen))
        note(room - size)
    return _in_order(bin_of, made)


def _least_room(highest: Sequence[int], leaves: int, size: int, wanted: int) -> int | None:
    """Return the least room for tokens, of `size` at least, of a bin with `wanted` room for patches."""
    node = leaves + size
    while highest[node] < wanted:
        while node % 2:  # a right child: nothing beside it
            node //= 2
        if node == 0:
            return None
        node += 1
    while node < leaves:
        node = 2 * node if highest[2 * node] >= wanted else 2 * node + 1
    return node - leaves


def _in_order(bin_of: Ints, bins: int) -> tuple[Ints, Ints]:
    """Sort items by bin, bins by their first item."""
    order = numpy.argsort(bin_of, kind="stable")
    counts = numpy.bincount(bin_of, minlength=bins)
    pointers = _pointers(counts)
    firsts = numpy.argsort(order[pointers[:-1]], kind="stable")  # bins in their new order
    rank = numpy.empty(bins, numpy.int64)
    rank[firsts] = numpy.arange(bins)
    return numpy.argsort(rank[bin_of], kind="stable"), _pointers(counts[firsts])


def _pointers(counts: Ints) -> Ints:
    return numpy.concatenate([[0], numpy.cumsum(counts)]).astype(numpy.int64)
