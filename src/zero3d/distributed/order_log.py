"""Logs of the operations that each rank has begun on its axes, and the proof that ranks can never meet.

    sequence     operations in it                       why they have one order
    gathers      all_gather, exchange                   units that are used, and where steps and evaluations end
    reductions   reduce_scatter, ..., exchange          units whose gradients are complete, and the same ends

If the sequences of two ranks of an axis differ at one place, neither will ever begin the operation that the other waits
for: every rank notes an operation before it waits for peers. A sequence that is only shorter proves nothing: its rank
may be slow. On gloo, where a wait blocks the host, there is a second proof, a deadlock: a circle of ranks, each waiting
in an operation that the next one has not begun. Some may wait in a collective of the program's own, not begun by ranks
in a call of ours. Neither proof depends on when ranks tell their operations, nor on how long they take.
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
from types import MappingProxyType
from typing import NamedTuple

from zero3d.distributed.unit_order import AHEAD, ROOT

GATHERS, REDUCTIONS = "gathers", "reductions"
SEQUENCES_OF = {"all_gather": (GATHERS,), "exchange": (GATHERS, REDUCTIONS)}
KEPT = 1 << 14  # operations of a sequence, as many as in a step of 80 units and 64 micro-batches
MOST_BYTES = 1 << 26  # of a rank's post, unpacked
NAMED = 4  # ranks in a text
# Whose calls are counted alike on all ranks of an axis; messages between two ranks are not.
COLLECTIVE = frozenset(
    ("all_gather", "reduce_scatter", "all_reduce", "all_reduced", "all_to_all", "pass_rows", "exchange", "broadcast")
) | {"barrier", "warm-up"}
NEVER_MEET = "ranks do not run the same units and wait for each other for ever"
LEFT_OUT = (
    "Some ranks have left out more steps than others after a backward ({}): decide that by the gradient norm "
    "(clip_grad_norm_, engine.grad_norm()), which is the same on all ranks, and call zero_grad() in place of a step on "
    "all of them or on none."
)
STEPS = (
    "At stage {} weights are gathered where a step ends: all ranks must end the same steps, and run equally many "
    "micro-batches and evaluations between them."
)
REMEDY = (
    "At stage 3 all ranks must use the same units in the same order, and equally often. Where a branch, an expert or a "
    "vision tower is called on some ranks only, make the block that contains it one unit (Engine(units=[...]) with "
    "that block's class or name; DeepSpeed calls this a ZeRO-3 leaf module), put `with engine.full_params():` around "
    "forward and backward, call it on every rank (with a blank input where there is none), add 0 times its output to "
    "the loss where backward reaches it on some ranks only, or pass stage=2."
)
OWN_CALL = (
    "All ranks must do the same before a collective of the program's own: call the unit on every rank, put `with "
    "engine.full_params():` around the forward, or make the block that contains it one unit (Engine(units=[...]))."
)
MORE_FORWARDS = "All ranks must run equally many micro-batches, in training and in evaluation."
ONCE_MORE = (
    "A unit is reduced once more when gradients of it come after its reduction: all ranks must do that equally often, "
    "and run equally many micro-batches. Where some ranks alone call backward twice on one forward, add the losses up "
    "and call it once; where they call a block more often in reentrant checkpoints, pass use_reentrant=False; or do it "
    "on every rank."
)


class Entry(NamedTuple):
    """One operation that a rank has begun; `place` is its number in its sequence, from 0."""

    place: int
    op: str
    unit: str


class Wait(NamedTuple):
    """A call in which a rank waits for peers; `number` counts calls of its kind on the axis, from 1.

    peer  the only one that it waits for, by its place on the axis; None: all of them
    """

    axis: str
    op: str
    unit: str
    number: int
    peer: int | None = None


class OwnCall(NamedTuple):
    """A collective of the program's own in which the main thread of a rank is, of these ranks of the world.

    seen  the last question of the judge's since which it has been in the same call; 0: none
    """

    op: str
    ranks: Sequence[int]
    seen: int = 0


class Steps(NamedTuple):
    """Holds what is known of a rank's steps.

    stage     of ZeRO; 0: not known
    left_out  steps that it has not taken after their backward
    """

    stage: int = 0
    left_out: int = 0


NOTHING_KNOWN = Steps()


class OrderLog:
    """Keeps the operations begun by a rank on one axis; a call of `add` takes a fraction of a microsecond.

    begins  called before the first operation
    blocks  a wait blocks the host, as on gloo
    wait    the call that keeps the host waiting now, as the fields of a `Wait`
    steps   of the axis' engine
    """

    wait: tuple[str, str, str, int, int | None] | None = None
    steps = NOTHING_KNOWN

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
    """Holds all that one rank tells its peers: its logs, and the call in which it waits.

    axes    the world's numbers of the ranks on each of its axes, in the axis' order
    parts   operations that it has begun, by axis and sequence
    names   operation and unit of a code
    counts  calls that it has begun, by axis and operation
    wait    the call in which it waits, if that blocks its host; the other fields were read during that call
    call    the program's own collective, if the rank is in one instead
    steps   of its engine
    """

    axes: Mapping[str, Sequence[int]]
    parts: Mapping[tuple[str, str], Part]
    names: Mapping[int, tuple[str, str]]
    counts: Mapping[tuple[str, str], int]
    wait: Wait | None = None
    call: OwnCall | None = None
    steps: Steps = NOTHING_KNOWN

    @classmethod
    def of(
        cls,
        axes: Mapping[str, Sequence[int]],
        entries: Mapping[tuple[str, str], Sequence[Entry]],
        counts: Mapping[tuple[str, str], int],
        wait: Wait | None = None,
        call: OwnCall | None = None,
        steps: Steps = NOTHING_KNOWN,
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
        return cls(axes, parts, names, counts, wait, call, steps)

    def pack(self) -> str:
        """Return it as text: some hundred bytes where operations repeat, as they do from step to step."""
        told = {
            "axes": self.axes,
            "parts": [[*key, part.first, base64.b64encode(part.codes).decode()] for key, part in self.parts.items()],
            "names": [[code, *about] for code, about in self.names.items()],
            "counts": [[*key, count] for key, count in self.counts.items()],
            "wait": self.wait,
            "call": self.call,
            "steps": self.steps,
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
                None if told["call"] is None else OwnCall(*told["call"]),
                Steps(*told["steps"]),
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

    @property
    def blocked(self) -> bool:
        """Return whether it waits in a call of ours, or is in a collective of the program's own."""
        return bool(self.awaited()) or self.call is not None

    def last(self, axis: str, op: str) -> str:
        """Return words for the last operation that this rank has begun on an axis, of the sequence that `op` is in."""
        part = self.parts.get((axis, SEQUENCES_OF.get(op, (REDUCTIONS,))[0]))
        last, unit = self.names[part.code(part.end - 1)] if part is not None and part.codes else ("the mesh", "-")
        return f"had begun nothing since {last}{_of(unit)}" + (f" and was in {_own(self.call)}" if self.call else "")


