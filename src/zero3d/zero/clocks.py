"""Where a step's time goes: seconds of this rank by part. Parts do not overlap: one inside of another interrupts it.

    on a CPU           the host's clock: who waits for peers is blocked there
    on an accelerator  time of the stream that computes, between events at which one part ends and the next begins

Nothing waits for an event: those of a step are read when the device has passed them, which is a step later.

Of each step a rank's own seconds are kept, too (`own`, own_seconds.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType

import torch

from zero3d.zero.own_seconds import OwnSeconds
from zero3d.zero.step_parts import OTHER, PARTS, WHOLE, OverRanks, OwnStep, PartTime
from zero3d.zero.streams import compute_stream

PENDING = 4096  # events between two looks at them


class _Inside:
    """A part that is entered and left, again and again."""

    def __init__(self, clocks: Clocks, part: str) -> None:
        self._clocks, self._part = clocks, part

    def __enter__(self) -> None:
        self._clocks.begin(self._part)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._clocks.end()


class Clocks:
    """Adds up the seconds of each part.

    steps   whose seconds have been read
    waited  the seconds that this process has spent in calls that wait for peers, so far
    """

    def __init__(self, device: torch.device, on: bool = True, waited: Callable[[], float] = float) -> None:
        """Begin between two steps, in no part."""
        self._on = on
        self.steps = 0
        self._waited, self._before = waited, waited()
        self._own = OwnSeconds(device.type != "cpu")
        self._device = device
        self._inside = {part: _Inside(self, part) for part in PARTS}
        self._parts = [OTHER]  # the running one comes last, behind those that it interrupts
        self._seconds, self._first = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)
        self._told = 0, 0, dict(self._seconds)  # steps as the last window began, as it ended; seconds then
        self._ended = 0, dict(self._seconds)  # as the last step did
        self._over_ranks: list[tuple[int, OverRanks]] = []  # with the steps that they are of
        self._of_device = device.type != "cpu"
        self._last = time.perf_counter()
        self._running = OTHER
        self._events: deque[tuple[torch.Event, str | None]] = deque()  # with the part that begins; None: a step ends
        self._free: list[torch.Event] = []

    @property
    def on(self) -> bool:
        """Whether anything is measured. What happens while nothing is counts in no part later."""
        return self._on

    @on.setter
    def on(self, on: bool) -> None:
        if on and not self._on:
            self._last, self._running = time.perf_counter(), self._parts[-1]
            self._before = self._waited()
            self._events.clear()
        self._on = on

    def of(self, part: str) -> AbstractContextManager[None]:
        """Count what happens inside as a part's."""
        return self._inside[part]

    def begin(self, part: str) -> None:
        """Begin a part, which interrupts the one that runs unless all inside of that is its own."""
        now = self._parts[-1]
        self._parts.append(now if now in WHOLE else part)
        if self._parts[-1] != now:
            self._mark(self._parts[-1])

    def end(self) -> None:
        """End the part that runs, and go on with what it interrupted."""
        ended = self._parts.pop()
        if self._parts[-1] != ended:
            self._mark(self._parts[-1])

    def end_step(self) -> None:
        """End a step."""
        if not self._on:
            return
        self._mark(None)
        if self._of_device:
            self._read()

    def _mark(self, part: str | None) -> None:
        """Note that a part begins now, or that a step ends."""
        if not self._on:
            return
        if self._of_device:
            if not self._events and part is not None:
                self._running = part
            event = self._free.pop() if self._free else torch.Event(self._device, enable_timing=True)
            event.record(compute_stream(self._device))
            self._events.append((event, part))
            if len(self._events) % PENDING == 0:
                self._read()
        else:
            now, waited = time.perf_counter(), self._waited()
            self._own.wait(self._running, waited - self._before)
            self._add(now - self._last, part)
            self._last, self._before = now, waited

    def _add(self, seconds: float, following: str | None) -> None:
        """Give the running part its seconds; another follows, or a step ends."""
        self._seconds[self._running] += seconds
        self._own.add(self._running, seconds)
        if following is not None:
            self._running = following
            return
        self.steps += 1
        if self.steps == 1:
            self._first = dict(self._seconds)
            self._told = 1, 1, dict(self._seconds)
        self._ended = self.steps, dict(self._seconds)
        self._own.end_step(self.steps)

    def _read(self) -> None:
        """Read what the device has passed. A caller's own stream may pass an event before the one that precedes it."""
        while len(self._events) > 1 and self._events[0][0].query() and self._events[1][0].query():
            (begun, _), (event, part) = self._events.popleft(), self._events[0]
            self._add(max(0.0, begun.elapsed_time(event)) / 1000, part)
            self._free.append(begun)

    # --- what has been measured -----------------------------------------------------------------

    @property
    def own(self) -> Sequence[OwnStep]:
        """What the last steps took of this rank's own time."""
        return self._own.steps

    def window(self) -> list[float]:
        """Return the seconds of each part in a step since the last call, in the order of PARTS; zeros of none.

        The first step, which allocates and compiles, counts in none.
        """
        (_, before, then), (steps, now) = self._told, self._ended
        self._told = before, steps, now
        return [(now[part] - then[part]) / max(1, steps - before) for part in PARTS]

    def hear(self, over_ranks: OverRanks) -> None:
        """Keep what all ranks' windows, of which this rank's was the last, come to."""
        begun, ended, _ = self._told
        self._over_ranks.append((ended - begun, over_ranks))

    def rows(self) -> list[PartTime]:
        """Return the parts that took any time, in the order of PARTS; of a first step where there is no other."""
        steps, seconds = self._ended
        first = dict.fromkeys(PARTS, 0.0) if steps == 1 else self._first
        heard = sum(many for many, _ in self._over_ranks)
        found = []
        for place, part in enumerate(PARTS):
            own = (seconds[part] - first[part]) / max(1, steps if steps == 1 else steps - 1)
            sums = (sum(many * each[i][place] for many, each in self._over_ranks) for i in range(3))
            over_ranks = [each / heard if heard else None for each in sums]
            if own or any(over_ranks):
                found.append(PartTime(part, own, *over_ranks))
        return found
