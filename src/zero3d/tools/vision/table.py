"""The table of types that this package carries: types.json, which benchmarks/tables.py writes with docs/models.md.

    trained     the verdict of the type's trial (trial.py)
    packed      whether documents of one sequence are kept apart
    pp, tp      whether there are pipeline stages, and tensor-parallel degrees
    processor   "yes" where its image processor needs nothing beyond zero3d[vlm]; else the package that it needs
    why         what the trial said where it did not train

Of pp, tp and packing the engine's own checks are asked, of the tiny model.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zero3d.spec.text import columns

FILE = Path(__file__).with_name("types.json")
WIDTH = 100


class Type(NamedTuple):
    """Says what became of one type."""

    type: str
    trained: str
    packed: str
    pp: str
    tp: str
    processor: str
    why: str


class Table(NamedTuple):
    """Holds the rows of all types, and what they were tried with, and when."""

    transformers: str
    date: str
    types: tuple[Type, ...]


def read() -> Table:
    """Return what the package carries."""
    found = json.loads(FILE.read_text())
    return Table(**{**found, "types": tuple(Type(**row) for row in found["types"])})


def as_text(table: Table) -> str:
    """Return the table for people; below it, why a type is not trained."""
    head = [name for name in Type._fields if name != "why"]
    lines = [f"tiny models, with transformers {table.transformers}, on {table.date}", ""]
    lines += columns([head, *([*row[:-1]] for row in table.types)], "<" * len(head))
    return "\n".join([*lines, "", *_reasons(table)])


def _reasons(table: Table) -> Iterator[str]:
    for row in table.types:
        if row.why:
            yield from textwrap.wrap(f"{row.type}: {row.why}", WIDTH, initial_indent=" " * 3, subsequent_indent=" " * 6)
