"""How long the streams of a race model (races.py) take: start and end of every operation, from the same clocks.

An operation begins when its stream has done what it was given before, and when all that its stream has waited for is
over. It lasts as long as the slowest of what it uses; the host takes no time, and no kernel is slower for another one:

    kernel      multiplications and additions / Machine.flops, or bytes that it reads and writes / Machine.memory
    collective  bytes that a rank sends / Machine.link
    copy        from or to the host: bytes / Machine.host

    timeline.makespan          seconds until all is over
    timeline.idle(stream)      seconds of these in which a stream does nothing
    timeline.critical_path()   the operations that follow each other without a pause, from the first to the last
    timeline.superfluous       what compute has waited for, and did not need

**An edge to compute ends in a tensor that compute reads next.** Compute waits for a moment of another stream, which
covers operations of that. It needs one of them if, before it waits again, it reads or overwrites what that wrote,
overwrites what that read, or gives memory back that that has used (of which compute had a part, too: what a side stream
has for itself comes back when compute waits, which is no reason to wait); and if it finishes one that is needed, by reading
what it wrote. Where another one ends later than all that are needed, and later than compute came to the wait, compute
has stood still for nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

COMPUTE = "compute"

Place = tuple[str, int]  # a stream, and an operation's number on it


class Machine(NamedTuple):
    """What a device does in a second.

    The numbers are of no real one: on this a block of the tests' models, of which a step has some dozens of tokens,
    computes about as long as its messages and copies take, as large ones do with thousands of tokens on a card.
    """

    flops: float = 2e11
    memory: float = 5e11  # bytes
    link: float = 1e10  # bytes to other ranks
    host: float = 1e10  # bytes to or from the host


class Done(NamedTuple):
    """An operation: when it began and ended, and after which one, if not at once."""

    stream: str
    operation: str
    start: float
    end: float
    after: Place | None


class Superfluous(NamedTuple):
    """A wait of compute that ended later than what compute needed: by the operation that ended last."""

    stream: str
    operation: str
    seconds: float
    before: str  # compute's next operation


class Wait:
    """What compute has waited for since its last operation, and what it needed of that so far.

    covered  of every stream the numbers that were not over for compute before: first, last
    came     when compute would have gone on
    """

    def __init__(self, came: float) -> None:
        self.came = came
        self.covered: dict[str, tuple[int, int]] = {}
        self.needed: set[Place] = set()
        self.before = ""

    def has(self, stream: str, number: int) -> bool:
        first, last = self.covered.get(stream, (1, 0))
        return first <= number <= last


class Timeline:
    """Start and end of every operation of each stream, by its number there; and waits of compute."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.superfluous: list[Superfluous] = []
        self._done: defaultdict[str, list[Done]] = defaultdict(list)
        self._ready: dict[str, tuple[float, Place]] = {}
        self._reads: dict[Place, set[Place]] = {}  # whose results an operation reads
        self._wait: Wait | None = None

    def ready(self, stream: str, moment: dict[str, int]) -> None:
        """Let a stream go on after a moment of others."""
        for other, number in moment.items():
            if other != stream and number and number <= len(self._done[other]):
                end = self._done[other][number - 1].end
                if end > self._ready.get(stream, (0.0, ("", 0)))[0]:
                    self._ready[stream] = end, (other, number)

    def add(self, stream: str, operation: str, seconds: float) -> None:
        """Put an operation on a stream."""
        done = self._done[stream]
        last = done[-1].end if done else 0.0
        ready, after = self._ready.get(stream, (0.0, None))
        begins = max(last, ready)
        before = after if ready > last else (stream, len(done)) if done else None
        done.append(Done(stream, operation, begins, begins + seconds, before))
        if stream == COMPUTE and self._wait is not None and not self._wait.before:
            self._wait.before = operation

    def waits(self, covered: dict[str, tuple[int, int]]) -> None:
        """Say that compute waits for operations of others; those that it waits for in a row are one wait."""
        covered = {other: both for other, both in covered.items() if both[0] <= both[1] and other in self._done}
        if not covered:
            return
        if self._wait is None or self._wait.before:
            self.judge()
            done = self._done[COMPUTE]
            self._wait = Wait(max(done[-1].end if done else 0.0, self._ready.get(COMPUTE, (0.0, None))[0]))
        for other, (first, last) in covered.items():
            known = self._wait.covered.get(other, (first, last))
            self._wait.covered[other] = min(first, known[0]), max(last, known[1])

    def reads(self, stream: str, number: int, writer: Place) -> None:
        """Say that an operation reads what another one wrote."""
        self._reads.setdefault((stream, number), set()).add(writer)

    def needs(self, places: Iterable[Place]) -> None:
        """Say which operations must be over for what compute, or the owner of memory, does now."""
        if self._wait is not None:
            self._wait.needed.update(place for place in places if self._wait.has(*place))

    def judge(self) -> None:
        """Judge the last wait, of which nothing more is to come."""
        wait, self._wait = self._wait, None
        if wait is None or not wait.before:
            return
        for stream, (first, last) in sorted(wait.covered.items(), key=lambda item: item[0] == COMPUTE):
            for number in range(first, last + 1):
                if self._reads.get((stream, number), set()) & wait.needed:
                    wait.needed.add((stream, number))
        late = max((self._at((other, last)) for other, (_, last) in wait.covered.items()), key=lambda done: done.end)
        enough = max([wait.came, *(self._at(place).end for place in wait.needed)])
        if late.end > enough:
            self.superfluous.append(Superfluous(late.stream, late.operation, late.end - enough, wait.before))

    def _at(self, place: Place) -> Done:
        return self._done[place[0]][place[1] - 1]

    # --- figures ----------------------------------------------------------------------------------

    @property
    def makespan(self) -> float:
        """Seconds until all is over."""
        return max((done[-1].end for done in self._done.values() if done), default=0.0)

    def busy(self, stream: str) -> float:
        """Return the seconds in which a stream does something."""
        return sum(done.end - done.start for done in self._done[stream])

    def idle(self, stream: str = COMPUTE) -> float:
        """Return the seconds in which a stream does nothing while others do."""
        return self.makespan - self.busy(stream)

    @property
    def streams(self) -> list[str]:
        """Those on which something ran."""
        return [stream for stream, done in self._done.items() if done]

    def critical_path(self) -> list[Done]:
        """Return the operations, the first one first, of which each begins when the one before it ends."""
        ends = [done[-1] for done in self._done.values() if done]
        path = [max(ends, key=lambda done: done.end)] if ends else []
        while path and path[-1].after is not None:
            path.append(self._at(path[-1].after))
        return path[::-1]

    def shares(self) -> dict[str, float]:
        """Return how many seconds of the critical path each stream has."""
        found: defaultdict[str, float] = defaultdict(float)
        for done in self.critical_path():
            found[done.stream] += done.end - done.start
        return dict(found)
