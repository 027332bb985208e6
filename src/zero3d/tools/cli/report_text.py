"""A run's folder as text for people and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.config.describe import scalar
from zero3d.engine import report_view as view
from zero3d.spec.tiers import DEVICE
from zero3d.tools.cli.run_folder import Left
from zero3d.train import tables
from zero3d.train.curve import as_text, smooth

CURVE = 10  # steps from which a curve is drawn


def as_json(left: Left) -> dict[str, Any]:
    """Return plain values; none in the place of numbers that JSON does not have."""
    course = left.course
    tree = {
        "version": 1,
        "folder": str(left.folder.root.resolve()),
        "state": left.state,
        "why": list(left.why),
        "step": course.last.get("step"),
        "steps": left.steps,
        "losses": course.losses,
        "values": course.values,
        "seconds": course.seconds,
        "times": list(left.times),
        "settings": left.settings(every=True),
        "report": left.report,
        "unread": list(left.unread),
    }
    return {name: _finite(value) for name, value in tree.items()}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def show(left: Left, console: Console) -> None:
    """Print everything for people."""
    for line in _head(left):
        console.print(Text(line), soft_wrap=True)
    if console.encoding.startswith("utf") and len(left.course.losses) >= CURVE:
        console.print(Text("\nloss (nats per token), running average", style="bold"))
        for line in as_text(smooth(left.course.losses)):
            console.print(line, no_wrap=True)
    for table in _tables(left):
        console.print()
        console.print(table)
    for line in left.unread:
        console.print(Text(f"not shown: {line}"), soft_wrap=True)


def _head(left: Left) -> Iterator[str]:
    """Yield what the run was, how it ended, and how far it came."""
    course, ranks = left.course, left.report.get("ranks")
    on = "" if ranks is None else f" on {view.word(ranks)} rank{'' if ranks == 1 else 's'}"
    model = "a run" if left.config is None else view.word(left.config.model.path)
    yield f"{left.folder.root}: {model}{on}, {left.state}"
    yield from (f"  {line}" for line in left.why)
    if course.last:
        of = "" if left.steps is None else f" of {left.steps:,}"
        skipped = course.last.get("skipped")
        more = f", {skipped:,} of them skipped" if skipped else ""
        done = view.steps_in_words(len(course.losses))
        yield f"step {course.last['step']:,}{of}{more}; {done} in {course.seconds:.1f} s"
        values = ", ".join(f"{view.word(name)} {value:.6f}" for name, value in course.values.items())
        yield f"last loss {course.losses[-1]:.6f}{f'; last evaluation: {values}' if values else ''}"
    if isinstance(slowest := left.report.get("slowest"), str):
        yield view.word(slowest)
    if isinstance(sample := left.report.get("sample"), str) and sample:
        yield "a sample:"
        yield from (f"    {view.word(line)}" for line in sample.splitlines())


def _tables(left: Left) -> Iterator[Table]:
    """Yield settings, memory, traffic, time by part and versions, as far as they are known."""
    report, engine = left.report, left.engine
    for table in (_settings(left), view.became(engine)):
        if table.rows:
            yield view.in_terminal(table)
    memory, traffic = left.rows
    if memory:
        ranks, words = left.count("ranks"), f"stage {view.word(report.get('stage'))}"
        words += f", {view.word(report.get('precision'))}"
        yield tables.memory_table(memory, ranks, words, left.count("peak_held"))
        if any(row.place != DEVICE for row in memory):
            yield tables.tiers_table(memory)
        yield tables.traffic_table(traffic, ranks, view.steps_in_words(left.count("session_steps")))
    for table in (view.step_traffic(engine), view.times({"times": left.times}), view.versions(engine)):
        if table.rows:
            yield view.in_terminal(table)


def _settings(left: Left) -> view.Table:
    """Return keys that are not the default, and the important ones, as a file has them."""
    rows = []
    for row in left.settings():
        is_usual = row["value"] == row["default"]
        rows.append([row["name"], scalar(row["value"]), "the default" if is_usual else scalar(row["default"])])
    others = "all other keys have their defaults, which zero3d config show lists."
    return view.Table("settings", view.SETTINGS[:3], rows, others)
