"""One line on stderr about work that takes more than a second: rewritten on a terminal, now and then elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TextIO

STOPPED = 130  # exit code of what Ctrl-C ended
AFTER, EVERY, SELDOM = 1.0, 0.2, 10.0  # seconds: of silence, between lines of a terminal, between those of a file


class ProgressLine:
    """Writes what is under way; `with` it, so that the terminal's line is empty again.

    on_terminal  somebody watches
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream or sys.stderr, clock
        self._begun = self._last = clock()
        self.on_terminal = self._stream.isatty()
        self._shown = False

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._shown and self.on_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()

    @property
    def seconds(self) -> float:
        """Return how long the work has taken."""
        return self._clock() - self._begun

    @property
    def due(self) -> bool:
        """Return whether a line would be written now."""
        wait = (EVERY if self._shown else AFTER) if self.on_terminal else SELDOM
        return self._clock() - self._last >= wait

    def show(self, text: str) -> None:
        """Write the text, if one is due."""
        if not self.due:
            return
        self._last, self._shown = self._clock(), True
        if self.on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"\r\x1b[K{text[:width]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def time_left(done: int, many: int, seconds: float) -> str:
    """Return the time left as text, estimated from the seconds that `done` of `many` items took."""
    return f"about {seconds / done * (many - done):.0f} s left" if done else "the first is not done yet"


def say(text: str) -> None:
    """Write a line about work that begins, where somebody watches a terminal."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)
