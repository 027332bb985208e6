"""The picture of what leaks in packed rows of a hybrid: how far each token moves what is made of each other one.

It is of the file of hybrid_packing.py, and carries a digest of it, so that a test sees when it is out of date.
"""

from __future__ import annotations

import json
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from demo_curves import digest

from zero3d.spec.palette import RUNS

WAYS = {"leaky": "one row, taken for one document", "packed": "the same row in zero3d"}


def shown(results: Path) -> Any:
    """What the run gave."""
    return json.loads(results.read_text())["runs"][0]["result"]


def draw_influence(results: Path, picture: Path) -> None:
    """Draw both ways beside each other. Raises ImportError without matplotlib."""
    import numpy
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    found = shown(results)
    bounds = [0, *accumulate(found["documents"])]
    figure = Figure(figsize=(8, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2)
    for axes, (way, title) in zip(panels, WAYS.items(), strict=True):
        moved = numpy.array(found["influence"][way]).T
        image = axes.imshow(numpy.where(moved > 0, moved, numpy.nan), cmap="Blues", norm=LogNorm(1e-6, 1))
        for start, stop in pairwise(bounds):
            corners = [start - 0.5, stop - 0.5, stop - 0.5, start - 0.5, start - 0.5]
            axes.plot(corners, [corners[0], corners[0], corners[1], corners[1], corners[0]], color=RUNS[1], lw=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("a token is another one")
        axes.set_xticks([])
        axes.set_yticks([])
        axes.set_facecolor("#f7f7f7")
        axes.spines[:].set_visible(False)
    panels[0].set_ylabel("the logits of a token move")
    figure.colorbar(image, ax=list(panels), label="by at most", shrink=0.9)
    figure.savefig(picture, dpi=110, metadata={"Software": None, "Comment": digest(results.read_bytes())})
