"""Paints each class of a drawing: as attributes of its elements, and by the style of a page.

attributes   the colours of the light ground: a drawing that is taken out of its page, or printed, stays as it was
style        the same by the page's variables, which are others on a dark ground; a style goes before attributes

Both are made of PAINT, whose colours are names of variables, and those of the palette.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from colorsys import hls_to_rgb
from itertools import count
from typing import NamedTuple

from zero3d.spec.palette import CATEGORIES, INKS, Colour, category

GOLDEN = 0.618  # of the colour wheel, from a hue to the next one: none comes close to another soon
LIGHTNESS = 0.3, 0.75  # in turns, so that neighbours differ in brightness, and both schemes show both
SATURATION = 0.6


class Mix(NamedTuple):
    """So many per cent of a variable's colour, the rest of another's."""

    of: str
    percent: int
    rest: str = "card"


Paint = Mapping[str, "str | Mix"]


def _ordered(name: str, *percents: int, attribute: str = "fill") -> dict[str, Paint]:
    """Return classes of shades of the text's colour, for a few things in order that are no series."""
    return {f"{name}{i}": {attribute: Mix("text", percent)} for i, percent in enumerate(percents)}


PAINT: Mapping[str, Paint] = {
    "paper": {"fill": "card"},
    "label": {"fill": "text", "font-size": "13"},
    "dim": {"fill": "dim", "font-size": "12"},
    "strong": {"fill": "text", "font-size": "13", "font-weight": "600"},
    "on0": {"fill": "on", "font-size": "12"},
    "on1": {"fill": "#10141a", "font-size": "12"},
    "on2": {"fill": "#10141a", "font-size": "12"},
    "grid": {"stroke": "line", "stroke-width": "1"},
    "limit": {"stroke": "bad", "stroke-width": "1.5", "stroke-dasharray": "5 4"},
    "peak": {"stroke": "text", "stroke-width": "1.2", "stroke-dasharray": "2 3"},
    "part": {"stroke": "card", "stroke-width": ".6"},
    "area": {"stroke": "none"},
    "whisker": {"stroke": "text", "stroke-width": "1.4", "fill": "none"},
    "dots": {"fill": "none", "stroke-width": "4.5", "stroke-linecap": "round", "opacity": ".75"},
    "front": {"fill": "none", "stroke": "text", "stroke-width": "1.4"},
    "frontier": {"fill": "card", "stroke": "text", "stroke-width": "2"},
    "k0s0": {"fill": "c0", "stroke": "card", "stroke-width": "1"},
    "k0s1": {"fill": Mix("c0", 78), "stroke": "card", "stroke-width": "1"},
    "k1s0": {"fill": "c1", "stroke": "card", "stroke-width": "1"},
    "k1s1": {"fill": Mix("c1", 70), "stroke": "card", "stroke-width": "1"},
    "k2s0": {"fill": "c10", "stroke": "card", "stroke-width": "1"},
    "k2s1": {"fill": Mix("c10", 70), "stroke": "card", "stroke-width": "1"},
    "raw": {"fill": "none", "stroke": "raw", "stroke-width": "1", "stroke-linejoin": "round"},
    "average": {"fill": "none", "stroke": "average", "stroke-width": "2", "stroke-linejoin": "round"},
    "held": {"fill": "none", "stroke": "held", "stroke-width": "1.5", "stroke-linejoin": "round"},
    **{f"{curve}-dot": {"fill": curve} for curve in ("raw", "average", "held")},
    "saved": {"fill": "saved"},
    "skipped": {"fill": "none", "stroke": "bad", "stroke-width": "1.6"},
    "slow": {"fill": "slow"},
    "resumed": {"fill": "none", "stroke": "dim", "stroke-width": "1.2", "stroke-dasharray": "4 3"},
    **_ordered("z", 25, 45, 65, 90, attribute="stroke"),
    **_ordered("p", 16, 40, 66, 95),
}
MARKS = {  # what happened at a step
    "saved": "checkpoint saved",
    "skipped": "step skipped",
    "slow": "slow rank named",
    "resumed": "run resumed",
}
FORMS = {
    "saved": "\N{BLACK UP-POINTING TRIANGLE}",
    "skipped": "\N{MULTIPLICATION SIGN}",
    "slow": "\N{BLACK DOWN-POINTING TRIANGLE}",
    "resumed": "\N{BROKEN BAR}",
}  # as text
SERIES = len(CATEGORIES)  # that have a colour in the palette


