"""One line on stderr about work that takes more than a second: rewritten on a terminal, now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

from zero3d.page import plan_text
from zero3d.plan.search import Progress

AFTER, EVERY, SELDOM = 1.0, 0.2, 10.0  # seconds: of silence, between lines of a terminal, between those of a file


class ProgressLine:
    """Writes what is under way; `with` it, so that the terminal's line is empty again."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._begun = self._last = clock()
        self._on_terminal = self._stream.isatty()
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown and self._on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    @property
    def seconds(self) -> float:
        """Return how long the work has taken."""
        return self._clock() - self._begun

    def show(self, text: str) -> None:
        """Write the text, unless nothing is due."""
        now = self._clock()
        wait = (EVERY if self._shown else AFTER) if self._on_terminal else SELDOM
        if now - self._last < wait:
            return
        self._last, self._shown = now, True
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text[:width]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()

    def of_search(self, progress: Progress) -> None:
        """Write how far a search is."""
        self.show(search_text(progress, self.seconds))


def search_text(progress: Progress, seconds: float) -> str:
    """Return a line on a search: how many plans are priced, the time left, and the best plan so far."""
    left = seconds / progress.done * (progress.all - progress.done) if progress.done else 0.0
    text = f"{progress.priced:,} plans priced, about {left:.0f} s left"
    if progress.best is None:
        return f"{text}; none fits yet"
    best = progress.best
    return f"{text}; best so far {best.estimate.seconds.mid:.3g} s a step: {plan_text.short(best.plan)}"


def say(text: str) -> None:
    """Write a line about work that begins, where somebody watches a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
