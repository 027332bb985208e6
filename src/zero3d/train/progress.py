"""A run's progress on a console: a live bar on a terminal, a line every few steps elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress as Bar, TaskID, TextColumn, TimeRemainingColumn

LINES = 20  # printed over a run where there is no terminal
SHORT = "loss {loss:5.3f}  norm {grad_norm:5.3f}  lr {lr:.1e}  {tokens_per_s:6,.0f} tok/s"  # 80 columns with the bar
FIGURES = "loss {loss:6.4f}  grad norm {grad_norm:6.3f}  lr {lr:.2e}  {tokens_per_s:8,.0f} tokens/s"


class Progress:
    """Says what happens. The console of every rank but the first is quiet."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task = TaskID(0)
        self._steps = 0

    def say(self, text: str) -> None:
        """One line."""
        self._console.print(text, highlight=False, soft_wrap=not self._console.is_terminal)

    def track(self, steps: range) -> Iterator[int]:
        """Yield the steps while the bar is shown."""
        self._steps = len(steps)
        if self._console.quiet or not self._console.is_terminal:
            yield from steps
            return
        columns = (
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=8),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=self._console) as self._bar:
            self._task = self._bar.add_task("", total=len(steps), figures="")
            yield from steps
        self._bar = None

    def show(self, record: Mapping[str, Any]) -> None:
        """One finished step."""
        if self._bar is not None:
            self._bar.update(self._task, completed=record["step"], figures=SHORT.format(**record))
        elif record["step"] % max(self._steps // LINES, 1) == 0 or record["step"] == 1:
            step = f"{record['step']:>{len(str(self._steps))}}/{self._steps}"
            self.say(f"step {step}  {FIGURES.format(**record)}")
