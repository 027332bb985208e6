r"""Curves over steps, with marks at steps: a drawing of the size of a chart, however many steps there are.

loss  |\  !        x    resumed: a line through all; skipped, slow: along the upper edge; saved: along the lower edge
      | \_!__ _ _
      |___!__^_____     Of a long curve each stretch of steps has its least and its greatest value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from markupsafe import Markup

from zero3d.tools.page.markup import tag
from zero3d.tools.page.paint import MARKS
from zero3d.tools.page.svg import WIDTH, Scale, drawing, in_figures, label, shape, x_axis, y_axis

HEIGHT, TOP, BOTTOM, RIGHT = 220.0, 34.0, 44.0, 28.0
STRETCHES = 400  # of a curve: more cannot be seen at the width of a drawing
AIR = 0.08  # of the range, above and below
SAVED = "saved"
FEW = 40  # points that have a dot each
SIZE = 4.0  # of a mark, in each direction
CROWDED = 40  # marks from which on they are narrow
WIDEST = 8.3  # units of a figure at the largest size, which a phone has


class Curve(NamedTuple):
    """A curve: the class that paints it, its points by step; dots: each point is to be seen."""

    class_: str
    points: Sequence[tuple[float, float]]
    dots: bool = False


def curves(
    name: str,
    title: str,
    drawn: Sequence[Curve],
    range_: tuple[float, float],
    span: tuple[float, float],
    marks: Mapping[str, Sequence[float]],
    left: float | None = None,
) -> Markup:
    """Draw curves over the steps of `span`. Values above `range_` lie on its upper edge, and the drawing says so.

    marks  steps by what happened there, a class of MARKS
    left   the margin, where others have the same one: `margin` of all their ranges
    """
    left = margin([range_]) if left is None else left
    up, high = _upwards(range_), range_[1]
    first, last = span
    edge = max(0.5, 0.01 * (last - first))
    across = Scale(first - edge, last + edge, left, WIDTH - RIGHT)
    body = [*x_axis(across, TOP, HEIGHT - BOTTOM, "step", whole=True), *y_axis(up, left, WIDTH - RIGHT, title)]
    highest = max((value for curve in drawn for _, value in curve.points if math.isfinite(value)), default=high)
    if highest > high:
        body.append(label(WIDTH - RIGHT, TOP - 12, f"highest {in_figures(highest)}", "end", "dim"))
    for curve in drawn:
        body += _curve(curve, across, up)
    body += _marks(marks, across)
    return drawing(name, title, _described(title, drawn, marks), HEIGHT, body)


def margin(ranges: Iterable[tuple[float, float]]) -> float:
    """Return the left margin in which the values of all these ranges have room."""
    most = max((len(in_figures(tick)) for range_ in ranges for tick in _upwards(range_).ticks()), default=0)
    return max(44.0, 14 + WIDEST * most)


def _upwards(range_: tuple[float, float]) -> Scale:
    low, high = range_
    air = AIR * (high - low) or 0.05 * abs(high) or 1.0
    return Scale(low - air, high + air, HEIGHT - BOTTOM, TOP)


def _curve(curve: Curve, across: Scale, up: Scale) -> Iterator[Markup]:
    places = [(across(step), up(min(value, up.high))) for step, value in thinned(curve.points)]
    runs = [[*run] for is_known, run in groupby(places, lambda place: math.isfinite(place[1])) if is_known]
    paths = ["L".join(f"{x:.1f} {y:.1f}" for x, y in run) for run in runs if len(run) > 1]
    if paths:
        yield shape("path", d="".join(f"M{path}" for path in paths), class_=curve.class_)
    many = sum(map(len, runs))
    for run in runs:
        if len(run) == 1 or (curve.dots and many <= FEW):
            for x, y in run:
                yield shape("circle", cx=x, cy=y, r=2.6, class_=f"{curve.class_}-dot")


def thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most twice as many points as STRETCHES: of each stretch the least and the greatest, in their order.

    The first and the last point stay. A stretch without a finite value has one that is not, which is a gap.
    """
    if len(points) <= 2 * STRETCHES:
        return [*points]
    kept = {0, len(points) - 1}
    for stretch in range(STRETCHES):
        begin, end = stretch * len(points) // STRETCHES, (stretch + 1) * len(points) // STRETCHES
        known = [place for place in range(begin, end) if math.isfinite(points[place][1])]
        kept |= {choose(known, key=lambda place: points[place][1]) for choose in (min, max)} if known else {begin}
    return [points[place] for place in sorted(kept)]


def _marks(marks: Mapping[str, Sequence[float]], across: Scale) -> Iterator[Markup]:
    """Draw each kind of mark as one path; those that would lie on each other are one."""
    bottom = HEIGHT - BOTTOM
    forms = {
        SAVED: lambda x: f"M{x:.1f} {bottom - 1.5 * SIZE:g}l{SIZE:g} {2 * SIZE:g}h-{2 * SIZE:g}z",
        "skipped": lambda x: (
            f"M{x - SIZE:.1f} {TOP - SIZE:g}l{2 * SIZE:g} {2 * SIZE:g}m-{2 * SIZE:g} 0l{2 * SIZE:g} -{2 * SIZE:g}"
        ),
        "slow": lambda x: f"M{x:.1f} {TOP + SIZE:g}l{SIZE:g} -{2 * SIZE:g}h-{2 * SIZE:g}z",
        "resumed": lambda x: f"M{x:.1f} {TOP:g}V{bottom:g}",
    }
    narrow = lambda x: f"M{x - 0.5:g} {bottom - 2 * SIZE:g}h1v{2 * SIZE:g}h-1z"  # noqa: E731
    for kind, steps in marks.items():
        inside = sorted({round(across(step)) for step in steps if across.low <= step <= across.high})
        if inside:
            form = forms[kind] if kind != SAVED or len(inside) < CROWDED else narrow
            hint = tag("title", f"{MARKS[kind]}: {len(steps):,}")
            yield shape("path", hint, d="".join(map(form, inside)), class_=kind)


def _described(title: str, drawn: Sequence[Curve], marks: Mapping[str, Sequence[float]]) -> str:
    """Return a drawing's description: where its first curve begins and ends, and how many marks it has."""
    known = [(step, value) for step, value in drawn[0].points if math.isfinite(value)] if drawn else []
    ends = f"{known[0][1]:.4g} at step {known[0][0]:,g}, {known[-1][1]:.4g} at step {known[-1][0]:,g}" if known else "-"
    counted = "".join(f"; {MARKS[kind]}: {len(steps):,}" for kind, steps in marks.items() if steps)
    return f"{title}: {ends}{counted}"