def colour(i: int) -> str:
    """Return the class of the i-th series: of the palette's categories, and of as many more as there are."""
    return f"c{i}"


def category_class(name: str) -> str:
    """Return the class of a category of the palette."""
    return colour([*CATEGORIES].index(name))


def series_needed(classes: Iterable[str]) -> int:
    """Return how many series need a colour each for these classes of theirs to have one."""
    return 1 + max([int(class_.removeprefix("c")) for class_ in classes], default=0)


def attributes(classes: str) -> dict[str, str]:
    """Return what the classes of an element paint it with, on a light ground. Raises KeyError for an unknown class."""
    return {name: _light(value) for class_ in classes.split() for name, value in _paint(class_).items()}


def classes_of(categories: Iterable[str], others: Iterable[str]) -> dict[str, str]:
    """Return the class of each name's colour, none of which two have.

    A category of memory has the one that it has everywhere; all other names have those that are left over.
    """
    names = [*categories]
    known = {name: category_class(found) for name in names if (found := category(name)) is not None}
    free = filter(lambda class_: class_ not in known.values(), map(colour, count()))
    return known | {name: next(free) for name in dict.fromkeys([*names, *others]) if name not in known}


def style(series: int = SERIES) -> str:
    """Write the variables of both grounds, and the rules of all classes. series: how many have a colour each."""
    series = max(series, SERIES)
    known = _variables(series)
    light, dark = ("".join(f" --{name}: {value[ground]};" for name, value in known.items()) for ground in (0, 1))
    rules = "".join(_rules(series))
    return f":root {{{light} }}\n@media screen and (prefers-color-scheme: dark) {{\n:root {{{dark} }}\n}}\n{rules}"


def _rules(series: int) -> Iterator[str]:
    for class_ in (*PAINT, *map(colour, range(series))):
        paint = {name: _by_variable(value) for name, value in _paint(class_).items()}
        yield f"svg .{class_} {{ {' '.join(f'{name}: {value};' for name, value in paint.items())} }}\n"
        drawn = [paint[name] for name in ("fill", "stroke") if paint.get(name, "none") != "none"]
        if drawn:
            yield f"i.{class_} {{ background: {drawn[0]}; }}\n"


def _paint(class_: str) -> Paint:
    return PAINT[class_] if class_ in PAINT else {"fill": f"c{int(class_.removeprefix('c'))}"}


def _variables(series: int) -> dict[str, Colour]:
    own = [*CATEGORIES.values(), *map(_further, range(SERIES, series))]
    return {**INKS, **{colour(i): value for i, value in enumerate(own)}}


def _further(i: int) -> Colour:
    """Return a colour for a series that the palette has none for."""
    parts = hls_to_rgb(i * GOLDEN % 1, LIGHTNESS[i % 2], SATURATION)
    value = "#" + "".join(f"{round(255 * part):02x}" for part in parts)
    return Colour(value, value)


def _variable(name: str) -> Colour | None:
    if name in INKS:
        return INKS[name]
    number = name.removeprefix("c")
    return _variables(int(number) + 1)[name] if number.isdecimal() and name != number else None


def _light(value: str | Mix) -> str:
    if isinstance(value, Mix):
        one, other = (_light(name) for name in (value.of, value.rest))
        mixed = (
            round((int(one[i : i + 2], 16) * value.percent + int(other[i : i + 2], 16) * (100 - value.percent)) / 100)
            for i in (1, 3, 5)
        )
        return "#" + "".join(f"{part:02x}" for part in mixed)
    found = _variable(value)
    return value if found is None else found.light


def _by_variable(value: str | Mix) -> str:
    if isinstance(value, Mix):
        return f"color-mix(in srgb, var(--{value.of}) {value.percent}%, var(--{value.rest}))"
    return value if _variable(value) is None else f"var(--{value})"
