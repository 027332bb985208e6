"""A comparison as tables for people: memory, traffic, speed and peaks, losses, expert load, recomputation; 80 columns.

Rows are runs, labelled by their values on the axes. In the first two tables a run has two lines, measured
and by formula; one line below says whether they agree. Runs that failed come last, with the reason below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from zero3d.spec.text import size
from zero3d.train.comparison import CATEGORIES, PLACES, TOGETHER, Figure, Recompute, Row, square_root
from zero3d.train.variants import Axis, Variant

UNITS = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3), ("bytes", 1))
SAME = "same bits"
APART = " r"  # beside a difference between runs that reduce at different moments
MOMENTS = {"every_step": "once a step", "every_micro_batch": "after every micro-batch", "": "in exact mode's own order"}
SHORT = {"optimizer states": "optimizer", "activations": "activa-\ntions"}  # for 80 columns
PLACE_COLUMNS = ("parameters", "gradients", "optimizer", TOGETHER)
SHORT_STATES = {"parameters": "param.", "gradients": "grad.", "optimizer": "optim.", TOGETHER: "all"}
NOTHING = Figure(0, 0, False, True)
NAMES = {"reduce_scatter": "reduce-scatter", "all_gather": "all-gather", "all_to_all": "all-to-all"}


def show(axes: Sequence[Axis], rows: Sequence[Row], failed: Mapping[Variant, str], console: Console) -> None:
    """Print the tables that apply. failed: why the runs that have no row have none."""
    tables = [memory_table(axes, rows)]
    if any(len(row.places) > 1 for row in rows):
        tables.append(place_table(axes, rows))
    if any(row.traffic for row in rows):
        tables.append(traffic_table(axes, rows))
    tables += [speed_table(axes, rows), loss_table(axes, rows)]
    if any(row.busiest for row in rows):
        tables.append(expert_table(axes, rows))
    if any(row.fingerprint for row in rows):
        tables.append(exact_table(axes, rows))
    if any(row.recompute for row in rows):
        tables.append(recompute_table(axes, rows))
    for table in tables:
        for variant in failed:
            table.add_row(", ".join(variant.values), Text("failed", style="bold red"))
        console.print()
        console.print(table)
    console.print()
    for line in (*verdicts(rows), *(failure(variant, why) for variant, why in failed.items())):
        console.print(line, soft_wrap=True)


def failure(variant: Variant, why: str) -> Text:
    """Say in one line why a run failed."""
    return Text(f"{variant.label} failed: {why}", style="bold red")


def memory_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return bytes of rank 0 by category."""
    unit, scale = unit_of(figure.measured for row in rows for figure in row.memory.values())
    table = _table(axes, f"memory of rank 0 in {unit}", [SHORT.get(name, name) for name in CATEGORIES], gap=0)
    for row in rows:
        _two_lines(table, row, row.memory, CATEGORIES, scale)
    table.caption = "temporary: peak of buffers and gathered weights\nactivations: kept by one forward pass"
    return table


def place_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return bytes of model states of rank 0 wherever they are, of each kind that leaves the device in some run."""
    found = {(category, place) for row in rows for place, here in row.places.items() for category in here}
    leaving = {category for category, place in found if place != PLACES[0]} - {"padding"}
    columns = [pair for pair in product(PLACE_COLUMNS, PLACES) if pair in found and pair[0] in leaving]
    unit, scale = unit_of(row.places[place][TOGETHER].measured for row in rows for place in row.places)
    names = [f"{SHORT_STATES[category]} {place}" for category, place in columns]
    table = _table(axes, f"model states of rank 0 by place, in {unit}", names, gap=0)
    for row in rows:
        cells = {f"{category} {place}": row.places.get(place, {}).get(category, NOTHING) for category, place in columns}
        _two_lines(table, row, cells, list(cells), scale)
    table.caption = "all: gradients and padding included; a disk has two slots for every record"
    return table


def traffic_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return the bytes that rank 0 sends per step, and their sum relative to the first run's."""
    operations = tuple(dict.fromkeys(name for row in rows for name in row.traffic))
    unit, scale = unit_of(row.sent for row in rows)
    columns = [NAMES.get(name, name) for name in operations]
    table = _table(axes, f"traffic of rank 0 in {unit} per step", [*columns, "total", "against first"])
    for row in rows:
        ratio = f"{row.sent / rows[0].sent:.2f}x" if rows[0].sent else ""
        _two_lines(table, row, row.traffic, operations, scale, _bytes(row.sent, scale), ratio)
    table.caption = "exchange: norms and losses"
    return table


