"""What the charts share: an area with margins, linear and logarithmic scales, axes with round numbers.

  left      area.width      right
+-----+-------------------+------+  top        A drawing is `WIDTH` units wide, so that its letters are still
|     |                   |      |             readable at the width of a phone; a page scales it by its view box.
|  y  |                   |      |  area       Units are those of SVG: y grows downwards.
+-----+-------------------+------+
|            x                   |  bottom
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

from markupsafe import Markup

from zero3d.tools.page.markup import tag
from zero3d.tools.page.paint import attributes

WIDTH = 480.0
LETTER = 7.2  # units of an average letter at the size of a chart's text
SHADES = 4  # classes z0 ...
FONT = "system-ui, -apple-system, 'Segoe UI', sans-serif"
NAMESPACE = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Scale:
    """Values between `low` and `high` to units between `start` and `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        if self.log:
            share = (log10(value) - log10(self.low)) / (log10(self.high) - log10(self.low))
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + (self.end - self.start) * share

    def ticks(self, about: int = 5) -> list[float]:
        """Round values inside: 1, 2 or 5 times powers of ten."""
        if self.log:
            powers = range(floor(log10(self.low)), ceil(log10(self.high)) + 1)
            digits = (1, 2, 5) if self.high < 200 * self.low else (1,)
            ticks = [digit * 10.0**power for power in powers for digit in digits]
        else:
            step = round_step((self.high - self.low) / about)
            ticks = [i * step for i in range(ceil(self.low / step), floor(self.high / step + 1e-9) + 1)]
        return [tick for tick in ticks if self.low <= tick <= self.high * (1 + 1e-9)]


def round_step(rough: float) -> float:
    """Return the next of 1, 2, 5, 10 times a power of ten."""
    power = 10.0 ** floor(log10(rough))
    return next(digit * power for digit in (1, 2, 5, 10) if digit * power >= rough * (1 - 1e-9))


def drawing(
    name: str, title: str, description: str, height: float, body: Sequence[Markup], width: float = WIDTH
) -> Markup:
    """Make an image with a title and a description for those who do not see it. name: one of its own on the page."""
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        shape("rect", width="100%", height="100%", class_="paper"),
        *body,
        xmlns=NAMESPACE,
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        font_family=FONT,
        style=f"aspect-ratio:{width:g}/{height:g}",
    )


def shape(name: str, *inside: object, class_: str, **more: object) -> Markup:
    """Make an element of a drawing, which is painted as its classes say also where there is no page around it."""
    painted = {key.replace("-", "_"): value for key, value in attributes(class_).items()}
    return tag(name, *inside, **more, class_=class_, **painted)


def label(x: float, y: float, words: object, anchor: str = "start", class_: str = "label") -> Markup:
    """Write text; anchor: start, middle or end of it lies at x."""
    return shape("text", words, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """Draw a straight line."""
    return shape("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def shorten(words: str, width: float) -> str:
    """Return as much of a text as fits into so many units."""
    letters = max(1, int(width / LETTER))
    return words if len(words) <= letters else words[: letters - 1].rstrip() + "\N{HORIZONTAL ELLIPSIS}"


def x_axis(scale: Scale, top: float, bottom: float, title: str, whole: bool = False) -> Iterator[Markup]:
    """Draw grid lines with their values below, and a title below those. whole: at whole numbers alone."""
    for tick in scale.ticks():
        if whole and tick % 1:
            continue
        x = scale(tick)
        yield line(x, top, x, bottom, "grid")
        yield label(x, bottom + 16, in_figures(tick), "middle", "dim")
    yield label((scale.start + scale.end) / 2, bottom + 35, title, "middle", "dim")


def y_axis(scale: Scale, left: float, right: float, title: str) -> Iterator[Markup]:
    """Draw grid lines with their values on the left, and a title above."""
    for tick in scale.ticks():
        y = scale(tick)
        yield line(left, y, right, y, "grid")
        yield label(left - 6, y + 4.5, in_figures(tick), "end", "dim")
    yield label(4, scale.end - 12, title, "start", "dim")


def in_figures(value: float) -> str:
    """Write a value beside an axis: millions in full, what is beyond with an exponent."""
    return f"{value:,.9g}" if 1e6 <= abs(value) < 1e9 else f"{value:,.6g}"


def shade(i: int) -> str:
    """Return the class of the i-th of a few groups in order, which are no series: a shade of the text's colour."""
    return f"z{i % SHADES}"
