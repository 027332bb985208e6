"""The tables that end a run: memory and traffic of rank 0, measured and by formula. No torch.

A run prints them from its rows, `zero3d report` from the rows in report.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from rich import box
from rich.table import Table
from rich.text import Text

from zero3d.account.traffic import Moved
from zero3d.spec.text import size
from zero3d.spec.tiers import DEVICE

BUFFERS = {
    "gathered": "gathered weights",
    "bucket": "gradient buckets",
    "wire": "communication buffers",
    "received": "received activations",
}
STATES = ("parameters", "gradients", "optimizer states")
STAGING = {"wire": "staging buffers"}  # off the device


class MemoryRow(NamedTuple):
    """Holds bytes on one rank at a place: the device, the host, a disk.

    formula  None when there is none
    at_most  it is an upper bound
    agrees   the verdict
    """

    consumer: str
    dtype: str
    formula: int | None
    at_most: bool
    measured: int
    agrees: bool | None
    place: str = DEVICE

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        return self._asdict()

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> Self:
        """Return the row that `as_json` made. Raises TypeError and KeyError for what it cannot have made."""
        formula, agrees = row["formula"], row["agrees"]
        return cls(
            _text(row["consumer"]),
            _text(row["dtype"]),
            None if formula is None else _whole(formula),
            bool(row["at_most"]),
            _whole(row["measured"]),
            None if agrees is None else bool(agrees),
            _text(row["place"]),
        )


class TrafficRow(NamedTuple):
    """Holds what one operation sent on one rank in the whole run; `equal` compares unit by unit."""

    op: str
    formula: Moved
    measured: Moved
    equal: bool

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        both = {"formula": self.formula._asdict(), "measured": self.measured._asdict()}
        return {"op": self.op, **both, "equal": self.equal}

    @classmethod
    def of_json(cls, row: Mapping[str, Any]) -> Self:
        """Return the row that `as_json` made. Raises TypeError and KeyError for what it cannot have made."""
        formula, measured = (
            Moved(*(_whole(row[of][name]) for name in Moved._fields)) for of in ("formula", "measured")
        )
        return cls(_text(row["op"]), formula, measured, bool(row["equal"]))


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise TypeError(value)
    return value


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(value)
    return value


def memory_table(rows: Iterable[MemoryRow], ranks: int, settings: str, peak_held: int) -> Table:
    """Return bytes on the device of rank 0 by consumer.

    settings   of the run, in words
    peak_held  at the instant at which states and buffers are most together
    """
    table = _table(f"memory of rank 0 of {ranks}, {settings}, in bytes", ("consumer", "dtype"), ("measured",))
    for row in rows:
        if row.place == DEVICE:
            table.add_row(shown(row.consumer, row.place), row.dtype, *_figures(row))
    table.caption = (
        "buffers and gathered weights: their peak, each at its own instant; states and buffers together: "
        f"{peak_held:,} at the fullest. activations: kept by one forward pass."
    )
    return table


def tiers_table(rows: Iterable[MemoryRow]) -> Table:
    """Return bytes of rank 0 on the host and on a disk, by consumer."""
    table = _table("memory of rank 0 off the device, in bytes", ("place", "consumer", "dtype"), ("measured",))
    for row in rows:
        if row.place != DEVICE:
            table.add_row(row.place, shown(row.consumer, row.place), row.dtype, *_figures(row))
    table.caption = "disk: two slots for everything that changes in a step."
    return table


def shown(consumer: str, place: str) -> str:
    """Return what a table calls a consumer of memory: kinds of temporary buffers by the field's names."""
    kind = consumer.removeprefix("temporary: ")
    if kind == consumer:
        return consumer
    return (BUFFERS if place == DEVICE else STAGING).get(kind, kind)


def _figures(row: MemoryRow) -> tuple[str, Text, str]:
    formula = "" if row.formula is None else f"{row.formula:,}"
    return f"{row.measured:,}", _verdict(row.agrees, row.at_most), formula


def traffic_table(rows: Sequence[TrafficRow], ranks: int, steps: str) -> Table:
    """Return what rank 0 sent in so many steps, in words, by operation."""
    table = _table(f"traffic of rank 0 of {ranks} in {steps}", ("operation",), ("calls", "elements", "bytes"))
    for row in rows:
        figures = (f"{figure:,}" for figure in row.measured)
        table.add_row(row.op, *figures, _verdict(row.equal, at_most=False), f"{row.formula.bytes:,}")
    table.caption = "equal: calls, elements and bytes of every unit." if rows else "one rank sends nothing."
    return table


MUCH_PADDING = 0.1  # of parameters, gradients and optimizer states


def memory_verdict(rows: Sequence[MemoryRow], peak_held: int) -> Iterator[str]:
    """Yield the table of memory in lines: whether measured bytes are those of the formulas, how many, and why padding.

    peak_held  see `memory_table`
    """
    judged = [row for row in rows if row.agrees is not None]
    wrong = [row for row in judged if not row.agrees]
    bounded = " (buffers: at most)" if any(row.at_most for row in judged) else ""
    words = _all_rows(len(judged), len(wrong), f"equal to their formulas{bounded}")
    amounts = [f"{shown(row.consumer, row.place)} {size(row.measured)}" for row in rows if row.measured]
    yield f"memory of rank 0: {words}: {', '.join(amounts)}; {size(peak_held)} at the fullest"
    yield from (
        f"  {shown(row.consumer, row.place)}: {row.measured:,} bytes measured, {row.formula or 0:,} by formula"
        for row in wrong
    )
    sizes = {row.consumer: row.measured for row in rows if row.place == DEVICE}
    states, padding = sum(sizes.get(name, 0) for name in STATES), sizes.get("padding", 0)
    if states and padding > MUCH_PADDING * states:
        yield (
            f"  padding is {size(padding)} beside {size(states)} of states: storages are whole blocks of 256 elements "
            "for each parameter, and equally long shards of each unit for all ranks; small parameters and many ranks "
            "make more of it"
        )


def traffic_verdict(rows: Sequence[TrafficRow], steps: int) -> str:
    """Return the table of traffic in a line. steps: of the session."""
    if not rows:
        return "traffic of rank 0: one rank sends nothing"
    wrong = [row for row in rows if not row.equal]
    sent = sum(row.measured.bytes for row in rows)
    named = f" ({', '.join(row.op for row in wrong)})" if wrong else ""
    words = _all_rows(len(rows), len(wrong), "equal to their formulas")
    return f"traffic of rank 0: {words}{named}: {size(sent)} sent, {size(sent // max(1, steps))} a step"


def _all_rows(rows: int, wrong: int, verdict: str) -> str:
    if wrong:
        return f"{wrong} of {rows} rows NOT {verdict}"
    return f"all {rows} rows {verdict}"


def _table(title: str, left: Sequence[str], right: Sequence[str]) -> Table:
    """Make a table: columns of text, which are wrapped where it is narrow, of figures, the verdict, the formula's."""
    table = Table(title=title, box=box.SIMPLE_HEAD, title_justify="left", caption_justify="left", title_style="bold")
    for name in left:
        table.add_column(name)
    for name in right:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("formula", justify="right", no_wrap=True)
    return table


def _verdict(agrees: bool | None, at_most: bool) -> Text:
    if agrees is None:
        return Text("")
    if agrees:
        return Text("at most" if at_most else "equal", style="green")
    return Text("ABOVE" if at_most else "UNEQUAL", style="bold red")
