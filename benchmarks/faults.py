"""Faults by the thousand: kills of a run, mutations of configurations, damages to checkpoints.

    python benchmarks/faults.py                                     everything: a night
    python benchmarks/faults.py --parts kills --count 50 --verbose
    python benchmarks/faults.py --parts configs --seed 4711 --count 1   one case again, whose seed a failure has named

Every part (the table `PARTS` below) takes cases of consecutive seeds, from --seed on. The exit code is 1 where one of
them failed, and each failure is printed with the command that repeats it. (A kill is repeated as far as its victim and
moment go: processes are not bound to the same instants.) Nothing here is timed: it may run beside other work.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "tests"))

import torch
from faulting import checkpoints, configs, elastic, kills
from faulting.cases import SHOWN, Result
from offload import machine, show


class Part(NamedTuple):
    """A row of this campaign.

    measure  called with the command line; returns {"rows": {way: {column: value}}, "failures": [...], "targets": [...]}
    count    its cases, where --count does not say
    why      what it does
    """

    measure: Callable[[argparse.Namespace], Result]
    count: int
    why: str


PARTS = {
    "configs": Part(configs.measure, configs.COUNT, "mutations of configuration files and overrides"),
    "checkpoints": Part(checkpoints.measure, checkpoints.COUNT, "damages to files of checkpoints"),
    "kills": Part(kills.measure, kills.COUNT, "SIGKILL at random moments of runs that save often"),
    "elastic": Part(elastic.measure, elastic.COUNT, "SIGKILL and lost slots in runs that restart, under zero.exact"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    torch.set_num_threads(1)
    for name, value in (("OMP_NUM_THREADS", "1"), ("HF_HUB_OFFLINE", "1"), ("TOKENIZERS_PARALLELISM", "false")):
        os.environ.setdefault(name, value)
    result: dict[str, Any] = {"machine": machine(), "seed": arguments.seed, "parts": {}}
    with tempfile.TemporaryDirectory(prefix="zero3d-faults-") as scratch:
        arguments.scratch = Path(scratch)
        for name in arguments.parts:
            found = result["parts"][name] = PARTS[name].measure(arguments)
            print(show(name, found), flush=True)
            for failure in found["failures"][:SHOWN]:
                print(f"  seed {failure['seed']}: {failure['why']}\n    {failure['again']}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(any(part["failures"] for part in result["parts"].values()))


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the command line; bad input exits with code 2."""
    counts = ", ".join(f"{part.count} {name}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="parts: " + "; ".join(f"{name}: {part.why}" for name, part in PARTS.items()),
    )
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS), metavar="PART,...")
    parser.add_argument("--count", type=int, default=0, help=f"cases of each part (default: {counts})")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default %(default)s)")
    parser.add_argument("--asynchronous", action="store_true", help="kills: runs with checkpoint.asynchronous=true")
    parser.add_argument("--verbose", action="store_true", help="kills: a line for each")
    parser.add_argument("--json", type=Path, help="file for everything found; whole after every part")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.parts if name not in PARTS]
    if unknown:
        parser.error(f"--parts {unknown[0]!r} is no part: pass some of {', '.join(PARTS)}")
    if min(arguments.count, arguments.seed) < 0:
        parser.error("--count and --seed are whole numbers from 0")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