class Difference(NamedTuple):
    """The first place at which ranks of one axis have begun different operations.

    begun  ranks of the world by begun operation, the rarest operation first
    steps  of all ranks that have told
    """

    axis: str
    place: int
    begun: Mapping[tuple[str, str], Sequence[int]]
    steps: Mapping[int, Steps] = MappingProxyType({})

    @property
    def is_forward(self) -> bool:
        """Return whether some ranks end a step or an evaluation where others begin a forward, with the root's unit."""
        return set(self.begun) == {("all_gather", ROOT), ("exchange", "-")}

    def text(self) -> str:
        """Return the error's text: each rank's operation at this place, and the remedy."""
        if self.is_forward:
            more, fewer = (_ranks(self.begun[each]) for each in (("all_gather", ROOT), ("exchange", "-")))
            ends = "at an exchange, as ends a step or an evaluation"
            s, are = ("" if len(self.begun["all_gather", ROOT]) > 1 else "s"), _are(self.begun["exchange", "-"])
            said = f"{more} begin{s} one more forward, where {fewer} {are} {ends}"
            return f"{NEVER_MEET}: on axis {self.axis} {said}. {_left_out(self.steps) or MORE_FORWARDS}"
        ordered = sorted(self.begun.items(), key=lambda each: each[0][0] == "exchange")
        told = [f"{_ranks(ranks)} {_does(about, len(ranks) > 1)}" for about, ranks in ordered]
        said = f"{told[0]}, where {', '.join(told[1:])}"
        ops = [op for op, _ in self.begun]
        ahead = f"; units are gathered up to {AHEAD} ahead of their use" if "all_gather" in ops else ""
        place = f"(operation {self.place + 1:,} in this order{ahead})"
        return f"{NEVER_MEET}: on axis {self.axis} {said} {place}. {_remedy(ops, self.steps)}"


