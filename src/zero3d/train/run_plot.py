r"""run.png: a run's loss, learning rate, gradient norm and speed over one step axis, and what happened at which step.

loss    \__  .  .  x      one line up and down through all panels: the run went on from a checkpoint
rate    /--\_______      along the lower edge: checkpoints; along the upper one: skipped steps, slow ranks
norm    _/\__/\____
speed   -----------      A panel without any value is left out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zero3d.spec.palette import light
from zero3d.train.curve import limits, smooth
from zero3d.train.series import Series

WIDTH, HEAD = 9.0, 1.1  # inches; of the title, the step axis and the legend of marks together
TALL, LOW = 3.4, 1.35  # of the loss, of the other panels
AIR = 0.08  # of a panel's range, above and below its values
SAVED, SKIPPED, SLOW, RESUMED = "checkpoint saved", "step skipped", "slow rank named", "run resumed"
SMALL = 8.5  # points of a legend's letters
CROWDED = 60  # held-out losses and saves from which on they have no dots, and narrow ones


class Panel(NamedTuple):
    """A curve: its name, its values by step, a line of averages over them or none."""

    name: str
    values: Sequence[float]
    averages: Sequence[float] = ()


def panels(series: Series) -> list[Panel]:
    """Return the panels that have values, from the top; the loss is always there."""
    loss = Panel("loss (nats per token)", series.loss, smooth(series.loss))
    others = [
        Panel("learning rate", series.rate),
        Panel("gradient norm", series.norm, smooth(series.norm)),
        Panel("tokens per second", series.speed, smooth(series.speed)),
    ]
    return [loss, *(panel for panel in others if any(map(math.isfinite, panel.values)))]


def draw_run(series: Series, title: str, path: Path) -> None:
    """Write the picture. Raises ImportError without matplotlib."""
    figure(series, title).savefig(path)


def figure(series: Series, title: str) -> Any:
    """Return the picture as matplotlib has it. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = panels(series)
    heights = [TALL, *[LOW] * (len(shown) - 1)]
    drawn = Figure(figsize=(WIDTH, sum(heights) + HEAD), dpi=150, layout="constrained")
    FigureCanvasAgg(drawn)
    columns = drawn.subplots(len(shown), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axes, panel in zip(columns, shown, strict=True):
        _curve(axes, series.steps, panel)
    if series.held_out:
        _held_out(columns[0], series.held_out)
    if any(map(math.isfinite, series.loss)):
        columns[0].legend(frameon=False, fontsize=SMALL, loc="upper right")
    columns[0].set_title(title, fontsize=11, pad=12, parse_math=False)  # a folder may be called $x$
    for axes, panel in zip(columns, shown, strict=True):
        also = [value for _, value in series.held_out] if axes is columns[0] else []
        _set_range(axes, panel, also)
    marks, *_ = [_marks(axes, series) for axes in columns]
    if marks:
        drawn.legend(handles=marks, loc="outside lower center", ncols=len(marks), frameon=False, fontsize=SMALL)
    drawn.align_ylabels(columns)
    columns[-1].set_xlabel("step")
    columns[-1].xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    columns[-1].xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    if series.steps:
        first, last = min(series.steps), max(series.steps)
        edge = max(0.5, 0.01 * (last - first))
        columns[-1].set_xlim(min([first, *series.resumed]) - edge, last + edge)
    return drawn


def _curve(axes: Any, steps: Sequence[int], panel: Panel) -> None:
    """Draw the values, and the averages over them where the panel has any."""
    single = sum(map(math.isfinite, panel.values)) == 1
    has_averages = len(panel.averages) > 0
    axes.plot(
        steps,
        panel.values,
        color=light("raw" if has_averages else "average"),
        linewidth=0.8 if has_averages else 1.5,
        marker="o" if single else None,
        markersize=4,
        label="each step",
    )
    if has_averages:
        axes.plot(steps, panel.averages, color=light("average"), linewidth=1.8, label="average")
    axes.set_ylabel(panel.name, fontsize=9)
    axes.tick_params(labelsize=SMALL)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.yaxis.get_major_locator().set_params(nbins=5)


def _held_out(axes: Any, held_out: Sequence[tuple[int, float]]) -> None:
    label = f"held out, at the end {held_out[-1][1]:.3f}"
    dots = {"marker": "o", "markersize": 4} if len(held_out) < CROWDED else {}
    axes.plot(*zip(*held_out, strict=True), color=light("held"), linewidth=1.2, label=label, **dots)


def _set_range(axes: Any, panel: Panel, also: Sequence[float]) -> None:
    """Show the panel's range with some air; say how high the values are that lie above it."""
    found = limits([*panel.values, *also], panel.averages)
    if found is None:
        axes.set_ylim(0, 1)
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no finite value", transform=axes.transAxes, ha="center", color=light("dim"))
        return
    low, high = found
    air = AIR * (high - low) or 0.05 * abs(high) or 1.0
    axes.set_ylim(low - air, high + air)
    highest = max(filter(math.isfinite, panel.values), default=high)
    if highest > high:
        figure = f"{highest:,.0f}" if highest >= 1000 else f"{highest:.3g}"
        axes.set_title(f"up to {figure}, above the panel", loc="right", fontsize=8, color=light("dim"), pad=6)


def _marks(axes: Any, series: Series) -> list[Any]:
    """Draw what happened at which step; return one handle of each kind, whose label says how often."""
    edges = axes.get_xaxis_transform()  # steps across, the panel's height up
    handles = []
    for steps, height, marker, ink, words in (
        (series.saves, 0.0, "^" if len(series.saves) < CROWDED else "|", "saved", SAVED),
        (series.skipped, 1.0, "x", "bad", SKIPPED),
        (series.slow, 1.0, "v", "slow", SLOW),
    ):
        if steps:
            label = f"{words} ({len(steps):,})"
            handles += axes.plot(
                steps, [height] * len(steps), marker, color=light(ink), markersize=5, label=label, transform=edges,
                clip_on=False, zorder=3,
            )  # fmt: skip
    if series.resumed:
        label = f"{RESUMED} ({len(series.resumed):,})"
        handles.append(
            axes.vlines(
                [step + 0.5 for step in series.resumed],
                0,
                1,
                color=light("dim"),
                linewidth=1,
                linestyle="--",
                label=label,
                transform=edges,
            )
        )
    return handles
