"""Held-out losses of the demo, by step, with each optimizer.

    python benchmarks/demo_curves.py --json out.json

Runs `zero3d train optimizer.name=NAME` on the demo for AdamW, AdamW with moments in 8 bits, and Muon, one after the
other, evaluating every 25 steps. Loss bits do not depend on what else the machine does. `draw` makes the picture in
docs/training.md of a file of results, whose digest it carries.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from zero3d.spec.palette import RUNS

EVERY = 25
NAMES = {"adamw": "AdamW", "adamw8bit": "AdamW, moments in 8 bits", "muon": "Muon"}


def trained(name: str, ranks: int, steps: int | None) -> dict[str, Any]:
    """The figures of one run."""
    with TemporaryDirectory(prefix="zero3d-curves-") as folder:
        out = Path(folder) / "run"
        settings = [f"optimizer.name={name}", f"evaluate.every={EVERY}", f"output={out}"]
        settings += [] if steps is None else [f"train.steps={steps}"]
        words = [sys.executable, "-m", "zero3d.tools.cli.main", "train", "--json", "--ranks", str(ranks), *settings]
        done = subprocess.run(
            words, cwd=folder, text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(settings)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        result = json.loads(done.stdout)
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    (states,) = [row["measured"] for row in result["memory"] if row["consumer"] == "optimizer states"]
    return {
        "steps": [row["step"] for row in rows if "validation_loss" in row],
        "losses": [row["validation_loss"] for row in rows if "validation_loss" in row],
        "bytes_per_parameter": states * result["batch"]["dp"] / result["params"],
    }  # fmt: skip


def reached(losses: Mapping[str, Any], limit: float) -> int | None:
    """The first step at whose end a run's held-out loss was at most `limit`."""
    return next((step for step, loss in zip(losses["steps"], losses["losses"], strict=True) if loss <= limit), None)


def draw(results: Path, picture: Path) -> None:
    """Draw the losses of a file of results. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    text = results.read_bytes()
    [run] = json.loads(text)["runs"]
    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    styles = {"adamw": (RUNS[0], "-", 4), "adamw8bit": (RUNS[3], "--", 1.5), "muon": (RUNS[1], "-", 2)}
    for name, found in run["result"].items():
        color, line, width = styles[name]
        axes.plot(found["steps"], found["losses"], line, color=color, linewidth=width, label=NAMES[name])
    last = run["result"]["adamw"]["losses"][-1]
    axes.axhline(last, color="#777777", linewidth=0.8, linestyle=":")
    axes.set_ylim(1.4, 2.6)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out loss, nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=110, metadata={"Software": None, "Comment": digest(text)})


def digest(text: bytes) -> str:
    """What a picture carries of its file of results."""
    return f"results {sha256(text).hexdigest()}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of each run, as the demo has them by default")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    arguments = parser.parse_args(argv)
    found = {name: trained(name, arguments.ranks, arguments.steps) for name in NAMES}
    for name, run in found.items():
        first = reached(run, found["adamw"]["losses"][-1])
        print(f"{name:<10}{run['losses'][-1]:>10.6f}; AdamW's last loss at step {first}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
