"""`zero3d report OUTPUT --html`: what a run was, as a page.

how it ended, and what to type to go on | key figures | curves by step, with what happened when | memory over the run,
and by consumer beside the formulas | where a step went | a slow rank | traffic | settings, versions | what was unread

A card without anything to show is left out.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from markupsafe import Markup

from zero3d.config.describe import scalar
from zero3d.engine import report_view as view
from zero3d.spec.palette import category
from zero3d.spec.sizes import decimal
from zero3d.spec.text import count, size
from zero3d.spec.tiers import DEVICE
from zero3d.tools.cli.run_folder import RUNNING, UNKNOWN, Left
from zero3d.tools.page import frame
from zero3d.tools.page.charts import Bar, Span, bars, spans
from zero3d.tools.page.curves import Curve, curves, margin
from zero3d.tools.page.markup import tag
from zero3d.tools.page.paint import FORMS, MARKS, classes_of, series_needed
from zero3d.train import tables
from zero3d.train.curve import last_average, limits, smooth
from zero3d.train.stragglers import KINDS, Slow
from zero3d.zero.step_parts import PARTS, WORDS

SHOWN = 0.002  # of a step: parts that take less are in the table alone
STATES = {UNKNOWN: "how it ended is not known"}
SCALES = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))


def report_page(left: Left) -> str:
    """Write the page."""
    model = "A run" if left.config is None else view.word(left.config.model.path)
    ranks = left.count("ranks")
    on = f" on {ranks:,} rank{'s' * (ranks != 1)}" if ranks else ""
    title = f"{model}{on}: {STATES.get(left.state, left.state)}"
    averages = smooth(left.course.series.loss)
    memory, traffic = left.rows
    parts = [row for row in left.times if _number(row.get("mean") or row.get("seconds")) is not None]
    classes = classes_of(_held(memory), PARTS)
    cards = [
        *_curves(left, averages),
        *_memory(left, memory, classes),
        *_times(parts, classes),
        *_slow_rank(left),
        *_sample(left),
        *_traffic(left, traffic),
        *_settings(left),
    ]
    return frame.page(
        title,
        tag("h1", title),
        frame.paragraph(left.folder.root.resolve(), "dim"),
        *(frame.paragraph(line) for line in left.why),
        *_go_on(left),
        frame.tiles(_figures(left)),
        *cards,
        *_unread(left),
        frame.paragraph(f"Made of the run's folder on {time.strftime('%Y-%m-%d %H:%M:%S %z')}.", "dim"),
        series=series_needed(classes.values()),
    )


def _go_on(left: Left) -> Iterator[Markup]:
    if left.go_on is not None:
        what = "To go on: " if "--resume" in left.go_on else "Nothing is saved. To start anew: "
        yield tag("p", what, tag("code", left.go_on))


# --- key figures --------------------------------------------------------------------------------


def _figures(left: Left) -> Iterator[tuple[str, str, str]]:
    course, last = left.course, left.course.last
    if not last:
        yield "Step", "none yet" if left.state == RUNNING else "none", "no record of a step is there"
        return
    of = "" if left.steps is None else f" of {left.steps:,}"
    skipped = len(course.series.skipped)
    resumed = len(course.series.resumed)
    yield "Step", f"{last['step']:,}{of}", ", ".join(
        [f"{skipped:,} skipped"] * (skipped > 0) + [f"resumed {_times_in_words(resumed)}"] * (resumed > 0)
    ) or "none skipped"  # fmt: skip
    average, many = last_average(course.series.loss)
    yield "Loss", _digits(average), f"average of the last {many}; last step {_digits(course.losses[-1])}"
    if course.series.held_out:
        step, value = course.series.held_out[-1]
        yield "Held-out loss", _digits(value), f"step {step:,}; perplexity {math.exp(min(value, 700.0)):,.2f}"
    speed = _usual(course.recent, "tokens_per_s")
    if speed is not None:
        each = _usual(course.recent, "tokens_per_s_per_rank")
        if each is None and left.count("ranks"):
            each = speed / left.count("ranks")
        rate = "" if each is None else f"{each:,.0f} a rank; "
        yield "Tokens per second", f"{speed:,.0f}", f"{rate}median of the last {len(course.recent):,} steps"
    mfu, work = _usual(course.recent, "mfu"), _usual(course.recent, "tflops_per_rank")
    if mfu is not None:
        yield "MFU", f"{100 * mfu:.1f} %", "" if work is None else f"{_rate(work)} a rank"
    elif work is not None:
        yield "Model FLOP/s", _rate(work), "a rank; the device's peak is not known"
    if course.peak:
        yield "Peak memory", size(int(course.peak)), "rank 0" if _is_device_memory(left) else "of rank 0's process"
    yield "Time", _duration(course.seconds), f"{view.steps_in_words(len(course.losses))}"
    if isinstance(tokens := last.get("tokens"), int):
        yield "Tokens", count(tokens), "trained on so far"


def _usual(records: Sequence[Mapping[str, Any]], name: str) -> float | None:
    """Return the median of a field in records; None where none has it."""
    known = [value for record in records if (value := _number(record.get(name))) is not None]
    return median(known) if known else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e30
    return float(value) if is_number else None


def _rate(tflops: float) -> str:
    """Return operations per second, in a unit that has digits before the point."""
    value, unit = (tflops, "TFLOP/s") if tflops >= 0.1 else (1000 * tflops, "GFLOP/s")
    return f"{value:,.1f} {unit}" if value >= 10 else f"{value:.3g} {unit}"


def _is_device_memory(left: Left) -> bool:
    """Return whether records are of a device's memory, some of which its allocator reserves; else of the process."""
    return any(map(math.isfinite, left.course.series.reserved))


