"""Tags and text, valid as HTML and as XML: text is escaped on its way in, every tag is closed."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

_ILLEGAL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF), "?")  # in XML, however written


class Markup(str):
    """Text that is markup already: it goes into a page as it is."""


def text(value: object) -> Markup:
    """A value as text of a page; markup stays what it is."""
    if isinstance(value, Markup):
        return value
    legal = str(value).encode("utf-8", "replace").decode().translate(_ILLEGAL)  # no halves of surrogate pairs either
    return Markup(escape(legal))


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """An element. class_ is class, and other underscores are hyphens; None leaves an attribute out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>{join(inside)}</{name}>" if inside else f"<{name}{pairs} />")


def join(parts: Iterable[object]) -> Markup:
    """One after another."""
    return Markup("".join(text(part) for part in parts))


def number(value: object) -> object:
    """A coordinate to a tenth of a unit; all else unchanged."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
