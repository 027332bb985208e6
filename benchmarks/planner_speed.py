"""CPU seconds of commands that plan or say: `python benchmarks/planner_speed.py [--base COMMIT] [--json OUT]`.

    case            command                                          target
    --------------  -----------------------------------------------  ------
    plan 72B        zero3d plan qwen2.5-72b --gpus 128                  3 s
    plan 72B H100   the same on H100 (its first time: 5 s)            2.5 s
    plan 72B large  zero3d plan qwen2.5-72b --gpus 1024                 6 s
    plan mixture    zero3d plan deepseek-v3 --gpus 256                  8 s
    explain         zero3d plan explain, 72B over tp and pp           1.5 s
    wrong name      zero3d plan qwen2.5-71b                           0.8 s
    simulate        zero3d simulate, Llama 3.2 1B on 8 ranks           20 s
    help ...        verbs that import no torch                        0.5 s

Seconds are user and system time of the process, all of it: on a busy machine they change less than the clock does.
first: the model is traced, but for presets, whose traces are in the package; again: its spec is read
(tools/cli/kept_specs.py), which the targets are of. With a base,
each command is run by that commit's package right before, and `of base` is the quotient of the two `again`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
LARGE = ("--gpu", "a100-80", "--gpus")
RUN = "model: {path: qwen2.5-72b}\ndata: {train: rows.npy, length: 4096}\ntrain: {batch: 512, micro_batch: 1}\n"
MESH = ("mesh.tp=8", "mesh.pp=4", "zero.stage=1", "activations=full")
SIMULATED = ("model.path=llama-3-1b", "train.batch=8", "activations=full")


class Case(NamedTuple):
    """A command, and the CPU seconds that it may take. code: it exits with."""

    name: str
    words: tuple[str, ...]
    target: float
    code: int = 0


CASES = (
    Case("plan 72B", ("plan", "qwen2.5-72b", *LARGE, "128"), 3.0),
    Case("plan 72B H100", ("plan", "qwen2.5-72b", "--gpu", "h100", "--gpus", "128"), 2.5),
    Case("plan 72B large", ("plan", "qwen2.5-72b", *LARGE, "1024"), 6.0),
    Case("plan mixture", ("plan", "deepseek-v3", "--gpu", "h100", "--gpus", "256"), 8.0),
    Case("explain", ("plan", "explain", "run.yaml", *MESH, *LARGE, "128"), 1.5),
    Case("wrong name", ("plan", "qwen2.5-71b"), 0.8, code=2),
    Case("simulate", ("simulate", "run.yaml", *SIMULATED, "--ranks", "8"), 20.0),
    Case("help", ("--help",), 0.5),
    Case("theory", ("plan", "--theory", "--params", "7.5e9", "--gpus", "64"), 0.5),
    Case("config", ("config", "explain"), 0.5),
    Case("help of launch", ("launch", "--help"), 0.5),
)


def cpu_seconds(case: Case, source: Path, folder: Path) -> float:
    """Run a case by the package in `source`; return the seconds of user and system time. Raises RuntimeError."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "ZERO3D_CACHE": str(folder / "cache"),
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-m", "zero3d.tools.cli.main", *case.words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode != case.code:
        raise RuntimeError(f"{case.name} exited with {done.returncode}: {done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def measure(case: Case, base: Path | None) -> dict[str, Any]:
    """Run a case twice, and by a base's package before."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run.yaml").write_text(RUN)
        before = None if base is None else cpu_seconds(case, base, Path(folder))
        first, again = (cpu_seconds(case, ROOT / "src", Path(folder)) for _ in range(2))
    row = {"case": case.name, "first": first, "again": again, "target": case.target}
    return row | ({} if before is None else {"base": before, "of_base": again / before})


def unpack(commit: str, folder: Path) -> Path:
    """Write the package of a commit into a folder; return what goes on the path."""
    archive = subprocess.run(["git", "archive", commit, "src"], cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=archive, check=True)
    return folder / "src"


def main(words: Sequence[str] | None = None) -> int:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", metavar="COMMIT", help="a commit to compare with, in the same run")
    parser.add_argument("--only", metavar="CASE", help="one case by name")
    parser.add_argument("--json", metavar="FILE", help="write the rows")
    arguments = parser.parse_args(words)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        base = None if arguments.base is None else unpack(arguments.base, Path(folder))
        for case in CASES:
            if arguments.only in (None, case.name):
                rows.append(measure(case, base))
                compared = f"   {rows[-1]['of_base']:.3f} of base's {rows[-1]['base']:.1f} s" if base else ""
                print(
                    f"{case.name:16} first {rows[-1]['first']:6.2f} s   again {rows[-1]['again']:6.2f} s   "
                    f"target {case.target:4.1f} s{compared}",
                    flush=True,
                )
    if arguments.json is not None:
        Path(arguments.json).write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