def speed_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return ranks, batch, the peaks of a device and of the host, and time."""
    columns = ["ranks", "batch per rank", "device peak", "host peak", "s per step", "samples/s"]
    table = _table(axes, "speed and peaks", columns)
    for row in rows:
        table.add_row(
            ", ".join(row.values),
            str(row.ranks),
            f"{row.micro_batch} x {row.accumulate}",
            size(row.peak, keep_zero=True),
            size(row.peak_host, keep_zero=True),
            f"{row.step_seconds:.3f}",
            f"{row.samples_per_s:,.1f}",
        )
    table.caption = (
        "batch per rank: micro_batch x accumulate; s per step: median from step 2\n"
        "device peak: of the rank with the most (on CPUs: of its process)\n"
        "host peak: the sum of its ranks' peaks"
    )
    return table


def loss_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return last and held-out losses; differences are to the first run."""
    table = _table(axes, "losses", ["loss", "against first", "held-out loss", "against first"])
    for row in rows:
        first = row is rows[0]
        table.add_row(
            ", ".join(row.values),
            _loss(row.loss),
            "" if first else _difference(row, row.loss_difference),
            _loss(row.held_out_loss),
            "" if first else _difference(row, row.held_out_difference),
        )
    if any(row.apart for row in rows):
        table.caption = "r: reduces gradients at other moments\nthan the first run"
    return table


def expert_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return the tokens of the busiest expert beside the mean, in the layer where they are the least even."""
    table = _table(axes, "expert load", ["layer", "tokens mean", "tokens largest", "over mean"])
    for row in rows:
        cells = (
            (row.busiest.layer, f"{row.busiest.mean:,.0f}", f"{row.busiest.tokens:,}", f"{row.busiest.ratio:.2f}x")
            if row.busiest
            else ("", "", "", "")
        )
        table.add_row(", ".join(row.values), *cells)
    table.caption = "tokens per expert over all steps, in the layer with the least even load"
    return table


def exact_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return the last loss in all its digits, and one hash of all masters and optimizer states."""
    table = _table(axes, "zero.exact", ["last loss, all digits", "states"])
    for row in rows:
        digits = "" if row.loss is None else float(row.loss).hex()
        table.add_row(", ".join(row.values), digits, row.fingerprint or "")
    table.caption = "states: first 16 digits of the SHA-256 of masters and optimizer states"
    return table


def recompute_table(axes: Sequence[Axis], rows: Sequence[Row]) -> Table:
    """Return the arithmetic of the policies beside activations and steps as measured."""
    unit, scale = unit_of(row.memory["activations"].measured for row in rows)
    blocks = ["kept inputs", "live interiors", "live attentions"]
    columns = [*blocks, "extra forward", "step predicted", "measured", f"{SHORT['activations']} in {unit}"]
    layers = rows[0].recompute.layers if rows[0].recompute else 0
    table = _table(axes, f"recomputation of {layers} blocks", columns, gap=0)
    for row in rows:
        if row.recompute is not None:
            kept = _bytes(row.memory["activations"].measured, scale)
            table.add_row(", ".join(row.values), *_arithmetic(row.recompute), kept)
    table.caption = (
        "kept, live: numbers of blocks; extra forward: share of a step's computation\n"
        "step: relative to the first run with the same other values\n"
        "activations: kept by one forward pass; backward adds the live blocks"
    )
    return table


def _arithmetic(row: Recompute) -> Iterator[str]:
    yield str(row.kept_inputs)
    yield str(row.interiors)
    yield str(row.attentions)
    yield "< 1/3" if row.extra is None else "1/3" if row.extra else "none"
    yield "" if row.predicted is None else f"{row.predicted:.2f}x"
    yield "" if row.measured is None else f"{row.measured:.2f}x"


