"""The picture of memory over one step, zero3d's stage 3 and FSDP2 on one axis, of a file of engines.py --timeline.

Both take the same points of a step (`memory.py`), so a place on the axis is the same moment of the same computation.
The picture carries a digest of its file, so that a test sees when it is out of date.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from demo_curves import digest

from zero3d.spec.palette import RUNS, light

WAYS = {
    "zero3d-3": ("zero3d, stage 3, weights kept", light("raw")),
    "zero3d-cast-3": ("zero3d, stage 3, weights cast", RUNS[0]),
    "fsdp2-reshard": ("FSDP2, reshard", RUNS[1]),
}
WIDE = 24  # an update, and rest after it, beside what lies between two layers
MIB = 2**20


def shown(results: Path) -> Mapping[str, Any]:
    """What the run with timelines gave."""
    runs = [run["result"] for run in json.loads(results.read_text())["runs"]]
    [found] = [run for run in runs if run["arguments"]["timeline"]]
    return found


def heights(memory: Mapping[str, Any]) -> list[float]:
    """MiB of a variant over a step, and at rest after it."""
    return [alive / MIB for alive in (*memory["timeline"]["bytes"], memory["held"])]


def edges(points: int) -> list[int]:
    """Where on the axis each height begins and ends: wide ones at the end."""
    return list(accumulate([1] * (points - 1) + [WIDE] * 2, initial=0))


def draw_memory(results: Path, picture: Path) -> None:
    """Draw both curves. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = shown(results)
    figure = Figure(figsize=(8, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for variant, (label, color) in WAYS.items():
        values = heights(found["variants"][variant]["memory"])
        axes.stairs(values, edges(len(values) - 1), color=color, label=label, linewidth=1.4, baseline=None)
    ends = found["variants"]["zero3d-3"]["memory"]["timeline"]["ends"]
    places = edges(ends["update"])
    bounds = [0, ends["forward"], ends["backward"], ends["backward"] + WIDE, places[-1]]
    for bound in bounds[1:-1]:
        axes.axvline(bound, color="#777777", linewidth=0.8, linestyle=":")
    axes.set_xticks([(a + b) / 2 for a, b in pairwise(bounds)])
    axes.set_xticklabels(["forward", "loss and backward", "update", "at rest"])
    axes.tick_params(bottom=False)
    axes.set_xlim(0, places[-1])
    axes.set_ylim(0)
    axes.set_ylabel("MiB alive on a rank")
    size, ranks = f"{found['parameters'] / 1e6:.0f} M parameters", found["arguments"]["ranks"]
    axes.set_title(f"one step of a Llama of {size} on {ranks} ranks, bf16 with fp32 masters", fontsize=10)
    axes.legend(framealpha=1, edgecolor="none", loc="lower center")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110, metadata={"Software": None, "Comment": digest(results.read_bytes())})
