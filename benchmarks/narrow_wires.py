"""Training losses of the demo where weights or sums of gradients travel in fewer bits, beside those in full.

    python benchmarks/narrow_wires.py --json out.json

Runs `zero3d train` on the demo with two ranks at stage 3, 300 steps, for each wire and each of three seeds, one run
after the other. Sums between copies have a copy of all states on each rank (mesh.shard=1), 8-bit gathers one for both.

    loss     mean of the last 50 steps' losses
    off      the largest distance of it from that of the same seed in full
    spread   of the losses in full over seeds: what the draw of weights and data alone does

Loss bits do not depend on what else the machine does. Targets: off by at most `LIMITS`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

STEPS, LAST, SEEDS = 300, 50, (0, 1, 2)
SHARED = ("mesh.shard=1",)
WIRES = {
    "full": SHARED,
    "sums, int8": (*SHARED, "zero.slow_wire=int8"),
    "sums, int4": (*SHARED, "zero.slow_wire=int4"),
    "sums, int4, by chance": (*SHARED, "zero.slow_wire=int4", "zero.slow_rounding=stochastic"),
    "gathers, int8": ("zero.gather_wire=int8",),
}
LIMITS = {"sums, int8": 0.01, "sums, int4": 0.05, "sums, int4, by chance": 0.05, "gathers, int8": 0.01}


def mean_loss(settings: Sequence[str], seed: int, steps: int, micro_batch: int) -> float:
    """The mean of a run's last losses. Raises RuntimeError where it fails."""
    with TemporaryDirectory(prefix="zero3d-wires-") as folder:
        out = Path(folder) / "run"
        words = [*settings, f"seed={seed}", f"train.steps={steps}", f"train.micro_batch={micro_batch}", f"output={out}"]
        command = [sys.executable, "-m", "zero3d.tools.cli.main", "train", "--json", "--ranks", "2", *words]
        done = subprocess.run(
            command, cwd=folder, text=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in rows if "loss" in row]
    return fmean(losses[-LAST:])


def furthest(losses: Mapping[str, Sequence[float]], name: str) -> float:
    """How far a wire's loss is at most from that of the same seed in full."""
    return max(abs(loss - full) for loss, full in zip(losses[name], losses["full"], strict=True))


def spread(losses: Mapping[str, Sequence[float]]) -> float:
    """How far the losses of seeds in full lie apart."""
    return max(losses["full"]) - min(losses["full"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run all, and print how far each is off."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of a rank")
    parser.add_argument("--json", metavar="FILE", help="write the figures")
    arguments = parser.parse_args(argv)
    losses: dict[str, list[float]] = {name: [] for name in WIRES}
    for seed in SEEDS:
        for name, settings in WIRES.items():
            losses[name].append(mean_loss(settings, seed, arguments.steps, arguments.micro_batch))
            print(f"seed {seed}  {name:<24}{losses[name][-1]:.6f}", flush=True)
    for name, limit in LIMITS.items():
        print(f"{name:<24}off by at most {furthest(losses, name):.5f} (target {limit:g}), spread {spread(losses):.5f}")
    if arguments.json:
        result: dict[str, Any] = {"arguments": vars(arguments) | {"json": None}, "losses": losses}
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
