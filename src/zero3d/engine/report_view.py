"""An engine's report as tables: for a terminal, for a notebook. No torch: `zero3d report` reads what a run has left.

A table is made of the report's plain values, as `as_json` gives them and as a file has them: what is missing, or of
another type than it should be, is an empty cell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from io import StringIO
from typing import Any, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from zero3d.spec.sizes import decimal
from zero3d.spec.tiers import DEVICE

IMPORTANT = ("stage", "precision", "optimizer", "clip_norm", "accumulate")  # settings that are shown by default, too
LONGEST, LONGEST_NOTE = 200, 2000  # characters
MOST = 4096  # rows
OF_MEMORY = (
    "at rest, planned: by formula, between steps and with all gradients; of what comes and goes in a step at most so "
    "much. measured: when all of it is there. peak: each kind at its own instant; at fullest: at the instant at which "
    "most is held of all kinds together."
)
MOST_BYTES = 1 << 63
LEAST = 8  # characters of a column that wraps


class Column(NamedTuple):
    """Says what stands in a column of a table.

    is_figure  on its right side, never cut
    wraps      goes over several lines where the table is too wide
    """

    head: str
    is_figure: bool = False
    wraps: bool = False


class Table(NamedTuple):
    """Holds a table for people: every cell is a text."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    caption: str = ""


SETTINGS = (Column("setting"), *(Column(head, wraps=True) for head in ("value", "default", "became")))


def tables(tree: Mapping[str, Any], every_setting: bool = False) -> list[Table]:
    """Return the tables of a report; those without a row are left out. every_setting: defaults have rows, too."""
    found = [make(tree) for make in (memory, traffic, step_traffic, times)]
    found += [settings(tree, every_setting), versions(tree)]
    return [table for table in found if table.rows]


def memory(tree: Mapping[str, Any]) -> Table:
    """Return bytes by kind, with the place of those that are not on the device."""
    figures = ("at_rest", "planned", "measured", "peak", "at_peak")
    heads = [Column("kind"), Column("dtype", wraps=True)]
    heads += [Column(head, is_figure=True) for head in ("at rest", "planned", "measured", "peak", "at fullest")]
    rows = []
    for row in rows_of(tree, "memory"):
        place, kind = word(row.get("place")), word(row.get("category"))
        most = row["planned"] if row.get("planned") is not None else row.get("bound")
        cells = [nbytes(most if name == "planned" else row.get(name)) for name in figures]
        if any(cell not in ("", "0 B") for cell in cells):
            rows.append([kind if place == DEVICE else f"{kind} ({place})", word(row.get("dtype")), *cells])
    return Table(f"memory of {_rank(tree)}", heads, rows, OF_MEMORY)


def traffic(tree: Mapping[str, Any]) -> Table:
    """Return what was sent by operation and axis."""
    return _sent(f"sent by {_rank(tree)}", rows_of(tree, "traffic"))


def step_traffic(tree: Mapping[str, Any]) -> Table:
    """Return what one step sends by formula."""
    return _sent("sent in one applied step over dp, by formula", rows_of(tree, "step_traffic"))


