"""The tables of docs/tested.md, and what `zero3d doctor` knows of them, from results/versions/*.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from figures_measured import table
from recorded import ROOT
from versions import Row, matrix, recorded

DOCTORS = ROOT / "src" / "zero3d" / "tools" / "doctor" / "tested.json"
NOT_TRIED = "not tried"
KEPT = ("row", "date", "system", "machine", "python", "torch", "transformers", "passed", "failed", "skipped")


def tested() -> str:
    """Each row: what it is of, and how many tests passed there; what was not tried says so."""
    found = recorded()
    head = ["row", "system", "Python", "torch", "transformers", "peft, accelerate, TRL", "CPU", "user", "what ran",
            "passed", "failed", "skipped", "when"]  # fmt: skip
    rows = [_tried(found[row.name]) if row.name in found else _untried(row) for row in matrix().values()]
    return table(head, rows)


def failing() -> str:
    """The tests that failed, by row."""
    lines = [
        f"- {row['row']}: {', '.join(f'`{name}`' for name in row['failing'])}" for row in _in_order() if row["failing"]
    ]
    return "\n".join(lines) or "- none"


def doctors() -> str:
    """What the package carries of the rows, one a line, in the table's order."""
    lines = [json.dumps({name: row[name] for name in KEPT}) for row in _in_order()]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def _in_order() -> Iterator[dict[str, Any]]:
    found = recorded()
    return (found[name] for name in matrix() if name in found)


def _tried(row: dict[str, Any]) -> list[str]:
    return [
        f"`{row['row']}`",
        f"{row['system']} {row['machine']}",
        row["python"],
        row["torch"],
        row["transformers"],
        ", ".join(row[name] or "none" for name in ("peft", "accelerate", "trl")),
        f"{row['cores']} x {row['cpu']}, {row['capability']}",
        row["user"],
        f"`{row['ran']}`",
        *(f"{row[name]:,}" for name in ("passed", "failed", "skipped")),
        f"{row['date']}, {row['commit']}",
    ]


def _untried(row: Row) -> list[str]:
    asked = [f"`{row.name}`", f"{row.system} {row.machine}", row.python, row.torch, row.transformers]
    return [*asked, *["-"] * 4, f"**{NOT_TRIED}**", *["-"] * 3]


VERSIONS: dict[str, Callable[[], str]] = {"tested": tested, "tested-failing": failing}