class Circle(NamedTuple):
    """Ranks each of which waits in a call that the next one, and of the last one the first, has not begun."""

    waits: Sequence[tuple[int, Wait | OwnCall]]
    steps: Mapping[int, Steps] = MappingProxyType({})

    @property
    def calls(self) -> list[OwnCall]:
        """Return the program's own calls: such a call may have ended since its rank told of it."""
        return [wait for _, wait in self.waits if isinstance(wait, OwnCall)]

    def text(self) -> str:
        """Return the error's text: which rank waits for which, in which call, and the remedy."""
        others = [rank for rank, _ in [*self.waits[1:], self.waits[0]]]
        told = [
            f"rank {rank} waits in {_own(wait) if isinstance(wait, OwnCall) else _ours(wait)}, "
            f"which rank {other} has not begun"
            for (rank, wait), other in zip(self.waits, others, strict=True)
        ]
        ops = [wait.op for _, wait in self.waits]
        return f"{NEVER_MEET}: {'; '.join(told)}. {OWN_CALL if self.calls else _remedy(ops, self.steps)}"


def find_disagreement(posts: Mapping[int, Post]) -> Difference | Circle | None:
    """Return a proof that ranks can never meet, from the posts of some or all of them; None without one."""
    found = find_difference(posts) or find_circle(posts)
    return None if found is None else found._replace(steps={rank: post.steps for rank, post in posts.items()})


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
    stuck = {rank: _waits_for(rank, posts) for rank in posts}
    while free := [rank for rank, peers in stuck.items() if not any(peer in stuck for peer in peers)]:
        for rank in free:
            del stuck[rank]
    path: list[int] = []
    rank = min(stuck, default=-1)
    while rank in stuck and rank not in path:
        path.append(rank)
        rank = next(peer for peer in stuck[rank] if peer in stuck)
    circle = path[path.index(rank) :] if path else []
    waits = [(each, wait) for each in circle if (wait := posts[each].wait or posts[each].call) is not None]
    return Circle(waits) if circle else None


def _waits_for(rank: int, posts: Mapping[int, Post]) -> list[int]:
    """Return the ranks, among those with a post, that have not begun the call in which this rank waits.

    For a call of the program's own these are the ranks in a call of ours, and all others must be blocked as well.
    """
    post = posts[rank]
    if post.wait is not None:
        others = [peer for peer in post.awaited() if peer in posts and peer != rank]
        return [peer for peer in others if not posts[peer].has_begun(post.wait)]
    if post.call is None or not all(peer in posts and posts[peer].blocked for peer in post.call.ranks):
        return []
    return [peer for peer in post.call.ranks if posts[peer].call is None]


def _are(ranks: Sequence[int]) -> str:
    return "are" if len(ranks) > 1 else "is"


def _ours(wait: Wait) -> str:
    return f"{wait.op}{_of(wait.unit)} on axis {wait.axis}"


def _own(call: OwnCall) -> str:
    return f"the program's own torch.distributed.{call.op}"


def _remedy(ops: Collection[str], steps: Mapping[int, Steps]) -> str:
    """Return the advice for ranks that differ in these operations."""
    if said := _left_out(steps):
        return said
    stage = max((each.stage for each in steps.values()), default=0)
    of_gathers = REMEDY if stage in (0, 3) else STEPS.format(stage)
    return ONCE_MORE if "all_gather" not in ops and not {"reduce_scatter", "all_to_all"}.isdisjoint(ops) else of_gathers


def _left_out(steps: Mapping[int, Steps]) -> str:
    """Return the advice if some ranks have left out more steps than others; empty if none has."""
    numbers: dict[int, list[int]] = {}
    for rank, each in sorted(steps.items()):
        numbers.setdefault(each.left_out, []).append(rank)
    told = [f"{_ranks(ranks)}: {number:,}" for number, ranks in sorted(numbers.items(), reverse=True)]
    return LEFT_OUT.format("; ".join(told)) if len(numbers) > 1 else ""


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