def _sent(title: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    heads = [
        Column("axis"),
        Column("operation"),
        *(Column(head, is_figure=True) for head in ("calls", "elements", "sent")),
    ]
    found = [
        [word(row.get("axis")), word(row.get("operation")), count(row.get("calls")), count(row.get("elements")),
         nbytes(row.get("bytes"))]
        for row in rows
    ]  # fmt: skip
    return Table(title, heads, found)


def times(tree: Mapping[str, Any]) -> Table:
    """Return the seconds of a step by part."""
    heads, known = (
        {"seconds": "this rank", "least": "least", "mean": "mean", "largest": "largest"},
        rows_of(tree, "times"),
    )
    names = [name for name in heads if any(row.get(name) is not None for row in known)]
    figures = [Column(f"{heads[name]}, s", is_figure=True) for name in names]
    rows = [[word(row.get("part")), *(seconds(row.get(name)) for name in names)] for row in known]
    caption = "least, mean, largest: over ranks." if names != ["seconds"] else ""
    return Table("time of a step by part", [Column("part"), *figures], rows, caption)


def settings(tree: Mapping[str, Any], every: bool = False) -> Table:
    """Return settings that are not the default, the most important ones, and what became of those left open.

    every  the others have rows, too, and are not in the caption
    """
    rows, others = [], []
    for row in rows_of(tree, "settings"):
        name, value, default = (row.get(key) for key in ("name", "value", "default"))
        became = row.get("became")
        if every or value != default or name in IMPORTANT or (value == "auto" and became is not None):
            is_usual = "the default" if value == default else word(default)
            rows.append([word(name), word(value), is_usual, word(became, "")])
        else:
            others.append(f"{word(name)} {word(value)}")
    caption = f"at their defaults: {', '.join(others)}." if others else ""
    return Table("settings", SETTINGS, rows, caption)


def became(tree: Mapping[str, Any]) -> Table:
    """Return what the engine has made of settings that left something to it."""
    rows = [
        [word(row.get("name")), word(row.get("value")), word(row["became"])]
        for row in rows_of(tree, "settings")
        if row.get("became") is not None
    ]
    return Table("what the engine made of settings", [SETTINGS[0], SETTINGS[1], SETTINGS[3]], rows)


def versions(tree: Mapping[str, Any]) -> Table:
    """Return versions, the device and the ranks of each axis."""
    found = tree.get("versions")
    rows = [[word(name), word(value)] for name, value in found.items()] if isinstance(found, Mapping) else []
    axes = tree.get("axes")
    if isinstance(axes, Mapping):
        rows.append(["ranks by axis", " x ".join(f"{word(name)} {word(size)}" for name, size in axes.items() if size)])
    return Table("versions", [Column("of"), Column("version", wraps=True)], rows)


# --- cells --------------------------------------------------------------------------------------


def rows_of(tree: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the rows of a table, without what is none."""
    found = tree.get(name)
    return [row for row in found[:MOST] if isinstance(row, Mapping)] if isinstance(found, list) else []


def word(value: Any, nothing: str = "none", most: int = LONGEST) -> str:
    """Return a value as a cell has it, without control characters and not too long."""
    if value is None:
        return nothing
    text = f"{value:g}" if isinstance(value, float) else str(value)
    plain = "".join(letter if letter.isprintable() else " " for letter in text[: most + 1])
    return plain if len(plain) <= most else f"{plain[:most]}..."


def count(value: Any) -> str:
    """Return a whole number with thousands apart; nothing for all else."""
    return f"{value:,}" if _is_count(value) else ""


def nbytes(value: Any) -> str:
    """Return bytes in decimal units; nothing for what is no number of bytes."""
    return decimal(value) if _is_count(value) else ""


def seconds(value: Any) -> str:
    """Return seconds with four digits; nothing for what is no number."""
    return f"{value:.4g}" if isinstance(value, float) or _is_count(value) else ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_BYTES


def _rank(tree: Mapping[str, Any]) -> str:
    steps = tree.get("steps")
    after = f" after {steps_in_words(steps)}" if isinstance(steps, int) else ""
    return f"rank {count(tree.get('rank'))} of {count(tree.get('ranks'))}{after}"


def steps_in_words(number: int) -> str:
    """Return a number of steps in words."""
    return f"{number:,} step{'' if number == 1 else 's'}"


# --- as text and as HTML ------------------------------------------------------------------------


def in_terminal(table: Table) -> RichTable:
    """Return a table for a console: where that is narrow, columns that may wrap do, and no others."""
    shown = RichTable(
        title=table.title,
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        title_justify="left",
        title_style="bold",
    )
    for column in table.columns:
        shown.add_column(
            column.head, justify="right" if column.is_figure else "left", no_wrap=not column.wraps, overflow="fold"
        )
    for row in table.rows:
        shown.add_row(*map(Text, row))
    shown.caption, shown.caption_justify = Text(table.caption) if table.caption else None, "left"
    return shown


def _least(table: Table) -> int:
    """Return the characters of a table's narrowest line that has all of each word and figure that does not wrap."""
    cells = ([column.head, *(row[place] for row in table.rows)] for place, column in enumerate(table.columns))
    found = (LEAST if c.wraps else max(map(len, of_it)) for c, of_it in zip(table.columns, cells, strict=True))
    return sum(width + 2 for width in found) + 1  # with what is between columns, and at the edges


def as_text(tree: Mapping[str, Any], width: int | None = None) -> str:
    """Return a report as plain text. width: of lines, but for tables that need more; None: the terminal's."""
    console = Console(file=StringIO(), width=width, no_color=True, force_terminal=False, highlight=False)
    width = console.width
    with console.capture() as captured:
        for table in tables(tree):
            console.width = max(width, _least(table))
            console.print(in_terminal(table))
            console.print()
        console.width = width
        for note in _notes(tree):
            console.print(Text(note))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def as_html(tree: Mapping[str, Any]) -> str:
    """Return a report as HTML tables without styles; all text is escaped."""
    parts = []
    for table in tables(tree, every_setting=True):
        heads = "".join(f"<th>{escape(column.head)}</th>" for column in table.columns)
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in table.rows)
        below = f"<p>{escape(table.caption)}</p>" if table.caption else ""
        title = f"<caption>{escape(table.title)}</caption>"
        parts.append(f"<table>{title}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>{below}")
    return "\n".join([*parts, *(f"<p>{escape(note)}</p>" for note in _notes(tree))])


def _notes(tree: Mapping[str, Any]) -> list[str]:
    found = tree.get("notes")
    return [word(note, most=LONGEST_NOTE) for note in found[:MOST]] if isinstance(found, list) else []
