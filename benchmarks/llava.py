"""The LLaVA job in small: stages 2 and 3 on 1, 2 and 4 ranks, side by side, as `zero3d compare` has them.

    python benchmarks/llava.py --steps 20 --json out.json

Adapters of examples/llava_demo on its tiny LLaVA as it was made, 64 images a step: what is counted is peaks of the
device and the host, the batch of a rank, and samples per second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREPARE = Path(__file__).parents[1] / "examples" / "llava_demo" / "prepare.py"
AXES = ("zero.stage=2,3", "mesh.dp=1,2,4")
COMMON = ("model.path=tiny-llava", "train.batch=64", "train.micro_batch=16")
KEPT = ("ranks", "micro_batch", "accumulate", "peak", "peak_host", "step_seconds", "samples_per_s", "loss", "agrees")


def compared(steps: int) -> list[dict[str, Any]]:
    """Run all six; return figures of each. Raises CalledProcessError where one fails."""
    with tempfile.TemporaryDirectory(prefix="zero3d-llava-") as folder:
        subprocess.run([sys.executable, str(PREPARE), "."], cwd=folder, check=True, stdout=sys.stderr)
        words = ["adapters.yaml", *AXES, *COMMON, f"train.steps={steps}", "--json"]
        command = [sys.executable, "-m", "zero3d.tools.cli.main", "compare", *words]
        done = subprocess.run(command, cwd=folder, check=True, stdout=subprocess.PIPE, text=True)
    return [
        {"stage": run["result"]["stage"]} | {name: run["figures"][name] for name in KEPT if name in run["figures"]}
        for run in json.loads(done.stdout)["runs"]
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    rows = compared(arguments.steps)
    for row in rows:
        print("  ".join(f"{name} {value}" for name, value in row.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
