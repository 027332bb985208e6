"""A run's progress on a console: a live bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TaskID, TextColumn

from zero3d.spec.text import size

LINES = 20  # printed over a run where there is no terminal
FORMATS = {
    "validation_loss": "held-out loss {:.6f}",
    "perplexity": "perplexity {:,.3f}",
    "ema_validation_loss": "held-out loss of averaged weights {:.6f}",
}
# Fits 80 columns with the bar; `amounts` stand below it.
SHORT = "loss {loss:5.3f}  norm {grad_norm:5.3f}  lr {lr:.1e}  {tokens_per_s:6,.0f} tok/s"


class Progress:
    """Shows what happens. The console of every rank but the first is quiet.

    every  steps between lines; None prints about LINES in a run where there is no terminal, and none above the bar
    clock  seconds
    """

    def __init__(self, console: Console, every: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._remaining = Remaining(clock)
        self._console = console
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._steps = 0
        self._every = every

    def say(self, text: str) -> None:
        """Print one line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=not self._console.is_terminal)

    def track(self, first: int, last: int) -> Iterator[int]:
        """Yield the steps first .. last while the bar is shown."""
        self._steps = last
        self._remaining.begin(first, last)
        if self._console.quiet or not self._console.is_terminal:
            yield from range(first, last + 1)
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[figures]}"),
            TextColumn("{task.fields[left]}"),
        )
        try:
            with Bar(*columns, console=self._console) as self._bar:
                self._task = self._bar.add_task("", total=last, completed=first - 1, figures="", left="")
                yield from range(first, last + 1)
        finally:
            self._bar = None

    def show(self, record: Mapping[str, Any]) -> None:
        """Show one finished step."""
        step, every = record["step"], self._every or max(self._steps // LINES, 1)
        left = self._remaining.after(step)
        if self._bar is not None:
            shown = f"{SHORT.format(**record)}\n{amounts(record)}"
            self._bar.update(self._task, completed=step, figures=shown, left="" if left is None else duration(left))
        if (self._bar is None or self._every) and (step % every == 0 or step in (1, self._steps)):
            self.say(f"step {step:>{len(str(self._steps))}}/{self._steps}  {figures(record)}{in_words(left)}")

    def show_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Print an evaluation: the held-out loss, and values of one's own by their names."""
        parts = [FORMATS.get(name, f"{name} {{:g}}").format(value) for name, value in values.items()]
        self.say(f"step {step}: {', '.join(parts)}{in_words(self._remaining.after(step))}")


def in_words(left: float | None) -> str:
    """Return the words of a line about the time that is left."""
    return "" if left is None else f"  {duration(left)} left"


def figures(record: Mapping[str, Any]) -> str:
    """Return everything that a line says of a step."""
    first = "loss {loss:6.4f}  grad norm {grad_norm:6.3f}  lr {lr:.2e}  {tokens_per_s:8,.0f} tokens/s".format(**record)
    return f"{first}  {amounts(record)}"


def amounts(record: Mapping[str, Any]) -> str:
    """Return what a step used and sent, and how many have been skipped."""
    parts = [
        f"MFU {record['mfu']:.1%}" if "mfu" in record else "",
        held(record["memory_bytes"], record.get("reserved_bytes")),
        f"{size(record['traffic_bytes'], keep_zero=True)} sent" if record["traffic_bytes"] else "",
        f"{record['skipped']} skipped" if record["skipped"] else "",
    ]
    return "  ".join(part for part in parts if part)


def held(memory: int, reserved: int | None) -> str:
    """Return a rank's memory in words: of an accelerator by tensors and by its allocator; on the CPU by its process.

    reserved  None on the CPU
    """
    taken = size(memory, keep_zero=True)
    return f"process {taken}" if reserved is None else f"{taken} allocated  {size(reserved, keep_zero=True)} reserved"


def duration(seconds: float) -> str:
    """Format seconds: 1:05 is a minute and five seconds; 2 d 03:00:00 more than two days."""
    days, rest = divmod(round(seconds), 86400)
    hours, rest = divmod(rest, 3600)
    clock = f"{rest // 60}:{rest % 60:02}" if not (days or hours) else f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
    return f"{days} d {clock}" if days else clock


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
