r"""The charts of the reports, from plain numbers. Colours are classes (`paint.py`).

    bars      label          total      scatter  |  .  . .     areas  |   /\_     lanes  0 |FF BB FF BB
              ####==--                           |  o.  .             |  /   \           1 | FF BB FF
                                                 |___o___o            |_/_____\
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from zero3d.tools.page.markup import join, tag
from zero3d.tools.page.svg import LETTER, WIDTH, Scale, drawing, label, line, shade, shape, shorten, x_axis, y_axis

BAR, ROW = 18.0, 44.0  # height of a bar, and of its row with the label above it
LEFT, RIGHT, TOP, BOTTOM = 52.0, 14.0, 34.0, 44.0  # margins
HEIGHT = 300.0
WIDE = 960.0  # of the lanes, which scroll on a phone


class Bar(NamedTuple):
    """A bar: parts by series; what stands at its end."""

    label: str
    parts: Mapping[str, float]
    total: str


def bars(
    name: str, title: str, rows: Sequence[Bar], series: Mapping[str, str], unit: str, limit: float = 0.0
) -> Markup:
    """Draw horizontal stacked bars, each below its label.

    series  parts in order, and the class of each one's colour; limit: a line across all bars
    """
    high = max(limit, *(sum(row.parts.values()) for row in rows)) * 1.02 or 1.0
    scale = Scale(0, high, 4, WIDTH - RIGHT)
    top = 26.0 if limit else 4.0
    bottom = top + ROW * len(rows)
    body = [*x_axis(scale, top, bottom, unit)]
    for i, row in enumerate(rows):
        y = top + ROW * i
        room = WIDTH - 8 - RIGHT - LETTER * (len(row.total) + 2)
        body += [label(4, y + 17, shorten(row.label, room)), label(WIDTH - RIGHT, y + 17, row.total, "end", "strong")]
        body += _bar(row, series, scale, y + 23, unit)
        if limit:
            body.append(line(scale(limit), y + 20, scale(limit), y + 26 + BAR, "limit"))
    if limit:
        body.append(label(scale(limit), top - 6, f"limit {limit:.4g} {unit}", "end", "dim"))
    description = "; ".join(f"{row.label}: {row.total}" for row in rows)
    return drawing(name, title, description, bottom + BOTTOM, body)


def _bar(row: Bar, series: Mapping[str, str], scale: Scale, y: float, unit: str) -> Iterator[Markup]:
    done = 0.0
    for part, class_ in series.items():
        value = row.parts.get(part, 0.0)
        if value > 0:
            x = scale(done)
            hint = tag("title", f"{part}: {value:.3g} {unit}")
            yield shape("rect", hint, x=x, y=y, width=scale(done + value) - x, height=BAR, class_=f"{class_} part")
            done += value


class Span(NamedTuple):
    """A bar up to the mean, and what lies between the least and the largest value."""

    label: str
    class_: str
    least: float
    mean: float
    largest: float


def spans(name: str, title: str, rows: Sequence[Span], unit: str) -> Markup:
    """Draw a bar per row up to its mean, and a whisker from the least to the largest value."""
    scale = Scale(0, max(row.largest for row in rows) * 1.02 or 1.0, 4, WIDTH - RIGHT)
    top, bottom = 4.0, 4.0 + ROW * len(rows)
    body = [*x_axis(scale, top, bottom, unit)]
    for i, row in enumerate(rows):
        y, ends = top + ROW * i, (scale(row.least), scale(row.largest))
        figures = f"{row.mean:.3g} {unit}"
        if row.largest > row.least:
            figures += f" ({row.least:.3g} to {row.largest:.3g})"
        body += [label(4, y + 17, row.label), label(WIDTH - RIGHT, y + 17, figures, "end", "strong")]
        body.append(shape("rect", x=4, y=y + 23, width=scale(row.mean) - 4, height=BAR, class_=f"{row.class_} part"))
        if row.largest > row.least:
            middle = y + 23 + BAR / 2
            caps = "".join(f"M{x:.1f} {middle - 5:.1f}v10" for x in ends)
            body.append(shape("path", d=f"M{ends[0]:.1f} {middle:.1f}H{ends[1]:.1f}{caps}", class_="whisker"))
    description = "; ".join(f"{row.label}: {row.mean:.3g} {unit}" for row in rows)
    return drawing(name, title, description, bottom + BOTTOM, body)


# --- scatter ------------------------------------------------------------------------------------


class Dot(NamedTuple):
    """A point of the front, with what it says."""

    x: float
    y: float
    words: str


class Axis(NamedTuple):
    """What an axis shows; limit: a line across it, 0 for none."""

    title: str
    limit: float = 0.0


def scatter(
    name: str, title: str, groups: Mapping[str, Sequence[tuple[float, float]]], front: Sequence[Dot], x: Axis, y: Axis
) -> Markup:
    """Draw points, a shade per group, and the front: those that none beats on both axes. Points in a place: one."""
    points = [point for group in groups.values() for point in group]
    across = _range([p[0] for p in points] + [x.limit] * bool(x.limit), LEFT, WIDTH - RIGHT)
    up = _range([p[1] for p in points], HEIGHT - BOTTOM, TOP)
    body = [*x_axis(across, TOP, HEIGHT - BOTTOM, x.title), *y_axis(up, LEFT, WIDTH - RIGHT, y.title)]
    taken: set[tuple[int, int]] = set()
    for i, group in enumerate(groups.values()):
        places = {(round(across(a)), round(up(b))) for a, b in group} - taken
        taken |= places
        body.append(shape("path", d="".join(f"M{a} {b}h0" for a, b in sorted(places)), class_=f"{shade(i)} dots"))
    if x.limit:
        at = across(x.limit)
        body += [
            line(at, TOP, at, HEIGHT - BOTTOM, "limit"),
            label(at - 4, TOP + 12, f"limit {x.limit:.4g}", "end", "dim"),
        ]
    steps = [f"{across(dot.x):.1f},{up(dot.y):.1f}" for dot in front]
    body.append(shape("polyline", points=" ".join(steps), class_="front"))
    body += [
        shape("circle", tag("title", dot.words), cx=across(dot.x), cy=up(dot.y), r=4.5, class_="frontier")
        for dot in front
    ]
    return drawing(name, title, f"{len(points):,} points; front: " + "; ".join(d.words for d in front), HEIGHT, body)


def _range(values: Sequence[float], start: float, end: float) -> Scale:
    """Return an axis with some air; logarithmic for more than a factor of ten."""
    low, high = min(values), max(values)
    if high > 10 * low > 0:
        return Scale(low / 1.15, high * 1.15, start, end, log=True)
    air = 0.06 * (high - low) or 0.5 * high or 1.0
    return Scale(max(0.0, low - air), high + air, start, end)


# --- over time ----------------------------------------------------------------------------------


class Stretch(NamedTuple):
    """A phase from an instant to the next."""

    start: float
    phase: str


def areas(
    name: str,
    title: str,
    times: Sequence[float],
    rows: Sequence[Sequence[float]],
    stretches: Sequence[Stretch],
    phases: Sequence[str],
    unit: str,
    classes: Sequence[str],
) -> Markup:
    """Draw series on top of each other, each value kept until the next time; the highest sum marked; phases below.

    rows: per time a value per series; classes: of the series
    """
    sums = [sum(row) for row in rows]
    best = max(range(len(sums)), key=sums.__getitem__)
    end = times[-1] + 1
    across = Scale(times[0], end, LEFT, WIDTH - RIGHT)
    up = Scale(0, sums[best] * 1.12 or 1.0, HEIGHT - BOTTOM, TOP)
    body = [*y_axis(up, LEFT, WIDTH - RIGHT, unit)]
    xs = [across(time) for time in (*times, end)]
    lower = [0.0] * len(rows)
    for i in range(len(rows[0])):
        upper = [low + row[i] for low, row in zip(lower, rows, strict=True)]
        if upper != lower:
            d = _steps(xs, [up(v) for v in upper]) + _steps(xs, [up(v) for v in lower], back=True) + "z"
            body.append(shape("path", d=d, class_=f"{classes[i]} area"))
        lower = upper
    body += _phases(stretches, phases, across)
    x, y = across(times[best]), up(sums[best])
    side = "end" if x > WIDTH / 2 else "start"
    body += [
        line(x, y, x, HEIGHT - BOTTOM, "peak"),
        label(x + (-4 if side == "end" else 4), y - 6, f"peak {sums[best]:.4g} {unit}", side, "strong"),
        label((across.start + across.end) / 2, HEIGHT - 6, "what was made and freed, in order", "middle", "dim"),
    ]
    return drawing(name, title, f"The most is {sums[best]:.4g} {unit}.", HEIGHT, body)


def _steps(xs: Sequence[float], ys: Sequence[float], back: bool = False) -> str:
    """Write a path that keeps every value until the next one: xs has one more. Equal neighbours are one step."""
    corners = [i for i in range(len(ys)) if i == 0 or round(ys[i], 1) != round(ys[i - 1], 1)]
    ends = [*corners[1:], len(ys)]
    if back:
        return "".join(f"L{xs[e]:.0f} {ys[i]:.1f}H{xs[i]:.0f}" for i, e in reversed([*zip(corners, ends, strict=True)]))
    return f"M{xs[0]:.0f} {ys[0]:.1f}" + "".join(
        f"V{ys[i]:.1f}H{xs[e]:.0f}" for i, e in zip(corners, ends, strict=True)
    )


def _phases(stretches: Sequence[Stretch], phases: Sequence[str], across: Scale) -> Iterator[Markup]:
    """Draw a strip below the areas; phases that are too short to be seen are left out."""
    y, paths = HEIGHT - BOTTOM + 4, dict.fromkeys(phases, "")
    ends = [*(stretch.start for stretch in stretches[1:]), across.high]
    for stretch, end in zip(stretches, ends, strict=True):
        x, width = across(stretch.start), across(end) - across(stretch.start)
        if width >= 0.3:
            paths[stretch.phase] += f"M{x:.1f} {y:g}h{width:.1f}v10h-{width:.1f}z"
    for i, (phase, d) in enumerate(paths.items()):
        if d:
            yield shape("path", tag("title", phase), d=d, class_=f"p{i}")


# --- lanes --------------------------------------------------------------------------------------


class Slot(NamedTuple):
    """Something a lane does from start to end; words: in it, where there is room. shade: 1 for the darker one."""

    start: float
    end: float
    kind: int
    words: str
    shade: int = 0


def lanes(name: str, title: str, rows: Mapping[str, Sequence[Slot]], end: float, unit: str) -> Markup:
    """Draw a lane per row, time to the right, one path per kind and shade. unit: what the time axis counts."""
    left = 18 + LETTER * max(map(len, rows))
    scale = Scale(0, end, left, WIDE - RIGHT)
    height, top = 24.0, 6.0
    bottom = top + height * len(rows)
    body = [*x_axis(scale, top, bottom, unit)]
    for i, (row, slots) in enumerate(rows.items()):
        y = top + height * i
        body.append(label(left - 8, y + 17, row, "end"))
        paths: dict[str, str] = {}
        words: list[Markup] = []
        for slot in slots:
            x, width = scale(slot.start), scale(slot.end) - scale(slot.start)
            which = f"k{slot.kind}s{slot.shade}"
            paths[which] = paths.get(which, "") + f"M{x:.1f} {y + 2:g}h{width:.1f}v20h-{width:.1f}z"
            if width > LETTER * len(slot.words) + 2:
                words.append(label(x + width / 2, y + 17, slot.words, "middle", f"on{slot.kind}"))
        body += [*(shape("path", d=d, class_=which) for which, d in paths.items()), join(words)]
    return drawing(name, title, f"{len(rows)} lanes over {end:.4g} {unit}", bottom + BOTTOM, body, WIDE)
