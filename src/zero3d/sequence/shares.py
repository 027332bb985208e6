"""Which rows of a sequence and which heads of an attention a rank of an sp group has. Pure arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from zero3d.account.traffic import Moved
from zero3d.errors import ConfigError
from zero3d.spec.dtypes import FP32
from zero3d.spec.sizes import decimal

POINTWISE = ("mlp", "moe")  # kinds of layers that mix no tokens


def even_parts(count: int, ranks: int) -> list[range]:
    """Cut `count` things into a part for each rank; parts differ by one at most.

    >>> even_parts(7, 3)
    [range(0, 2), range(2, 4), range(4, 7)]
    """
    bounds = [count * rank // ranks for rank in range(ranks + 1)]
    return [range(start, stop) for start, stop in pairwise(bounds)]


class Heads(NamedTuple):
    """How the heads of an attention are shared out over an sp group.

    query   of each rank
    key     of each rank; as many as query heads where keys are repeated, one for each of these
    repeat  how often each head of keys and values is repeated before it is sent: 1, or as often as query heads use it
    """

    query: list[range]
    key: list[range]
    repeat: int

    @classmethod
    def of(cls, query: int, key: int, ranks: int, repeats: bool = False) -> Heads:
        """Share heads out to within one query head. Keys are repeated where ranks would share a head of theirs.

        repeats  in any case

        >>> Heads.of(8, 4, 2)
        Heads(query=[range(0, 4), range(4, 8)], key=[range(0, 2), range(2, 4)], repeat=1)
        >>> Heads.of(4, 1, 2)
        Heads(query=[range(0, 2), range(2, 4)], key=[range(0, 2), range(2, 4)], repeat=4)
        """
        parts, group = even_parts(query, ranks), query // key
        if not repeats and all(part.start % group == 0 and part.stop % group == 0 for part in parts):
            return cls(parts, [range(part.start // group, part.stop // group) for part in parts], 1)
        return cls(parts, parts, group)


class MaskTooLarge(ConfigError):
    """A mask takes more bytes than it may."""


class Sharing(NamedTuple):
    """How attention is shared out.

    ranks    of the sp group
    kind     auto, heads or gather, as asked for
    masked   bytes that a mask may take
    repeats  keys and values are repeated for each query head in any case, as exact mode does: their gradients are then
             summed in one order at every sp
    mixers   heads or prefix: how recurrences are shared out
    """

    ranks: int
    kind: str
    repeats: bool
    masked: int
    mixers: str = "heads"

    def check_mask(self, elements: int, itemsize: int, length: int) -> None:
        """Refuse a mask that takes more than it may. Raises MaskTooLarge."""
        if elements * itemsize > self.masked:
            raise MaskTooLarge(
                f"attention over sequences of {length:,} tokens needs a mask of {decimal(elements * itemsize)} here "
                f"({elements:,} x {itemsize} B), for padding, packing or a window, and mesh.sp_mask_budget is "
                f"{decimal(self.masked)}: pass whole sequences without padding, shorter ones, or a larger "
                "mesh.sp_mask_budget."
            )

    def by_heads(self, query: int, key: int) -> bool:
        """Return whether ranks have heads of whole sequences, or else rows of queries and all keys and values.

        auto: heads where ranks have whole heads of keys, whose gradients then have the bits of one rank, or in exact
        mode; else what sends less. With less than a query head for each rank rows are the only way.

            heads    (2 H + 2 K) rows D (sp - 1) / sp    of a rank and forward; K = H where keys are repeated
            gather   2 K rows D (sp - 1)
        """
        if self.kind != "auto" or query < self.ranks:
            return self.kind == "heads" and query >= self.ranks
        heads = Heads.of(query, key, self.ranks, self.repeats)
        return self.repeats or heads.repeat == 1 or 2 * query + 2 * key * heads.repeat <= 2 * key * self.ranks


class Attended(NamedTuple):
    """Describes calls of an attention that are alike.

    length   of the whole sequences, of which there are `batch`
    query    heads
    key      heads of keys and values as they are sent: repeated ones count
    width    elements of a head of queries and keys; `value` of one of values
    trained  whether queries, keys and values have gradients
    by_heads  whether heads are shared out, or else rows of queries
    """

    batch: int
    length: int
    query: int
    key: int
    width: int
    value: int
    itemsize: int
    trained: tuple[bool, bool, bool]
    by_heads: bool = True

    def sent(self, rank: int, ranks: int, backward: bool) -> Moved:
        """Return what a rank sends in a forward, or in a backward: gradients go the way back of what they are of."""
        if not self.by_heads:
            widths = ((self.width, self.trained[1]), (self.value, self.trained[2]))
            return Moved.total(self._rows(w, rank, ranks, backward) for w, t in widths if t or not backward)
        moved = []
        for heads, width, trained in (
            (self.query, self.width, self.trained[0]),
            (self.key, self.width, self.trained[1]),
            (self.key, self.value, self.trained[2]),
        ):
            if trained or not backward:
                moved.append(self._one(heads, width, rank, ranks, to_rows=backward))
        if any(self.trained) or not backward:
            moved.append(self._one(self.query, self.value, rank, ranks, to_rows=not backward))
        return Moved.total(moved)

    def _rows(self, width: int, rank: int, ranks: int, backward: bool) -> Moved:
        """Return what a rank sends of keys or values: its rows to all others, or gradients of theirs."""
        rows = even_parts(self.length, ranks)
        sent = self.length - len(rows[rank]) if backward else (ranks - 1) * len(rows[rank])
        elements = self.batch * self.key * width * sent
        return Moved(1, elements, elements * self.itemsize)

    def _one(self, heads: int, width: int, rank: int, ranks: int, to_rows: bool) -> Moved:
        """Return what a rank sends of one tensor: its rows of others' heads, or others' rows of its heads."""
        parts, rows = even_parts(heads, ranks), even_parts(self.length, ranks)
        here, there = (parts, rows) if to_rows else (rows, parts)
        others = sum(len(part) for other, part in enumerate(there) if other != rank)
        elements = self.batch * width * len(here[rank]) * others
        return Moved(1, elements, elements * self.itemsize)


def needed(parts: Sequence[range], groups: int) -> list[range]:
    """Return which groups the heads of each rank need; each group is that of as many heads, in their order.

    >>> needed([range(0, 2), range(2, 5), range(5, 8)], 2)
    [range(0, 1), range(0, 2), range(1, 2)]
    """
    times = parts[-1].stop // groups
    return [range(part.start // times, -(-part.stop // times)) for part in parts]


@dataclass(frozen=True)
class Halo:
    """Describes calls of a convolution that are alike.

    length   of the whole sequences, of which there are `batch`
    reach    tokens before its own that a token's output depends on
    trained  whether what is convolved has gradients
    divided  tp divides the mixer; but where it has fewer groups than tp ranks, each has the channels of one of these
    groups, grouped  groups, and channels of all of them
    """

    batch: int
    length: int
    channels: int
    reach: int
    itemsize: int
    trained: bool
    divided: bool = False
    groups: int = 0
    grouped: int = 0

    def over(self, tp: int) -> Halo:
        """Return the same on one of `tp` ranks, as far as tp divides the mixer."""
        if tp == 1 or not self.divided:
            return self
        of_groups = self.grouped // self.groups * max(1, self.groups // tp) if self.groups else 0
        return replace(self, channels=(self.channels - self.grouped) // tp + of_groups)

    def before(self, rows: Sequence[range], rank: int) -> range:
        """Return the tokens that a rank needs beside its rows."""
        return range(max(0, rows[rank].start - self.reach), rows[rank].start)

    def at(self, batch: int, itemsize: int) -> Halo:
        """Return the same of so many sequences, in a run whose numbers have so many bytes where these have 2."""
        return replace(self, batch=batch, itemsize=itemsize if self.itemsize == 2 else self.itemsize)

    def sent(self, rank: int, ranks: int, backward: bool) -> Moved:
        """Return what a rank sends in a forward, or in a backward."""
        if backward and not self.trained:
            return Moved()
        rows = even_parts(self.length, ranks)
        own, tokens = rows[rank], len(self.before(rows, rank))
        if not backward:
            wanted = (self.before(rows, other) for other in range(ranks))
            tokens = sum(max(0, min(own.stop, part.stop) - max(own.start, part.start)) for part in wanted)
        elements = self.batch * self.channels * tokens
        return Moved(1, elements, elements * self.itemsize)


@dataclass(frozen=True)
class Cut:
    """Describes a tensor [batch, rows, heads, width] of a scan, several of whose heads may share one of these."""

    heads: int
    width: int
    itemsize: int
    trained: bool


@dataclass(frozen=True)
class Scanned:
    """Describes calls of a scan that are alike.

    length   of the whole sequences, of which there are `batch`
    heads    of the scan, which are shared out; channels, where it has none
    given    what ranks send each other the rows of, those of one dtype together
    made     what comes back
    factor, state  numbers of a head by which its state is multiplied over some rows, and that are added to it then; 0
                   where there is no such rule
    operations     multiplications and additions of a head for each token, forward and backward
    divided        tp divides the mixer
    """

    batch: int
    length: int
    heads: int
    given: tuple[Cut, ...]
    made: Cut
    factor: int = 0
    state: int = 0
    operations: int = 0
    divided: bool = False

    @property
    def passes(self) -> bool:
        """Return whether its states can pass from rank to rank."""
        return self.state > 0

    @property
    def scans(self) -> int:
        """Count the scans where states pass: one for the state, one with that which came, one for a matrix."""
        return 1 + self.passes + (self.factor > 1)

    @property
    def states(self) -> States:
        """Return what describes the same calls where states pass."""
        return States(self.batch, self.heads, self.factor + self.state, FP32.itemsize, self.made.trained)

    def scanned(self, ranks: int) -> int:
        """Count the tokens of all heads that a rank scans, the same number both ways."""
        return self.batch * self.heads * -(-self.length // ranks)

    def over(self, tp: int) -> Scanned:
        """Return the same on one of `tp` ranks, as far as tp divides the mixer."""
        if tp == 1 or not self.divided:
            return self
        given = tuple(replace(cut, heads=max(1, cut.heads // tp)) for cut in self.given)
        return replace(self, heads=self.heads // tp, given=given, made=replace(self.made, heads=self.heads // tp))

    def at(self, batch: int, itemsize: int) -> Scanned:
        """Return the same of so many sequences, in a run whose numbers have so many bytes where these have 2."""
        given = (cut if cut.itemsize != 2 else replace(cut, itemsize=itemsize) for cut in self.given)
        made = self.made if self.made.itemsize != 2 else replace(self.made, itemsize=itemsize)
        return replace(self, batch=batch, given=tuple(given), made=made)

    def of_a_run(self, length: int) -> Scanned:
        """Return the same of one sequence, all of whose numbers have 2 bytes and are trained."""
        given = tuple(replace(cut, itemsize=2, trained=True) for cut in self.given)
        made = replace(self.made, itemsize=2, trained=True)
        return replace(self, batch=1, length=length, given=given, made=made)

    def exchanged(self, ranks: int) -> list[int]:
        """Return the bytes that the first rank has for all ranks, itself among them, in each exchange of a forward."""
        rows, parts = even_parts(self.length, ranks), even_parts(self.heads, ranks)
        by_itemsize: dict[int, int] = {}
        for cut in self.given:
            heads = sum(map(len, needed(parts, cut.heads)))
            more = self.batch * len(rows[0]) * heads * cut.width * cut.itemsize
            by_itemsize[cut.itemsize] = by_itemsize.get(cut.itemsize, 0) + more
        return [*by_itemsize.values(), self.batch * self.length * len(parts[0]) * self.made.width * self.made.itemsize]

    def sent(self, rank: int, ranks: int, backward: bool) -> Moved:
        """Return what a rank sends in a forward, or in a backward: gradients go the way back of what they are of."""
        if backward and not self.made.trained:
            return Moved()
        rows, parts = even_parts(self.length, ranks), even_parts(self.heads, ranks)
        own, others = len(rows[rank]), self.length - len(rows[rank])
        moved = []
        for itemsize in dict.fromkeys(cut.itemsize for cut in self.given):
            alike = [cut for cut in self.given if cut.itemsize == itemsize]
            if backward and not any(cut.trained for cut in alike):
                continue
            elements = 0
            for cut in alike:
                heads = [len(part) for part in needed(parts, cut.heads)]
                elements += cut.width * (others * heads[rank] if backward else own * (sum(heads) - heads[rank]))
            moved.append((self.batch * elements, itemsize))
        heads_of_others = self.heads - len(parts[rank])
        back = own * heads_of_others if backward else others * len(parts[rank])
        moved.append((self.batch * self.made.width * back, self.made.itemsize))
        return Moved.total(Moved(1, elements, elements * itemsize) for elements, itemsize in moved)


@dataclass(frozen=True)
class States:
    """Describes calls of a scan whose states pass from rank to rank: bytes do not depend on how long sequences are.

    width  of what a head's state becomes over a rank's rows: what is added, and by what it is multiplied before
    """

    batch: int
    heads: int
    width: int
    itemsize: int
    trained: bool

    @property
    def nbytes(self) -> int:
        """Return the bytes of a rank's states, which each rank behind it gets."""
        return self.batch * self.heads * self.width * self.itemsize

    def sent(self, rank: int, ranks: int, backward: bool) -> Moved:
        """Return what a rank sends: to all behind it, or gradients to all before it."""
        if backward and not self.trained:
            return Moved()
        elements = self.batch * self.heads * self.width * (rank if backward else ranks - 1 - rank)
        return Moved(1, elements, elements * self.itemsize)


def loss_values(batch: int, length: int, ranks: int) -> int:
    """Return the losses that a rank sends of a micro-batch: all of its rows, padded to the longest part, to each."""
    return batch * max(map(len, even_parts(length, ranks))) * (ranks - 1)
