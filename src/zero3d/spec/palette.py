"""The colours of all pictures and pages, each for a light and for a dark ground. No torch, no matplotlib.

    CATEGORIES   what memory holds, the same everywhere
    INKS         text, lines and ground
    CURVES       what a run's curves are drawn with
    RUNS         runs beside each other in one picture

Those of memory can be told apart by people who see no red, no green or no blue (`tests/unit/test_palette.py` has the
arithmetic), and neighbours in a stack differ in brightness, so that they do in grey, too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Colour(NamedTuple):
    """A colour on a light and on a dark ground, as #rrggbb."""

    light: str
    dark: str


CATEGORIES: Mapping[str, Colour] = {  # in the order in which they are stacked
    "parameters": Colour("#2f5597", "#7d89d5"),
    "gradients": Colour("#e8ac3c", "#fdbb52"),
    "optimizer": Colour("#ae2711", "#c44e2f"),
    "padding": Colour("#b7d6d0", "#98a7b8"),
    "gathered": Colour("#79b6e7", "#abd2ff"),
    "bucket": Colour("#736c2a", "#899855"),
    "wire": Colour("#7b2a62", "#a54b94"),
    "received": Colour("#dc8fbb", "#fbc4d3"),
    "buffers": Colour("#4d3524", "#896b4e"),
    "inputs": Colour("#ecd395", "#f6efc0"),
    "activations": Colour("#32b887", "#24ba91"),
    "temporary": Colour("#7c8b52", "#bad683"),
}
OTHER_NAMES = {"optimizer states": "optimizer"}  # what tables call a category
INKS: Mapping[str, Colour] = {
    "back": Colour("#f6f7f9", "#0e1116"),
    "card": Colour("#ffffff", "#171b22"),
    "text": Colour("#1b1f24", "#e8ecf1"),
    "dim": Colour("#57606a", "#a3adb8"),
    "line": Colour("#d8dee4", "#343b45"),
    "accent": Colour("#0b5cad", "#6cb6ff"),
    "on": Colour("#ffffff", "#10141a"),
    "bad": Colour("#b3261e", "#ff8a80"),
    "raw": Colour("#9ab8d8", "#5b7aa3"),
    "average": Colour("#1f4e8c", "#7db4f5"),
    "held": Colour("#c4512d", "#ff9d6e"),
    "saved": Colour("#1f7a4d", "#4fc487"),
    "slow": Colour("#730bda", "#a655f6"),
}
RUNS = ("#1f4e8c", "#c4512d", "#3a8a5c", "#e8b04a", "#7a5aa6", "#4f86c6", "#8c6d46", "#555555")


def category(name: str) -> str | None:
    """Return the category that a table's or a picture's name means; None for what is none."""
    known = OTHER_NAMES.get(name, name.removeprefix("temporary: "))
    return known if known in CATEGORIES else None


def light(name: str) -> str:
    """Return the colour of a category or an ink on a light ground. Raises KeyError for what is none."""
    found = category(name)
    return (INKS[name] if found is None else CATEGORIES[found]).light
