"""How long a killed rank interrupts the training of `zero3d train --max-restarts`, and where the seconds go.

    python benchmarks/restart.py --ranks 2 --rounds 5 --json out.json

A round trains the demo, kills the last rank once a checkpoint is there, and waits for the first step that is new, one
that no attempt had come to before. From the kill on, in seconds:

    noticed    the launcher has named the rank that died; the other ranks had their last words before that
    started    the next attempt's workers run
    set up     rank 0 has built the engine and loaded the checkpoint: `going on from ...`
    repeated   it is back at the step that the kill had interrupted
    trained    it has come to a new step: the target is at most 10 s with 2 ranks on a CPU

What a worker imports before it does anything is timed alone beside it, in each round, with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from threading import Thread

import psutil
from ranks import command_line

TARGET = 10.0
MOMENTS = ("noticed", "started", "set up", "repeated", "trained")
SAID = {"noticed": "died without an exception", "started": "restart 1 of 1", "set up": "going on from"}
MAIN = [sys.executable, "-P", "-m", "zero3d.tools.cli.main"]
IMPORTS = [sys.executable, "-P", "-c", "import zero3d.tools.cli.train, zero3d.train.run, zero3d.train.report"]
LOOK = 0.005  # seconds between two looks
EVERY, AFTER = 5, 2  # steps between checkpoints; steps after the first one at which the rank is killed


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    rounds = []
    with tempfile.TemporaryDirectory(prefix="zero3d-restart-") as scratch:
        for number in range(arguments.rounds):
            rounds.append(one_round(Path(scratch) / str(number), arguments.ranks) | {"imports": imports()})
    medians = {name: median(each[name] for each in rounds) for name in rounds[0]}
    result = {"ranks": arguments.ranks, "target": TARGET, "rounds": rounds, "median": medians}
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = command_line(__doc__)
    arguments = parser.parse_args(argv)
    if arguments.ranks < 2:
        parser.error("--ranks is a whole number from 2")
    return arguments


def one_round(folder: Path, ranks: int) -> dict[str, float]:
    """Seconds from a kill to each moment of one run, and what went on without it: a step."""
    words = [f"--ranks={ranks}", "--max-restarts=1", f"output={folder}", "checkpoint.keep=1", "checkpoint.export=false"]
    words += [f"checkpoint.every={EVERY}", "checkpoint.verify=false", "evaluate.prompt=null"]
    told: dict[str, float] = {}
    run = subprocess.Popen([*MAIN, "train", *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    reader = Thread(target=listen, args=(run, told))
    reader.start()
    try:
        killed_at = wait_for_step(run, folder, EVERY + AFTER)
        begun = time.monotonic()
        last_of(run.pid, ranks).kill()
        while "set up" not in told and run.poll() is None:
            time.sleep(LOOK)
        moments = dict(told)
        for name, step in (("repeated", killed_at), ("trained", killed_at + 1)):
            wait_for_step(run, folder, step)
            moments[name] = time.monotonic()
    finally:
        run.terminate()
        run.wait()
        reader.join()
    return {name: moments[name] - begun for name in MOMENTS}


def listen(run: subprocess.Popen[str], told: dict[str, float]) -> None:
    """Note when the run first says each of the lines that are waited for."""
    assert run.stdout is not None
    for line in run.stdout:
        for name, text in SAID.items():
            if text in line:
                told.setdefault(name, time.monotonic())


def wait_for_step(run: subprocess.Popen[str], folder: Path, step: int) -> int:
    """Wait until metrics.jsonl has a step, and return its last one. Raises RuntimeError where the run ends first."""
    while run.poll() is None:
        try:
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            last = json.loads(lines[-1])["step"] if lines else 0
        except (OSError, json.JSONDecodeError):
            last = 0
        if last >= step:
            return int(last)
        time.sleep(LOOK)
    raise RuntimeError(f"the run ended with exit code {run.returncode} before step {step}")


def last_of(launcher: int, ranks: int) -> psutil.Process:
    """The process of the last rank."""
    workers = [child for child in psutil.Process(launcher).children() if child.environ().get("RANK") == str(ranks - 1)]
    return workers[0]


def imports() -> float:
    """Seconds in which a new process imports what a worker needs."""
    begun = time.monotonic()
    subprocess.run(IMPORTS, check=True)
    return time.monotonic() - begun


def show(result: dict[str, object]) -> str:
    """The result as text."""
    medians, rounds = result["median"], result["rounds"]
    assert isinstance(medians, dict)
    assert isinstance(rounds, list)
    lines = [f"seconds after a kill, {result['ranks']} ranks, median of {len(rounds)} (least, most)"]
    for name in (*MOMENTS, "imports"):
        values = [each[name] for each in rounds]
        lines.append(f"{name:<9}{medians[name]:>8.2f}   ({min(values):.2f}, {max(values):.2f})")
    met = "met" if medians["trained"] <= TARGET else "MISSED"
    lines.append(f"from a fault to a new step: {medians['trained']:.1f} s (at most {TARGET:.0f} s: {met})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
