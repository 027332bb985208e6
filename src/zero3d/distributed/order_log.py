"""What each rank has begun on its axes, in order, and the proof that ranks can never meet.

    sequence     operations in it                       why they have one order
    gathers      all_gather, exchange                   units that are used, and where steps and evaluations end
    reductions   reduce_scatter, ..., exchange          units whose gradients are complete, and the same ends

Of two ranks of an axis whose sequences differ at one place, neither will ever do what the other waits for: every rank
notes an operation before it waits for peers. A sequence that is only shorter proves nothing: its rank may be slow. On
gloo, where a wait blocks the host, there is a second proof: a circle of ranks, each of which waits in an operation that
the next one has not begun. Neither depends on when ranks tell what they have begun, nor on how long they take.
"""

from __future__ import annotations

import base64
import json
import sys
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

GATHERS, REDUCTIONS = "gathers", "reductions"
SEQUENCES_OF = {"all_gather": (GATHERS,), "exchange": (GATHERS, REDUCTIONS)}
KEPT = 1 << 14  # operations of a sequence: those of a step of 80 units and 64 micro-batches
MOST_BYTES = 1 << 26  # of a rank's post, unpacked
NAMED = 4  # ranks in a text
# Whose calls are counted alike on all ranks of an axis; messages between two ranks are not.
COLLECTIVE = frozenset(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "pass_rows", "exchange"))
NEVER_MEET = "ranks do not run the same units and wait for each other for ever"
REMEDY = (
    "At stage 3 all ranks must use the same units in the same order, and equally often. Where a branch, an expert or a "
    "vision tower is called on some ranks only, make the block that contains it one unit (Engine(units=[...]) with "
    "that block's class or name; DeepSpeed calls this a ZeRO-3 leaf module), put `with engine.full_params():` around "
    "forward and backward, call it on every rank (with a blank input where there is none), or pass stage=2."
)
ONCE_MORE = (
    "A unit is reduced once more when gradients of it come after its reduction: all ranks must do that equally often. "
    "Where some ranks alone call backward twice on one forward, add the losses up and call it once; where they call a "
    "block more often in reentrant checkpoints, pass use_reentrant=False; or do it on every rank."
)


class Entry(NamedTuple):
    """One operation that a rank has begun; `place` counts those of its sequence, from 0."""

    place: int
    op: str
    unit: str


class Wait(NamedTuple):
    """A call in which a rank waits for peers; `number` counts those of its kind on the axis, from 1.

    peer  the only one that it waits for, by its place on the axis; None: all of them
    """

    axis: str
    op: str
    unit: str
    number: int
    peer: int | None = None


class OrderLog:
    """Keeps what a rank has begun on one axis; a call of `add` takes a fraction of a microsecond.

    begins  called before the first operation
    blocks  a wait blocks the host, as on gloo
    wait    the call that keeps the host waiting now, as the fields of a `Wait`
    """

    wait: tuple[str, str, str, int, int | None] | None = None

    def __init__(self, begins: Callable[[], object] | None = None, blocks: bool = False) -> None:
        self._begins, self.blocks = begins, blocks
        self._counts = {GATHERS: 0, REDUCTIONS: 0}
        self._recent: dict[str, deque[tuple[int, str, str]]] = {name: deque(maxlen=KEPT) for name in self._counts}

    def add(self, op: str, unit: str) -> None:
        """Note an operation that begins."""
        if self._begins is not None:
            self._begins()
            self._begins = None
        for sequence in SEQUENCES_OF.get(op, (REDUCTIONS,)):
            count = self._counts[sequence]
            self._recent[sequence].append((count, op, unit))  # another thread may read: an entry has its own place
            self._counts[sequence] = count + 1

    def recent(self, sequence: str) -> list[Entry]:
        """Return the last operations of a sequence, from any thread."""
        return [Entry(*each) for each in list(self._recent[sequence])]


