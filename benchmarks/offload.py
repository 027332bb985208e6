"""Tiers of states beside what the machine can do: its disk, its memory, other optimizers.

    python benchmarks/offload.py --parts disk --directory /mnt/nvme --gigabytes 2 --json out.json
    python benchmarks/offload.py --parts copies,disk

Every part (the table `PARTS` below) measures its ways in turn, round by round, in one process, each first in turn;
figures are medians over the rounds. A share is of what the machine gave in the same rounds. What is judged are the
targets at the end; the exit code is 0 whether they are met or not. Rates depend on what else runs: only those of a
quiet machine count.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from offloading import copies, disk, rate, step, update

from zero3d.errors import Zero3dError

GB = 10**9
Result = dict[str, Any]


class Part(NamedTuple):
    """A row of this benchmark.

    measure  called with the command line; returns {"rows": {way: {column: value}}, "targets": [...], ...}, where a
             target is {"what", "reached", "target", "met"}
    why      what it compares
    """

    measure: Callable[[argparse.Namespace], Result]
    why: str


PARTS = {
    "copies": Part(copies.measure, "copies between a host slab and ordinary memory"),
    "disk": Part(disk.measure, "records through a ring, and plainly, beside dd with direct I/O"),
    "update": Part(update.measure, "Adam's update on the host: in chunks, of whole tensors, a copy"),
    "rate": Part(rate.measure, "Adam on the host beside one call of torch's fused AdamW on the same memory"),
    "step": Part(step.measure, "a training step with states on the device, the host and the disk"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    result: Result = {"machine": machine(), "arguments": printable(arguments), "parts": {}}
    with tempfile.TemporaryDirectory(prefix="zero3d-offload-", dir=arguments.directory) as scratch:
        arguments.scratch = Path(scratch)
        for name in arguments.parts:
            try:
                result["parts"][name] = PARTS[name].measure(arguments)
            except Zero3dError as error:
                print(f"{name}: {error}", file=sys.stderr)
                return error.exit_code
            print(show(name, result["parts"][name]), flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; bad input exits with code 2."""
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="parts: " + "; ".join(f"{name}: {part.why}" for name, part in PARTS.items()),
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--rounds", type=int, default=5, help="counted measurements of each way")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--gigabytes", type=float, default=1.0, help="bytes that one round of a part moves, in GB")
    parser.add_argument("--directory", type=Path, help="an existing folder on the disk to measure (default: temporary)")
    parser.add_argument("--json", type=Path, help="file for everything measured; whole after every part")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"--parts {unknown[0]!r} is no part: pass some of {', '.join(PARTS)}")
    if min(arguments.rounds, arguments.threads) < 1:
        parser.error("--rounds and --threads are whole numbers from 1")
    if not 0 < arguments.gigabytes < float("inf"):
        parser.error(f"--gigabytes {arguments.gigabytes:g} is not a size: pass a number above 0")
    if arguments.directory is not None and not arguments.directory.is_dir():
        parser.error(f"--directory {arguments.directory} is not a folder: pass one on the disk to measure")
    return arguments


def printable(arguments: argparse.Namespace) -> Result:
    """Return the command line as JSON has it."""
    return {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}


def machine() -> Result:
    """Return what figures depend on."""
    return {
        "cores": os.cpu_count(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def show(name: str, result: Result) -> str:
    """Return a part's rows and targets as text."""
    columns = list(dict.fromkeys(column for row in result["rows"].values() for column in row))
    lines = [f"{name:<34}" + "".join(f"{column:>18}" for column in columns)]
    for way, row in result["rows"].items():
        lines.append(f"  {way:<32}" + "".join(f"{_cell(row.get(column)):>18}" for column in columns))
    for target in result["targets"]:
        met = "met" if target["met"] else "MISSED"
        lines.append(f"  {target['what']}: {target['reached']:.3f} (target {target['target']:g}: {met})")
    return "\n".join(lines)


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


if __name__ == "__main__":
    sys.exit(main())
