"""Tags and text, valid as HTML and as XML: text is escaped on its way in, every tag is closed.

Escaping is MarkupSafe's, which jinja2 and so torch bring; its `Markup` is text that goes into a page as it is.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

_ILLEGAL = dict.fromkeys((*range(9), 11, 12, *range(14, 32), 0xFFFE, 0xFFFF), "?")  # in XML, however written


def text(value: object) -> Markup:
    """Return a value as text of a page; markup stays what it is."""
    if isinstance(value, Markup):
        return value
    legal = str(value).encode("utf-8", "replace").decode().translate(_ILLEGAL)  # no halves of surrogate pairs either
    return escape(legal)


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """Make an element. class_ is class, and other underscores are hyphens; None leaves an attribute out."""
    pairs = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{name}{pairs}>{join(inside)}</{name}>" if inside else f"<{name}{pairs} />")


def join(parts: Iterable[object]) -> Markup:
    """Put parts one after another."""
    return Markup("".join(text(part) for part in parts))


def number(value: object) -> object:
    """Round a coordinate to a tenth of a unit; all else stays unchanged."""
    return f"{value:.1f}".removesuffix(".0") if isinstance(value, float) else value