class Part(NamedTuple):
    """A stretch of one sequence: the index of its first operation, and 4 bytes for each."""

    first: int
    codes: bytes

    @property
    def end(self) -> int:
        """Return the index behind the last one."""
        return self.first + len(self.codes) // 4

    def code(self, index: int) -> int:
        """Return the number of the operation at an index."""
        return int.from_bytes(self._cut(index, index + 1), sys.byteorder)

    def first_difference(self, other: Part) -> int | None:
        """Return the lowest index at which both have an operation, and not the same; None where there is none."""
        low, high = max(self.first, other.first), min(self.end, other.end)
        if low >= high or self._cut(low, high) == other._cut(low, high):
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._cut(low, middle) == other._cut(low, middle):
                low = middle
            else:
                high = middle
        return low

    def count(self, code: int) -> int:
        """Return how often an operation is in it."""
        return array("I", self.codes).count(code)

    def _cut(self, start: int, stop: int) -> bytes:
        return self.codes[4 * (start - self.first) : 4 * (stop - self.first)]


class Post(NamedTuple):
    """What one rank tells of itself.

    axes    ranks of the world that are on each of its axes, in the axis' order
    parts   what it has begun, by axis and sequence
    names   operation and unit of a code
    counts  calls that it has begun, by axis and operation
    wait    the call in which it waits, if that blocks its host; all else here is as it was inside of it
    """

    axes: Mapping[str, Sequence[int]]
    parts: Mapping[tuple[str, str], Part]
    names: Mapping[int, tuple[str, str]]
    counts: Mapping[tuple[str, str], int]
    wait: Wait | None = None

    @classmethod
    def of(
        cls,
        axes: Mapping[str, Sequence[int]],
        entries: Mapping[tuple[str, str], Sequence[Entry]],
        counts: Mapping[tuple[str, str], int],
        wait: Wait | None = None,
    ) -> Post:
        """Return what a rank tells, of the entries of its logs."""
        names: dict[int, tuple[str, str]] = {}
        codes: dict[tuple[str, str], int] = {}
        parts = {}
        for key, those in entries.items():
            numbers = array("I")
            for _, op, unit in those:
                about = op, unit
                if about not in codes:
                    codes[about] = code = zlib.crc32(f"{op} {unit}".encode())
                    names[code] = about
                numbers.append(codes[about])
            parts[key] = Part(those[0].place if those else 0, numbers.tobytes())
        return cls(axes, parts, names, counts, wait)

    def pack(self) -> str:
        """Return it as text: some hundred bytes where operations repeat, as they do from step to step."""
        told = {
            "axes": self.axes,
            "parts": [[*key, part.first, base64.b64encode(part.codes).decode()] for key, part in self.parts.items()],
            "names": [[code, *about] for code, about in self.names.items()],
            "counts": [[*key, count] for key, count in self.counts.items()],
            "wait": self.wait,
        }
        return base64.b64encode(zlib.compress(json.dumps(told).encode(), 1)).decode()

    @classmethod
    def unpack(cls, text: str | bytes) -> Post:
        """Return what `pack` made a text of. Raises ValueError of any other."""
        try:
            told = json.loads(zlib.decompressobj().decompress(base64.b64decode(text), MOST_BYTES))
            return cls(
                told["axes"],
                {
                    (axis, sequence): Part(first, base64.b64decode(codes))
                    for axis, sequence, first, codes in told["parts"]
                },
                {code: (op, unit) for code, op, unit in told["names"]},
                {(axis, op): count for axis, op, count in told["counts"]},
                None if told["wait"] is None else Wait(*told["wait"]),
            )
        except (zlib.error, LookupError, TypeError) as error:
            raise ValueError("this is not what a rank tells of its order") from error

    def has_begun(self, wait: Wait) -> bool:
        """Return whether this rank has come to the call in which another one waits."""
        return self.counts.get((wait.axis, wait.op), 0) >= wait.number

    def awaited(self) -> list[int]:
        """Return the ranks that this one waits for; none where it waits in no collective."""
        wait = self.wait
        if wait is None or wait.op not in COLLECTIVE or not self.has_begun(wait):
            return []
        ranks = self.axes.get(wait.axis, [])
        return list(ranks) if wait.peer is None else list(ranks[wait.peer : wait.peer + 1])


class Difference(NamedTuple):
    """The first place at which ranks of one axis have begun different operations.

    begun  ranks of the world by what they have begun, the rarest operation first
    """

    axis: str
    place: int
    begun: Mapping[tuple[str, str], Sequence[int]]

    def text(self) -> str:
        """Say who does what instead of whom, and what to change."""
        ordered = sorted(self.begun.items(), key=lambda each: each[0][0] == "exchange")
        told = [f"{_ranks(ranks)} {_does(about, len(ranks) > 1)}" for about, ranks in ordered]
        said = f"{told[0]}, where {', '.join(told[1:])}"
        remedy = _remedy([op for op, _ in self.begun])
        return f"{NEVER_MEET}: on axis {self.axis} {said} (operation {self.place + 1:,} in this order). {remedy}"


