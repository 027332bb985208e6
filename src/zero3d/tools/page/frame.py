"""A page: one file that needs nothing else. Its style is style.css and what paint.py makes of the palette.

A policy forbids scripts and loading anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from markupsafe import Markup

from zero3d.tools.page.markup import join, tag
from zero3d.tools.page.paint import SERIES, colour, style as painted

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
FITS = 12  # characters of a key figure that fit in the narrowest tile of style.css


def page(title: str, *body: Markup, series: int = SERIES) -> str:
    """Write the whole file. series: how many have a colour each."""
    style = Markup(painted(series) + (files("zero3d.tools.page") / "style.css").read_text(encoding="utf-8"))
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=POLICY),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *body)), lang='en')}\n"


def card(title: object, *inside: object) -> Markup:
    """Make a section with its heading."""
    return tag("section", tag("h2", title), *inside, class_="card")


def pair(*cards: Markup) -> Markup:
    """Put cards beside each other where there is room."""
    return tag("div", *cards, class_="pair")


def paragraph(words: object, class_: str | None = None) -> Markup:
    """Make a paragraph; class_ dim for a remark."""
    return tag("p", words, class_=class_)


def tiles(figures: Iterable[tuple[str, str, str]]) -> Markup:
    """List key figures: what, how much, a remark. A long figure has the room of two, so that it is not broken."""
    return tag("dl", *(_tile(*figure) for figure in figures), class_="tiles")


def _tile(what: str, how_much: str, remark: str) -> Markup:
    room = "long" if len(how_much) > FITS else None
    return tag("div", tag("dt", what), tag("dd", how_much, tag("small", remark)), class_=room)


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[object]], columns: str, low: bool = False) -> Markup:
    """Make a table that scrolls in its own box. columns: < text, > number, = text that wraps, one per column.

    low: the box has the height of a chart
    """
    classes = [{"<": None, ">": "number", "=": "wrap"}[side] for side in columns]
    titles = (tag("th", words, scope="col", class_=class_) for words, class_ in zip(head, classes, strict=True))
    lines = (
        tag("tr", *(tag("td", cell, class_=class_) for cell, class_ in zip(row, classes, strict=True))) for row in rows
    )
    inside = tag("table", tag("thead", tag("tr", *titles)), tag("tbody", *lines))
    return tag("div", inside, class_="scroll low" if low else "scroll", tabindex="0", role="region", aria_label=name)


def wide(drawing: Markup, name: str) -> Markup:
    """Put a drawing into a box of its own that scrolls where the screen is narrow."""
    return tag("div", drawing, class_="scroll wide", tabindex="0", role="region", aria_label=name)


def more(summary: str, *inside: Markup, shown: bool = False) -> Markup:
    """Hide what is there on a click."""
    return tag("details", tag("summary", summary), *inside, open="open" if shown else None)


def legend(names: Sequence[str], classes: Sequence[str] | None = None) -> Markup:
    """List which colour is which; without classes those of the series."""
    classes = classes or [colour(i) for i in range(len(names))]
    items = (tag("li", tag("i", "", class_=class_), words) for words, class_ in zip(names, classes, strict=True))
    return tag("ul", join(items), class_="legend")