# --- below the tables ---------------------------------------------------------------------------


def verdicts(rows: Sequence[Row]) -> Iterator[Text]:
    """Say whether formulas and losses agree, and the square root where policies are compared."""
    wrong = [row.label for row in rows if not row.agrees]
    if wrong:
        yield Text(f"UNEQUAL to the formula: {'; '.join(wrong)} (figures in compare.json)", style="bold red")
    else:
        yield Text("bytes: equal to the formula in every run (temporary: at most)", style="green")
    differing = [row.label for row in rows if not row.same_bits]
    if not differing:
        yield Text("losses: the same bits at every step of every run", style="green")
    elif len(differing) < len(rows) - 1:
        yield Text(f"losses: other bits than the first run's in {'; '.join(differing)}")
    yield from map(Text, reasons(rows))
    fingerprints = {row.fingerprint for row in rows}
    if None not in fingerprints and len(fingerprints) == 1 and not differing:
        yield Text(f"exact: all runs have the same losses and the same states, {fingerprints.pop()}", style="green")
    elif None not in fingerprints:
        yield Text("exact: runs DIFFER in their losses or states", style="bold red")
    layers = {row.recompute.layers for row in rows if row.recompute}
    yield from (Text(square_root(count)) for count in sorted(layers))


def reasons(rows: Sequence[Row]) -> Iterator[str]:
    """Say in one line why losses of runs that reduce at different moments are not the same bits."""
    apart = [row for row in rows if row.apart]
    if apart:
        moments = "; ".join(f"{MOMENTS[row.moment]} in {row.label}" for row in apart)
        yield (
            f"r: gradients are reduced {MOMENTS[rows[0].moment]} in {rows[0].label}, but {moments}. Sums in another "
            "order round differently: zero.reduce=every_step gives all stages one order, zero.exact=true every run"
        )


# --- cells --------------------------------------------------------------------------------------


def _table(axes: Sequence[Axis], title: str, columns: Sequence[str], gap: int = 1) -> Table:
    """Make a table: a column of labels, headed by the keys, then columns of figures."""
    table = Table(
        title=title,
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption_justify="left",
        title_style="bold",
        padding=(0, gap, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("\n".join(axis.key.replace(".", ".\n") for axis in axes), overflow="fold", vertical="bottom")
    for name in columns:
        table.add_column("\n".join(name.rsplit(" ", 1)), justify="right", no_wrap=True, vertical="bottom")
    return table


def _two_lines(
    table: Table, row: Row, figures: Mapping[str, Figure], names: Sequence[str], scale: int, *more: str
) -> None:
    """Add two rows: measured, then the formula where there is one."""
    cells = [figures.get(name) for name in names]
    table.add_row(", ".join(row.values), *(_bytes(cell.measured, scale) if cell else "" for cell in cells), *more)
    table.add_row(Text("formula", style="dim"), *(Text(_formula(cell, scale), style=_style(cell)) for cell in cells))


def _style(figure: Figure | None) -> str:
    return "bold red" if figure is not None and figure.agrees is False else "dim"


def _formula(figure: Figure | None, scale: int) -> str:
    if figure is None or figure.formula is None:
        return ""
    return f"{'<= ' if figure.at_most else ''}{_bytes(figure.formula, scale)}"


def unit_of(counts: Iterator[float]) -> tuple[str, int]:
    """Return the largest unit in which the largest count is at least 1: name and bytes."""
    most = max(counts, default=0)
    return next(((name, scale) for name, scale in UNITS if most >= scale), UNITS[-1])


def _bytes(count: float, scale: int) -> str:
    if scale == 1:
        return f"{count:,.0f}"
    return "< 0.001" if 0 < count < scale / 2000 else f"{count / scale:,.3f}"


def _loss(value: float | None) -> str:
    return "" if value is None else f"{value:.6f}"


def _difference(row: Row, value: float | None) -> str:
    if value is None:
        return ""
    if row.same_bits or not math.isfinite(value):
        return SAME if row.same_bits else ""
    return ("0" if value == 0 else f"{value:+.1e}") + (APART if row.apart else "")
