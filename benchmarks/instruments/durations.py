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
covers operations of that. It needs one of them when it reads or overwrites what that wrote, or overwrites what that
read, or when memory comes back to its pool that that has used: not memory which a side stream had for itself and which
comes back because compute waits, that is no reason to wait. What reads the result of an operation that is needed
finishes it, and is needed as soon. So with

    came       when compute would have gone on without the wait
    end[i]     of an operation that it covers
    work[i]    seconds of what compute has to do from the wait to where it first needs that; none if it is before its
               next wait, without end if it never needs it

compute goes on at max(end), and waiting for each where it is needed would have let it come as far as if it had gone on
at max(came, end[i] - work[i]). What is between these is lost, and the wait superfluous.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

COMPUTE = "compute"

NOTHING = 1e-8  # seconds that a wait may cost for nothing: less than one launch takes on any card

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
    """What compute waits for between two of its operations.

    came     when it would have gone on
    worked   seconds that it had worked by then
    until    how many operations it has been given when it is asked to wait again; 0: not yet
    covered  of every stream the numbers that were not over for compute before: first, last
    before   its next operation
    """

    def __init__(self, came: float, worked: float) -> None:
        self.came, self.worked, self.until = came, worked, 0
        self.covered: dict[str, tuple[int, int]] = {}
        self.before = ""

    def places(self) -> Iterator[Place]:
        """Yield what it covers."""
        for stream, (first, last) in self.covered.items():
            yield from ((stream, number) for number in range(first, last + 1))


class Timeline:
    """Start and end of every operation of each stream, by its number there; and waits of compute."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self._done: defaultdict[str, list[Done]] = defaultdict(list)
        self._ready: dict[str, tuple[float, Place]] = {}
        self._reads: dict[Place, set[Place]] = {}  # whose results an operation reads
        self._needed: dict[Place, tuple[int, float]] = {}  # by which of compute's operations, and its work before
        self._waits: list[Wait] = []
        self._worked = self._worked_before = 0.0  # with and without compute's last operation

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
        if stream == COMPUTE:
            self._worked_before, self._worked = self._worked, self._worked + seconds
            if self._waits and not self._waits[-1].before:
                self._waits[-1].before = operation

    def waits(self, covered: dict[str, tuple[int, int]]) -> None:
        """Say that compute waits for operations of others; those that it waits for in a row are one wait."""
        done = self._done[COMPUTE]
        if self._waits and self._waits[-1].before and not self._waits[-1].until:
            self._waits[-1].until = len(done)
        covered = {other: both for other, both in covered.items() if both[0] <= both[1] and other in self._done}
        if not covered:
            return
        if not self._waits or self._waits[-1].before:
            came = max(done[-1].end if done else 0.0, self._ready.get(COMPUTE, (0.0, None))[0])
            self._waits.append(Wait(came, self._worked))
        known = self._waits[-1].covered
        for other, (first, last) in covered.items():
            before = known.get(other, (first, last))
            known[other] = min(first, before[0]), max(last, before[1])

    def reads(self, stream: str, number: int, writer: Place) -> None:
        """Say that an operation reads what another one wrote."""
        self._reads.setdefault((stream, number), set()).add(writer)

    def needs(self, places: Iterable[Place], by_last: bool) -> None:
        """Say which operations must be over for compute's last operation, or for what it does next."""
        now = len(self._done[COMPUTE]), self._worked_before if by_last else self._worked
        for place in places:
            self._needed.setdefault(place, now)

    @property
    def superfluous(self) -> list[Superfluous]:
        """Waits of compute that cost time for what it did not need yet, of those that are over."""
        judged = [self._judged(wait) for wait in self._waits if wait.before]
        return [found for found in judged if found.seconds > NOTHING]

    def _judged(self, wait: Wait) -> Superfluous:
        needed: dict[Place, float] = {}  # and what compute has to do before
        for place in sorted(wait.places(), key=lambda place: self._at(place).start):
            found = [needed[writer] for writer in self._reads.get(place, ()) if writer in needed]
            if place in self._needed:
                operation, worked = self._needed[place]
                found.append(worked - wait.worked if 0 < wait.until < operation else 0.0)
            if found:
                needed[place] = min(found)
        late = max(map(self._at, wait.places()), key=lambda done: done.end)
        enough = max([wait.came, *(self._at(place).end - work for place, work in needed.items())])
        return Superfluous(late.stream, late.operation, max(0.0, late.end - enough), wait.before)

    def _at(self, place: Place) -> Done:
        return self._done[place[0]][place[1] - 1]

    # --- figures ----------------------------------------------------------------------------------

    @property
    def makespan(self) -> float:
        """Seconds until all is over."""
        return max((done[-1].end for done in self._done.values() if done), default=0.0)

    def busy(self, stream: str, since: float = 0.0) -> float:
        """Return the seconds in which a stream does something, from some second on."""
        return sum(done.end - max(done.start, since) for done in self._done[stream] if done.end > since)

    def idle(self, stream: str = COMPUTE, since: float = 0.0) -> float:
        """Return the seconds in which a stream does nothing, from some second on until all is over."""
        return self.makespan - since - self.busy(stream, since)

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