class Circle(NamedTuple):
    """Ranks each of which waits in a call that the next one, and of the last one the first, has not begun."""

    waits: Sequence[tuple[int, Wait]]

    def text(self) -> str:
        """Say who waits for whom, and what to change."""
        others = [rank for rank, _ in [*self.waits[1:], self.waits[0]]]
        told = [
            f"rank {rank} waits in {wait.op}{_of(wait.unit)} on axis {wait.axis}, which rank {other} has not begun"
            for (rank, wait), other in zip(self.waits, others, strict=True)
        ]
        return f"{NEVER_MEET}: {'; '.join(told)}. {_remedy([wait.op for _, wait in self.waits])}"


def find_disagreement(posts: Mapping[int, Post]) -> Difference | Circle | None:
    """Return the proof that ranks can never meet, from what some or all of them have told; None without one."""
    return find_difference(posts) or find_circle(posts)


def find_difference(posts: Mapping[int, Post]) -> Difference | None:
    """Return the first difference of two ranks' sequences on an axis that both are on; gathers come first."""
    groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
    for rank, post in posts.items():
        for axis, sequence in post.parts:
            groups.setdefault((sequence, axis, tuple(post.axes.get(axis, ()))), []).append(rank)
    for (sequence, axis, _), ranks in sorted(groups.items(), key=lambda each: each[0][0] != GATHERS):
        parts = {rank: posts[rank].parts[axis, sequence] for rank in ranks}
        longest = max(parts.values(), key=lambda part: part.end)
        found = [at for part in parts.values() if (at := longest.first_difference(part)) is not None]
        if found:
            index, begun = min(found), dict[int, list[int]]()
            for rank, part in sorted(parts.items()):
                if part.first <= index < part.end:
                    begun.setdefault(part.code(index), []).append(rank)
            times = {code: sum(part.count(code) for part in parts.values()) for code in begun}
            rarest_first = sorted(begun, key=lambda code: (times[code], begun[code]))
            named = {posts[begun[code][0]].names[code]: begun[code] for code in rarest_first}
            return Difference(axis, index, named)
    return None


def find_circle(posts: Mapping[int, Post]) -> Circle | None:
    """Return a circle of ranks each of which waits for the next one."""
    stuck = {
        rank: [
            peer
            for peer in post.awaited()
            if peer != rank and peer in posts and post.wait is not None and not posts[peer].has_begun(post.wait)
        ]
        for rank, post in posts.items()
    }
    while free := [rank for rank, peers in stuck.items() if not any(peer in stuck for peer in peers)]:
        for rank in free:
            del stuck[rank]
    path: list[int] = []
    rank = min(stuck, default=-1)
    while rank in stuck and rank not in path:
        path.append(rank)
        rank = next(peer for peer in stuck[rank] if peer in stuck)
    circle = path[path.index(rank) :] if path else []
    return Circle([(each, wait) for each in circle if (wait := posts[each].wait) is not None]) if circle else None


def _remedy(ops: Collection[str]) -> str:
    """Return what to change where ranks differ in these operations."""
    return ONCE_MORE if "all_gather" not in ops and not {"reduce_scatter", "all_to_all"}.isdisjoint(ops) else REMEDY


def _ranks(ranks: Iterable[int]) -> str:
    every = list(ranks)
    shown = ", ".join(map(str, islice(every, NAMED)))
    more = f" and {len(every) - NAMED:,} more" if len(every) > NAMED else ""
    return f"rank{'s' if len(every) > 1 else ''} {shown}{more}"


def _does(about: tuple[str, str], several: bool) -> str:
    op, unit = about
    s = "" if several else "s"
    if op == "exchange":
        return f"come{s} to an exchange, as ends a step or an evaluation"
    return f"gather{s}{_of(unit, '')}" if op == "all_gather" else f"begin{s} {op}{_of(unit)}"


def _of(unit: str, of: str = " of") -> str:
    return "" if unit == "-" else f"{of} unit {unit!r}"
