"""README's picture: model states per GPU by ZeRO stage, for the paper's 7.5B parameters on 64 GPUs.

The bytes are `paper_bytes`'; the picture carries a digest of them, so that a test sees when it is out of date.
"""

from __future__ import annotations

from pathlib import Path

from demo_curves import digest

from zero3d.account.states import paper_bytes
from zero3d.spec.palette import light

PARAMS, GPUS = 7_500_000_000, 64
PARTS = {part: light(part) for part in ("parameters", "gradients", "optimizer")}
LABELS = ("stage 0: nothing sharded", "stage 1: optimizer states", "stage 2: + gradients", "stage 3: + parameters")


def gigabytes() -> list[dict[str, float]]:
    """GB per GPU of each part, by stage."""
    stages = [paper_bytes(stage, PARAMS, GPUS) for stage in range(4)]
    return [{part: float(getattr(found, part)) / 1e9 for part in PARTS} for found in stages]


def drawn_from() -> str:
    """What the picture carries of its figures."""
    return digest(repr(gigabytes()).encode())


def draw_stages(picture: Path) -> None:
    """Draw the bars. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    found = gigabytes()
    figure = Figure(figsize=(8, 2.3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    left = [0.0] * len(found)
    for part, color in PARTS.items():
        widths = [stage[part] for stage in found]
        axes.barh(LABELS, widths, left=left, color=color, label=part, height=0.62)
        left = [begin + width for begin, width in zip(left, widths, strict=True)]
    for at, total in enumerate(left):
        axes.text(total + 1.2, at, f"{total:.1f} GB".replace(".0 ", " "), va="center")
    axes.invert_yaxis()
    axes.set_xlim(0, 134)
    axes.set_xlabel(
        f"model states per GPU: {PARAMS / 1e9:g} billion parameters on {GPUS} GPUs, Adam in mixed precision"
    )
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(left=False)
    figure.savefig(picture, dpi=110, metadata={"Software": None, "Comment": drawn_from()})
