"""How long the rest of a run takes, if it takes as long as what this session has done so far."""

from __future__ import annotations

from collections.abc import Callable


class Remaining:
    """Estimates the time left from the mean of this session's steps, with all that was between them.

    The first step, which allocates, compiles and warms up, counts only until there is another one.

    clock  seconds
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.begin(1, 0)

    def begin(self, first: int, last: int) -> None:
        """Begin to count: the next step is `first`, and the run ends after `last`."""
        self._first, self._last = first, last
        self._started = self._warm = self._clock()

    def after(self, step: int) -> float | None:
        """Return the seconds left after `step`, of which the session's first was told; None where it is the last."""
        now = self._clock()
        if step <= self._first:
            self._warm = now
            per_step = now - self._started
        else:
            per_step = (now - self._warm) / (step - self._first)
        return per_step * (self._last - step) if step < self._last else None
