"""What watching a run adds to its steps: runs that are watched and runs that are not, in turns.

    python benchmarks/watching.py --ranks 2 --steps 60 --rounds 8 --json out.json

    on     log.to=prometheus with log.port, a scraper that connects every second and never reads, clocks, and times of
           parts and slow ranks in every tenth record
    off    none of these; metrics.jsonl is written in both

A round is one run of the demo's model each, with two sequences a rank so that steps are short, in an order that changes
from round to round. A step lasts from one entry into `Engine.train_batch` to the next, on rank 0; the first steps of a
run are not counted. Of each round the medians of both are compared: `ratio` is the median of these, beside their least
and largest; `cpu` is that of the processor time of rank 0's process, which a busy machine changes less. The target is
at most 1 %. The exit code is 0 whether it is met or not.
"""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from ranks import Start, command_line, run_ranks
from rich.console import Console

from zero3d import Engine
from zero3d.config import load
from zero3d.tools.advice.planner import RunPlanner
from zero3d.train.progress import Progress
from zero3d.train.run import Start as Begin, run

TARGET = 1.01
WARM_UP = 5
WAYS = ("on", "off")
LOGGED = 10  # steps between records with times of parts
DEAF = """
import socket, sys, time
kept = []
while True:
    try:
        kept = [*kept[-63:], socket.create_connection(("127.0.0.1", int(sys.argv[1])))]
        kept[-1].sendall(b"GET /metrics HTTP/1.1\\r\\n\\r\\n")
    except OSError:
        pass
    time.sleep(1)
"""


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="zero3d-watching-") as scratch, scraper(port):
        given = (scratch, arguments.stage, arguments.steps, arguments.rounds, port)
        found = run_ranks(Start(arguments.ranks), measure, *given)
    result = {"arguments": {**vars(arguments), "json": str(arguments.json)}, **found, **compared(**found)}
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = command_line(__doc__, rounds=8)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--steps", type=int, default=60, help="steps of one run")
    arguments = parser.parse_args(argv)
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps {arguments.steps} leaves nothing to count: {WARM_UP} warm up, so at least {WARM_UP + 2}")
    return arguments


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port: int = listening.getsockname()[1]
        return port


@contextmanager
def scraper(port: int) -> Iterator[None]:
    """A process that asks for the metrics and never reads an answer."""
    process = subprocess.Popen([sys.executable, "-c", DEAF, str(port)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


# --- on every rank ------------------------------------------------------------------------------


def measure(
    device: torch.device, scratch: str, stage: int, steps: int, rounds: int, port: int
) -> dict[str, dict[str, list[list[float]]]]:
    """Seconds of the counted steps of each run by way, and processor time of them."""
    times: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    spent: dict[str, list[list[float]]] = {way: [] for way in WAYS}
    for turn in range(rounds):
        for way in WAYS[:: 1 if turn % 2 == 0 else -1]:
            dist.barrier()
            with entered(clocks=way == "on") as begun:
                train(Path(scratch) / f"{way}-{turn}", stage, steps, way, port)
            for into, instants in zip((times, spent), zip(*begun, strict=True), strict=True):
                into[way].append([after - before for before, after in pairwise(instants)][WARM_UP:])
    return {"times": times, "spent": spent}


def train(folder: Path, stage: int, steps: int, way: str, port: int) -> None:
    """`zero3d train` of the demo's model, as it writes to a file instead of a terminal."""
    demo = Path(str(files("zero3d.train") / "demo.yaml"))
    words = [
        f"output={folder}",
        f"train.steps={steps}",
        f"zero.stage={stage}",
        f"log.every={LOGGED}",
        "train.micro_batch=2",
    ]
    words += ["data.validation=0", "checkpoint.export=false", "checkpoint.verify=false", "evaluate.prompt=null"]
    words += ["log.to=prometheus", f"log.port={port}"] if way == "on" else []
    with (folder.parent / f"output-{dist.get_rank()}").open("a") as log:
        run(load(demo, words), Begin(planner=RunPlanner()), Progress(Console(file=log)))


@contextmanager
def entered(clocks: bool) -> Iterator[list[tuple[float, float]]]:
    """When `train_batch` of any engine is entered inside the block, by the clock and by this process' own time.

    clocks  whether the engine's run
    """
    begun: list[tuple[float, float]] = []
    original = Engine.train_batch

    def train_batch(engine: Engine, *args: Any, **options: Any) -> Any:
        engine.clocks.on = clocks
        begun.append((time.perf_counter(), time.process_time()))
        return original(engine, *args, **options)

    Engine.train_batch = train_batch  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        Engine.train_batch = original  # type: ignore[method-assign]


# --- the result ---------------------------------------------------------------------------------


def compared(times: dict[str, list[list[float]]], spent: dict[str, list[list[float]]]) -> dict[str, float]:
    """The median step of a watched run over that of the other, of all rounds."""
    ratios, cpu = (
        [median(on) / median(off) for on, off in zip(by_way["on"], by_way["off"], strict=True)]
        for by_way in (times, spent)
    )
    return {
        "ratio": median(ratios), "least": min(ratios), "largest": max(ratios), "cpu": median(cpu), "target": TARGET
    }  # fmt: skip


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'':<4}{'runs':>6}{'median step ms':>16}"]
    for way in WAYS:
        runs = result["times"][way]
        lines.append(f"{way:<4}{len(runs):>6}{1e3 * median(map(median, runs)):>16.2f}")
    met = "met" if result["ratio"] <= TARGET else "MISSED"
    lines.append(
        f"a watched step takes {result['ratio']:.3f}x another, {result['least']:.3f}x to {result['largest']:.3f}x "
        f"(at most {TARGET:.2f}x: {met}), and {result['cpu']:.3f}x its processor time"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
