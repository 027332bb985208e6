"""The traffic ledger: what every operation moved, by axis and unit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from zero3d.spec.sizes import decimal

HEADS = ("axis", "operation", "calls", "elements", "sent")


class Entry(NamedTuple):
    """Traffic of one operation on one unit: this rank sends it, and receives as much."""

    op: str
    axis: str
    unit: str
    calls: int
    elements: int
    bytes: int


class Ledger:
    """Traffic by (operation, axis, unit); iterate to read it.

    last  (operation, unit) that came last on each axis, whatever is forgotten
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[str, str, str], list[int]] = {}
        self.last: dict[str, tuple[str, str]] = {}

    def record(self, op: str, axis: str, unit: str, elements: int, width: int) -> None:
        """Add one call that moves `elements` of `width` bytes."""
        self.last[axis] = op, unit
        row = self._rows.setdefault((op, axis, unit), [0, 0, 0])
        row[0] += 1
        row[1] += elements
        row[2] += elements * width

    def widen(self, op: str, axis: str, unit: str, elements: int, width: int) -> None:
        """Add what the same call moves in another width."""
        row = self._rows[op, axis, unit]
        row[1] += elements
        row[2] += elements * width

    def reset(self) -> None:
        """Forget all traffic so far."""
        self._rows.clear()

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave what is moved inside out of the account, but for `last`."""
        before = {key: list(row) for key, row in self._rows.items()}
        try:
            yield
        finally:
            self._rows = before

    def totals(self) -> list[Entry]:
        """Return the traffic of all units together, by axis and operation."""
        sums: dict[tuple[str, str], list[int]] = {}
        for op, axis, _, *figures in self:
            sums[axis, op] = [a + b for a, b in zip(sums.get((axis, op), (0, 0, 0)), figures, strict=True)]
        return [Entry(op, axis, "all", *figures) for (axis, op), figures in sorted(sums.items())]

    def __repr__(self) -> str:
        """Return a table of what was sent by axis and operation."""
        rows = [(e.axis, e.op, f"{e.calls:,}", f"{e.elements:,}", decimal(e.bytes)) for e in self.totals()]
        if not rows:
            return "nothing was sent"
        widths = [max(map(len, column)) for column in zip(HEADS, *rows, strict=True)]
        cells = (
            (f"{cell:{side}{width}}" for cell, side, width in zip(row, "<<>>>", widths, strict=True))
            for row in (HEADS, *rows)
        )
        return "\n".join(map("  ".join, cells))

    def __iter__(self) -> Iterator[Entry]:
        for (op, axis, unit), (calls, elements, nbytes) in sorted(self._rows.items()):
            yield Entry(op, axis, unit, calls, elements, nbytes)
