"""The loss curve as text for a terminal and as a PNG."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # Braille: 4 rows of 2 dots per character
HALF = 10  # steps to either side of the one whose average is taken


def smooth(values: Sequence[float]) -> list[float]:
    """Return averages around each step, over as many before it as after it: means of the middle third of those.

    Where losses fall it lags behind nothing, and a first or a single high one does not pull it up. Values that are
    not finite are passed over.
    """
    averages = []
    for i in range(len(values)):
        half = min(HALF, i, len(values) - 1 - i)
        around = sorted(value for value in values[i - half : i + half + 1] if math.isfinite(value))
        third = len(around) // 3
        averages.append(fmean(around[third : len(around) - third]) if around else math.nan)
    return averages


def as_text(values: Sequence[float], width: int = 64, height: int = 10) -> Iterator[str]:
    """Yield lines of a plot of `values` against 1, 2, ...; each character holds 2 x 4 dots."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return
    low, high = min(finite), max(finite)
    cells = [[0] * width for _ in range(height)]
    columns, rows = 2 * width, 4 * height
    for x in range(columns):
        value = values[min(x * len(values) // columns, len(values) - 1)]
        if math.isfinite(value):
            y = round((high - value) / ((high - low) or 1.0) * (rows - 1))
            cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
    for i, row in enumerate(cells):
        label = f"{high - (high - low) * i / max(height - 1, 1):6.2f}" if i % 3 == 0 else " " * 6
        yield f"{label} ┤{''.join(chr(0x2800 + bits) for bits in row)}"
    yield f"{'':6} └{'─' * width}"
    yield f"{'':8}1{len(values):>{width - 1}}"


def as_png(values: Sequence[float], held_out: Sequence[tuple[int, float]], title: str, path: Path) -> None:
    """Write the losses, their average and the held-out losses by step. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    steps = range(1, len(values) + 1)
    axes.plot(steps, values, color="#9ab8d8", linewidth=0.8, label="loss per step")
    axes.plot(steps, smooth(values), color="#1f4e8c", linewidth=2, label="average")
    if held_out:
        label = f"held out, at the end {held_out[-1][1]:.3f}"
        axes.plot(*zip(*held_out, strict=True), color="#c4512d", linewidth=1.2, marker="o", markersize=4, label=label)
    axes.set(title=title, xlabel="step", ylabel="loss (nats per token)")
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
