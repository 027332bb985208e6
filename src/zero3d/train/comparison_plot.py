"""A comparison as one picture: memory by category, step time, traffic, and all losses on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero3d.spec.palette import RUNS, light
from zero3d.train.comparison import CATEGORIES, Result, Row
from zero3d.train.comparison_table import unit_of
from zero3d.train.curve import smooth

STYLES = ("-", "--", "-.", ":")
CROWDED = 6  # runs from which on labels stand on end
NAMED = 12  # runs that a legend can name
WIDEST, THINNEST = 6.0, 1.2  # lines of the loss, so that lines below the last one stay visible


def draw(rows: Sequence[Row], results: Sequence[Result], title: str, path: Path) -> None:
    """Write the picture. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title, fontsize=12)
    grid = figure.add_gridspec(2, 3, width_ratios=(1.25, 0.9, 1.25))
    _memory(figure.add_subplot(grid[:, 0]), rows)
    _bars(figure.add_subplot(grid[0, 1]), rows, [row.step_seconds for row in rows], "seconds per step", "{:.3g}")
    sent = [row.sent for row in rows]
    unit, scale = unit_of(iter(sent))
    panel = figure.add_subplot(grid[1, 1])
    _bars(
        panel, rows, [nbytes / scale for nbytes in sent], f"{unit} sent per rank and step (line: by formula)", "{:.3g}"
    )
    formulas = [sum(f.formula or 0 for f in row.traffic.values()) / scale for row in rows]
    _markers(panel, formulas)
    _losses(figure.add_subplot(grid[:, 2]), rows, results)
    figure.savefig(path)


def _memory(axes: Any, rows: Sequence[Row]) -> None:
    """Draw stacked categories; a dash where the formula puts the top of each."""
    unit, scale = unit_of(figure.measured for row in rows for figure in row.memory.values())
    bottoms, tops = [0.0] * len(rows), [0.0] * len(rows)
    for category in CATEGORIES:
        figures = [row.memory[category] for row in rows]
        heights = [figure.measured / scale for figure in figures]
        axes.bar(range(len(rows)), heights, 0.6, bottom=bottoms, color=light(category), label=category)
        bottoms = [a + b for a, b in zip(bottoms, heights, strict=True)]
        if all(figure.formula is not None and not figure.at_most for figure in figures):
            tops = [top + (figure.formula or 0) / scale for top, figure in zip(tops, figures, strict=True)]
            _markers(axes, tops, label="by formula" if category == CATEGORIES[0] else None)
    _style(axes, rows, f"memory of rank 0 on the device ({unit})")
    axes.set_ylim(0, max(bottoms) * 1.3 or 1)
    axes.legend(frameon=False, fontsize=8, ncols=2, loc="upper right", reverse=True)


def _bars(axes: Any, rows: Sequence[Row], heights: Sequence[float], title: str, form: str) -> None:
    bars = axes.bar(range(len(rows)), heights, 0.6, color=light("raw"))
    if len(rows) <= NAMED:
        axes.bar_label(bars, [form.format(height) for height in heights], fontsize=8, padding=2)
    axes.set_ylim(0, max(heights) * 1.18 or 1)
    _style(axes, rows, title)


def _markers(axes: Any, tops: Sequence[float], label: str | None = None) -> None:
    bars = range(len(tops))
    axes.hlines(
        tops, [x - 0.36 for x in bars], [x + 0.36 for x in bars], color=light("text"), linewidth=1.3, label=label
    )


def _losses(axes: Any, rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Draw averages over the steps, the first run widest: coincident lines show as one with several colours."""
    step = (WIDEST - THINNEST) / max(len(rows) - 1, 1)
    for i, (row, result) in enumerate(zip(rows, results, strict=True)):
        values = smooth([float("nan") if loss is None else loss for loss in result["losses"]])
        axes.plot(
            range(1, len(values) + 1),
            values,
            color=RUNS[i % len(RUNS)],
            linestyle=STYLES[i % len(STYLES)],
            linewidth=WIDEST - i * step,
            label=row.label,
            marker="o" if len(values) == 1 else None,
        )
    same = all(row.same_bits for row in rows)
    axes.set_title("loss (nats per token), running average" + (": the same bits" if same else ""), fontsize=10)
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.margins(x=0.01)
    if len(rows) <= NAMED:
        axes.legend(frameon=False, fontsize=8, handlelength=4)
    _bare(axes)


def _style(axes: Any, rows: Sequence[Row], title: str) -> None:
    """Put labels of the runs below the bars."""
    labels = ["\n".join(row.values) for row in rows]
    crowded = len(rows) > CROWDED or any(len(value) > 12 for row in rows for value in row.values)
    axes.set_xticks(range(len(rows)), labels, rotation=90 if crowded else 0, fontsize=8)
    axes.set_title(title, fontsize=10)
    _bare(axes)


def _bare(axes: Any) -> None:
    axes.grid(axis="y", alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
