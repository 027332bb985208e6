"""One hour on 2, 4 or 8 GPUs of one node: what nothing else can show about zero3d, in one command and one file.

    python benchmarks/cluster_check.py --minutes 50 --json node.json             on the node
    python benchmarks/cluster_check.py --minutes 50 --json node.json --resume    what an earlier call has not finished
    python benchmarks/cluster_check.py --device cpu --minutes 3                  2 ranks over gloo in the GPUs' place

Parts (the table `PARTS` below) run in fresh processes, in an order that leaves the most if time runs out, each with a
limit of its own; one that fails, hangs or crashes is reported and the next one runs. The first one decides whether
NCCL_P2P_DISABLE=1 is set for all others, and the file says so. The file is valid JSON at any moment. Traces of two
steps are written beside it. On the CPU the same code trains smaller shapes. Exit code: 0 all parts hold, 1 some do not,
2 too few devices, or bad input. docs/ran.md is made of these files (`benchmarks/tables.py --write`).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch
from campaign.account import ONE_A_RANK, Place
from campaign.calls import Call, Part, machine, run_all
from campaign.process import Result
from campaign.record import Record
from node.largest import TRACES
from node.links import P2P

from zero3d.memory.segments import ask_for_growing_segments

HF = ("transformers",)
COUNTS, CPU_RANKS = (2, 4, 8), 2  # of ranks: batches, tp and pp are halves of them
MOST = COUNTS[-1]
CPU_LIMIT_S = 150.0  # a part starts processes up to three times, which share the cores
TIMED_S, CPU_TIMED_S = 20.0, 1.0  # of steps, in parts that measure speed

# A launch of all ranks takes about 15 s on a card: 8 to import and open devices, 7 for NCCL's communicators.
PARTS = (
    Part(
        "links", "node.links:links", 240, 70, "2 sums x 20 + the doctor's 30; one that hangs takes 60, here and there"
    ),
    Part("axes", "node.axes:axes", 360, 120, "7 launches x (15 + 2)", needs=HF),
    Part("groups", "node.groups:groups", 240, 100, "8 launches x 12"),
    Part(
        "largest.zero3d",
        "node.largest:largest",
        300,
        110,
        "15 + 20 to build 8e9 + 20 to plan + 10 steps x 3",
        True,
        needs=HF,
    ),
    Part(
        "largest.fsdp2",
        "node.largest:largest",
        300,
        110,
        "15 + 20 to build 8e9 + 20 to plan + 10 steps x 3",
        True,
        needs=HF,
    ),
    Part("holes", "node.holes:holes", 300, 90, "3 launches x (15 + 80 steps x 0.1)"),
    Part("kills", "node.drills:kills", 300, 100, "3 runs x (25 + 8 steps)", needs=HF),
    Part(
        "largest.tp-pp",
        "node.largest:largest",
        480,
        200,
        "2 x (15 + 20 to build 8e9 + 20 to plan + 10 steps x 4)",
        timed=True,
        needs=HF,
    ),
    Part("hangs", "node.drills:hangs", 480, 330, "5 runs x (25 + 30 of patience + 5 + 5)", needs=HF),
)


def main(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    begun = time.monotonic()
    arguments = parse(argv, parts)
    found = torch.cuda.device_count()
    if arguments.device == "cuda" and found < 2:
        print(
            f"cluster_check needs 2 to {MOST} CUDA devices and torch sees {found}: nothing was checked. One GPU is "
            "what benchmarks/gpu_check.py checks; pass --device cpu to run what gloo can stand in for.",
            file=sys.stderr,
        )
        return 2
    ranks = arguments.ranks or (CPU_RANKS if arguments.device == "cpu" else most(found))
    if arguments.device == "cuda" and ranks > found:
        print(f"--ranks {ranks}: torch sees {found} CUDA devices. Pass 2 to {found}.", file=sys.stderr)
        return 2
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        print(f"--json {arguments.json}: there is no folder {arguments.json.parent}: make it first.", file=sys.stderr)
        return 2
    try:
        record = Record(arguments.json, machine(arguments.device) | {"ranks": ranks}, arguments.resume)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.json is not None:
        os.environ[TRACES] = str(arguments.json.with_name(f"{arguments.json.stem}-traces").resolve())
    ask_for_growing_segments(os.environ)  # as the ranks of zero3d train have them
    wanted = [part for part in parts if {part.name, part.name.partition(".")[0]} & set(arguments.only)]
    places = {part.name: place_of(part, arguments.device, ranks) for part in wanted}
    stamp = made()

    def told(name: str, result: Result) -> None:
        record.put(name, {"made": stamp} | result)
        decide(name, result)

    return run_all(wanted, places, record, Call(begun, 60 * arguments.minutes, arguments.resume), told)


def most(found: int) -> int:
    """Return the most ranks that so many devices carry, of which there are two."""
    return max(count for count in COUNTS if count <= found)


def decide(name: str, result: Result) -> None:
    """Set for all later parts what the first one has found about peer access; an own setting stays."""
    disable = result["ran"].get(P2P) if name == "links" else None
    if disable and P2P not in os.environ:
        os.environ[P2P] = disable
        print(f"peer access fails, and sums without it are right: {P2P}={disable} for all that follows", flush=True)


def made() -> dict[str, str]:
    """Return the day, and the commit that is checked out; "" where that is not known."""
    words = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short=10", "HEAD"]
    try:
        commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        commit = ""
    return {"date": datetime.now(UTC).date().isoformat(), "commit": commit}


def place_of(part: Part, device: str, ranks: int) -> Place:
    """Return where and how long a part runs."""
    on_cpu = device != ONE_A_RANK
    share = (CPU_TIMED_S if on_cpu else TIMED_S) if part.timed else 0.0
    return Place(part.name, device, (CPU_LIMIT_S if on_cpu else part.limit_s) + share, share, ranks=ranks)


def parse(argv: Sequence[str] | None = None, parts: Sequence[Part] = PARTS) -> argparse.Namespace:
    """Return the command line; bad input exits with code 2."""
    names = list(dict.fromkeys(name for part in parts for name in (part.name.partition(".")[0], part.name)))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--minutes", type=float, default=50.0, help="of the call: what is left over is not run (default 50)"
    )
    parser.add_argument("--device", choices=(ONE_A_RANK, "cpu"), default=ONE_A_RANK, help="where the parts run")
    parser.add_argument(
        "--ranks", type=int, help=f"2, 4 or {MOST} (default: the most for which there are GPUs; {CPU_RANKS} on the CPU)"
    )
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=names, metavar="PART,...", help=f"of {', '.join(names)}"
    )
    parser.add_argument("--json", type=Path, help="file for everything found; valid at any moment")
    parser.add_argument("--resume", action="store_true", help="leave out parts that have a result in that file")
    arguments = parser.parse_args(argv)
    unknown = [name for name in arguments.only if name not in names]
    if unknown:
        parser.error(f"--only {unknown[0]!r} is no part: pass some of {', '.join(names)}")
    if not 0 < arguments.minutes < float("inf"):
        parser.error(f"--minutes {arguments.minutes:g} is no time: pass more than 0")
    if arguments.ranks is not None and arguments.ranks not in COUNTS:
        parser.error(f"--ranks {arguments.ranks}: pass {', '.join(map(str, COUNTS[:-1]))} or {MOST}")
    if arguments.resume and arguments.json is None:
        parser.error("--resume goes on from a file: pass --json FILE, too")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