def _digits(value: float) -> str:
    return f"{value:,.4f}" if math.isfinite(value) else "not finite"


def _duration(seconds: float) -> str:
    if not 0 <= seconds < 1e12:
        return "not known"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours:,} h {rest // 60:02} min" if hours else f"{rest // 60} min {rest % 60:02} s"


def _times_in_words(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


# --- curves -------------------------------------------------------------------------------------


class Panel(NamedTuple):
    """A drawing of curves; shown: values that are to be in its range; lines by their class."""

    name: str
    title: str
    shown: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def _curves(left: Left, of_loss: Sequence[float]) -> Iterator[Markup]:
    """Yield one card with all curves over the same steps."""
    series = left.course.series
    if not series.steps:
        return
    held_out = [value for _, value in series.held_out]
    panels = [
        Panel("loss", "loss (nats per token)", [*series.loss, *held_out], {"raw": series.loss, "average": of_loss}),
        Panel("rate", "learning rate", series.rate, {"average": series.rate}),
        Panel("norm", "gradient norm", series.norm, {"raw": series.norm, "average": smooth(series.norm)}),
        Panel("speed", "tokens per second", series.speed, {"raw": series.speed, "average": smooth(series.speed)}),
    ]
    found = {panel.name: limits(panel.shown, panel.lines["average"]) for panel in panels}
    ranges = {name: range_ for name, range_ in found.items() if range_ is not None}
    marks, indent, drawn = _marks(left), margin(ranges.values()), []
    for panel in panels:
        if panel.name in ranges:
            own = [Curve(class_, _points(series.steps, values)) for class_, values in panel.lines.items()]
            own += [Curve("held", series.held_out, dots=True)] * (panel.name == "loss" and bool(held_out))
            drawn.append(curves(panel.name, panel.title, own, ranges[panel.name], _span(left), marks, indent))
    named = {"raw": "each step", "average": "average"} | ({"held": "held out"} if held_out else {})
    named |= {kind: f"{FORMS[kind]} {MARKS[kind]} ({len(steps):,})" for kind, steps in marks.items()}
    yield frame.card(
        "Curves",
        frame.legend(list(named.values()), list(named)),
        frame.pair(*drawn) if drawn else frame.paragraph("No step has a finite value."),
    )


def _span(left: Left) -> tuple[int, int]:
    """Return the first and the last step that drawings show."""
    series = left.course.series
    return min([*series.steps, *series.resumed]), max(series.steps)


def _marks(left: Left) -> dict[str, list[int]]:
    """Return the steps of what happened, of each kind that did."""
    series = left.course.series
    found = {"saved": series.saves, "skipped": series.skipped, "slow": series.slow, "resumed": series.resumed}
    return {kind: steps for kind, steps in found.items() if steps}


def _points(steps: Sequence[int], values: Sequence[float]) -> list[tuple[float, float]]:
    return [(float(step), value) for step, value in zip(steps, values, strict=True)]


# --- memory -------------------------------------------------------------------------------------


def _memory(left: Left, rows: Sequence[tables.MemoryRow], classes: Mapping[str, str]) -> Iterator[Markup]:
    """Yield the course of memory beside what it is made of, and the table of consumers with exact bytes."""
    beside = [*_memory_course(left), *_memory_bars(left, rows, classes)]
    if beside:
        yield frame.pair(*beside)
    if not rows:
        return
    title = f"Memory of rank 0 of {left.count('ranks'):,}, in bytes"
    cells = [_memory_cells(row) for row in rows]
    words = f"Stage {view.word(left.report.get('stage'))}, {view.word(left.report.get('precision'))}. "
    words += "Buffers and gathered weights have their peak, each at its own instant; activations are those that one "
    words += f"forward pass keeps. States and buffers together: {left.count('peak_held'):,} bytes at the fullest."
    head = ("Place", "Consumer", "Dtype", "Measured", "", "By formula")
    yield frame.card(title, frame.paragraph(words, "dim"), frame.table(title, head, cells, "<<<><>"))


def _memory_cells(row: tables.MemoryRow) -> tuple[object, ...]:
    formula = "" if row.formula is None else f"{row.formula:,}"
    consumer, verdict = tables.shown(row.consumer, row.place), _verdict(row.agrees, row.at_most)
    return row.place, consumer, row.dtype, f"{row.measured:,}", verdict, formula


def _verdict(agrees: bool | None, at_most: bool) -> object:
    if agrees is None:
        return ""
    if agrees:
        return "at most" if at_most else "equal"
    return tag("span", "ABOVE" if at_most else "UNEQUAL", class_="bad")


def _memory_course(left: Left) -> Iterator[Markup]:
    series, title = left.course.series, "Memory over the run"
    both = {"average": series.memory, "raw": series.reserved}
    known = {class_: values for class_, values in both.items() if any(map(math.isfinite, values))}
    if not known:
        return
    most = max(value for values in known.values() for value in values if math.isfinite(value))
    unit, scale = _unit(most)
    drawn = [
        Curve(class_, _points(series.steps, [value / scale for value in values])) for class_, values in known.items()
    ]
    names = {"average": "allocated" if _is_device_memory(left) else "of the process", "raw": "reserved"}
    marks = {kind: steps for kind, steps in _marks(left).items() if kind == "resumed"}
    yield frame.card(
        title,
        frame.legend([names[class_] for class_ in known], list(known)),
        curves("memory", f"{unit} of rank 0", drawn, (0.0, most / scale), _span(left), marks),
    )


def _held(rows: Sequence[tables.MemoryRow]) -> list[str]:
    """Return the consumers that a bar is made of, as tables call them, from the bottom."""
    return list(dict.fromkeys(row.consumer for row in rows if category(row.consumer) and row.measured > 0))


def _memory_bars(left: Left, rows: Sequence[tables.MemoryRow], classes: Mapping[str, str]) -> Iterator[Markup]:
    """Yield a bar per place, by consumer."""
    held = [row for row in rows if category(row.consumer) and row.measured > 0]
    if not held:
        return
    places = list(dict.fromkeys(row.place for row in held))
    unit, scale = _unit(max(sum(row.measured for row in held if row.place == place) for place in places))
    drawn = []
    for place in places:
        parts: dict[str, float] = {}
        for row in held:
            if row.place == place:
                name = tables.shown(row.consumer, DEVICE)
                parts[name] = parts.get(name, 0.0) + row.measured / scale
        total = sum(row.measured for row in held if row.place == place)
        drawn.append(Bar("on the device" if place == DEVICE else f"on the {place}", parts, size(total)))
    series = {tables.shown(name, DEVICE): classes[name] for name in _held(rows)}
    remark = "Each consumer at its own peak. A formula for each is in the table below."
    yield frame.card(
        "What rank 0 holds",
        frame.legend(list(series), list(series.values())),
        bars("held", "What rank 0 holds", drawn, series, unit),
        frame.paragraph(remark, "dim"),
    )


def _unit(most: float) -> tuple[str, float]:
    return next((pair for pair in SCALES if most >= pair[1]), ("B", 1))


# --- time ---------------------------------------------------------------------------------------


def _times(rows: Sequence[Mapping[str, Any]], classes: Mapping[str, str]) -> Iterator[Markup]:
    """Yield where a step's seconds went: the mean of all ranks as one bar, and each part with its ranks."""
    found = [
        Span(str(row["part"]), classes[str(row["part"])], *_over_ranks(row))
        for row in rows
        if str(row.get("part")) in classes
    ]
    whole = sum(row.mean for row in found)
    seen = sorted((row for row in found if row.mean > SHOWN * whole), key=lambda row: -row.mean)
    if not seen:
        return
    series = {row.label: row.class_ for row in seen}
    whole_step = Bar("a step, mean of all ranks", {row.label: row.mean for row in seen}, f"{whole:.3g} s")
    head = ("Part", "Mean s", "Share", "Least s", "Largest s")
    cells = [
        (row.label, f"{row.mean:.4g}", f"{100 * row.mean / whole:.1f} %", f"{row.least:.4g}", f"{row.largest:.4g}")
        for row in found
    ]
    table = frame.table("Where a step went", head, cells, "<>>>>")
    yield frame.card(
        "Where a step went",
        frame.legend([WORDS.get(name, name) for name in series], list(series.values())),
        frame.pair(
            tag("div", bars("step", "A step", [whole_step], series, "s"), table),
            spans("ranks", "Parts of a step by rank", [_in_words(row) for row in seen], "s"),
        ),
        frame.paragraph("Brackets and whiskers: from the rank with the least to the one with the most.", "dim"),
        frame.more("What the parts are", frame.table("Parts", ("Part", "What it is"), [*PARTS.items()], "<=")),
    )


def _over_ranks(row: Mapping[str, Any]) -> tuple[float, float, float]:
    """Return the least, the mean and the largest of a part; its own seconds where no more is known."""
    mean = _number(row.get("mean"))
    mean = (_number(row.get("seconds")) or 0.0) if mean is None else mean
    least, largest = (_number(row.get(name)) for name in ("least", "largest"))
    return mean if least is None else least, mean, mean if largest is None else largest


def _in_words(row: Span) -> Span:
    return row._replace(label=WORDS.get(row.label, row.label))


def _slow_rank(left: Left) -> Iterator[Markup]:
    """Yield the last rank that a record calls slow, and in what; where none does, what report.json says."""
    record, told = left.course.slowest, left.report.get("slowest")
    if (slow := Slow.of_fields(record)) is None:
        if isinstance(told, str):
            yield frame.card("A slow rank", frame.paragraph(view.word(told)))
        return
    hosts = left.report.get("hosts")
    names = [view.word(host) for host in hosts] if isinstance(hosts, list) else []
    rows = [(kind, f"{slow.seconds[kind]:+.4g}") for kind in KINDS]
    yield frame.card(
        "A slow rank",
        frame.paragraph(f"At step {record['step']:,}: {slow.line(names)}."),
        frame.table("A slow rank", ("Its own time", "Seconds a step over the median"), rows, "<>"),
        frame.paragraph(f"What to look at: zero3d doctor --run {left.folder.root}", "dim"),
    )


def _sample(left: Left) -> Iterator[Markup]:
    """Yield the text at the run's end."""
    if isinstance(text := left.report.get("sample"), str) and text:
        yield frame.card("A sample", tag("pre", text))


# --- tables -------------------------------------------------------------------------------------


def _traffic(left: Left, rows: Sequence[tables.TrafficRow]) -> Iterator[Markup]:
    if not left.rows[0]:
        return
    steps = view.steps_in_words(left.count("session_steps"))
    title = f"Traffic of rank 0 of {left.count('ranks'):,} in {steps}"
    if not rows:
        yield frame.card(title, frame.paragraph("One rank sends nothing."))
        return
    cells = [
        (row.op, *map("{:,}".format, row.measured), _verdict(row.equal, at_most=False), f"{row.formula.bytes:,}")
        for row in rows
    ]
    head = ("Operation", "Calls", "Elements", "Bytes", "", "Bytes by formula")
    remark = f"The last session's, {decimal(sum(row.measured.bytes for row in rows))} in all. "
    remark += "Equal: calls, elements and bytes of every unit."
    yield frame.card(title, frame.paragraph(remark, "dim"), frame.table(title, head, cells, "<>>><>"))


def _settings(left: Left) -> Iterator[Markup]:
    """Yield settings beside versions, and what one step sends by formula."""
    rows = [
        (row["name"], scalar(row["value"]), "" if row["value"] == row["default"] else scalar(row["default"]))
        for row in left.settings()
    ]
    cards = []
    if rows:
        remark = frame.paragraph("The important ones, and all that are not the default.", "dim")
        cards.append(frame.card("Settings", remark, frame.table("Settings", ("Key", "Value", "Default"), rows, "<==")))
    found = [_table(table) for table in (view.became(left.engine), view.versions(left.engine)) if table.rows]
    if found:
        cards.append(tag("div", *found))
    if cards:
        yield frame.pair(*cards)
    if (sent := view.step_traffic(left.engine)).rows:
        yield _table(sent)


def _table(table: view.Table) -> Markup:
    """Make a card of a table of an engine's report."""
    columns = "".join(">" if column.is_figure else "=" if column.wraps else "<" for column in table.columns)
    title = table.title[0].upper() + table.title[1:]
    head = [column.head for column in table.columns]
    below = [frame.paragraph(table.caption, "dim")] if table.caption else []
    return frame.card(title, frame.table(title, head, table.rows, columns), *below)


def _unread(left: Left) -> Iterator[Markup]:
    if left.unread:
        yield frame.card("Not shown", *(frame.paragraph(line) for line in left.unread))
