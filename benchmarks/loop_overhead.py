"""What `zero3d train` adds to a step: its loop beside a bare loop over the same batches.

    python benchmarks/loop_overhead.py --ranks 2 --steps 40 --rounds 3 --json out.json

    loop    `zero3d.train.run.run` at the demo's size: data, schedule, metrics, progress
    bare    `engine.train_batch(micro_batches)` on the engine and the batches of that run, nothing else

Both are watched in the same way: when `Engine.train_batch` is entered and left. A step lasts from
one entry to the next; what lies between leaving and entering is outside the engine.

    outside    of the loop's time, the part outside the engine: the target is at most 3 %
    step       median step of the loop over that of the bare loop: shows what the loop slows down
               inside the engine, too, but carries the machine's noise
    clocks     median step of the bare loop in which the engine's clocks run over one in which they
               do not: every other step each (`Engine.clocks`); the target is at most 1 %

Loop and bare loop alternate, `--rounds` times; the first steps of each are not counted. Evaluation
and checkpoints happen after the last step and are not part of it. The exit code is 0 whether the
target is met or not.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.resources import files
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

TARGET, OF_CLOCKS = 0.03, 1.01
WARM_UP = 3


@dataclass
class Watch:
    """Calls of `train_batch`: the engine, its batches, and when each began and ended (s)."""

    engine: Engine | None = None
    batches: list[Any] = field(default_factory=list)
    begun: list[float] = field(default_factory=list)
    ended: list[float] = field(default_factory=list)

    def times(self) -> dict[str, list[float]]:
        """By counted step: seconds from entry to entry, and the part of them outside the engine."""
        steps = list(zip(self.begun, self.ended, self.begun[1:], strict=False))[WARM_UP:]
        return {
            "step": [after - begun for begun, _, after in steps],
            "outside": [after - end for _, end, after in steps],
        }

    def inside(self) -> list[float]:
        """Seconds in the engine, by counted step."""
        return [end - begun for begun, end in zip(self.begun, self.ended, strict=True)][WARM_UP:]


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parse(argv)
    with tempfile.TemporaryDirectory(prefix="zero3d-loop-") as scratch:
        times = run_ranks(Start(arguments.ranks), measure, scratch, arguments.stage, arguments.steps, arguments.rounds)
    result = {"arguments": {**vars(arguments), "json": str(arguments.json)}, "times": times, **ratios(times)}
    print(show(result))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line; bad input exits with code 2."""
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--stage", type=int, choices=range(4), default=3)
    parser.add_argument("--steps", type=int, default=40, help="steps of one run of either loop")
    arguments = parser.parse_args(argv)
    if arguments.steps < WARM_UP + 2:
        parser.error(f"--steps {arguments.steps} leaves nothing to count: {WARM_UP} warm up, so at least {WARM_UP + 2}")
    return arguments


# --- on every rank ------------------------------------------------------------------------------


def measure(
    device: torch.device, scratch: str, stage: int, steps: int, rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Times of all counted steps, by loop."""
    times: dict[str, dict[str, list[float]]] = {name: {"step": [], "outside": []} for name in ("loop", "bare")}
    times["clocks"] = {"on": [], "off": []}
    for turn in range(rounds):
        with watched() as loop:
            train(Path(scratch) / f"run-{turn}", stage, steps)
        if loop.engine is None:
            raise RuntimeError("the loop never called Engine.train_batch, by which this script tells its steps")
        dist.barrier()
        with watched() as bare:
            for micro_batches in loop.batches:
                loop.engine.train_batch(micro_batches, wait=False)
        with watched() as clocked:
            for number, micro_batches in enumerate(loop.batches):
                loop.engine.clocks.on = (number + turn) % 2 == 0
                loop.engine.train_batch(micro_batches)
        inside = clocked.inside()
        pairs = list(zip(inside[::2], inside[1::2], strict=False))  # one of two neighbours has clocks
        order = ("on", "off") if (WARM_UP + turn) % 2 == 0 else ("off", "on")
        for place, name in enumerate(order):
            times["clocks"][name] += [pair[place] for pair in pairs]
        for name, watch in (("loop", loop), ("bare", bare)):
            for what, values in watch.times().items():
                times[name][what] += values
    return times


def train(folder: Path, stage: int, steps: int) -> None:
    """`zero3d train` at the demo's size, as it writes to a file instead of a terminal."""
    demo = Path(str(files("zero3d.train") / "demo.yaml"))
    words = [f"output={folder}", f"train.steps={steps}", f"zero.stage={stage}", "checkpoint.export=false"]
    with (folder.parent / f"output-{dist.get_rank()}").open("a") as log:
        run(load(demo, [*words, "evaluate.prompt=null"]), Begin(planner=RunPlanner()), Progress(Console(file=log)))


@contextmanager
def watched() -> Iterator[Watch]:
    """Note every `train_batch` of any engine inside the block."""
    watch, original = Watch(), Engine.train_batch

    def train_batch(engine: Engine, micro_batches: Any, *args: Any, **options: Any) -> Any:
        kept = list(micro_batches)
        watch.engine = engine
        watch.batches.append(kept)
        watch.begun.append(time.perf_counter())
        loss = original(engine, kept, *args, **options)
        watch.ended.append(time.perf_counter())
        return loss

    Engine.train_batch = train_batch  # type: ignore[method-assign]
    try:
        yield watch
    finally:
        Engine.train_batch = original  # type: ignore[method-assign]


# --- the result ---------------------------------------------------------------------------------


def ratios(times: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Part of the loop's time outside the engine, its median step over the bare loop's, and what clocks cost."""
    loop, bare, clocks = times["loop"], times["bare"], times["clocks"]
    return {
        "outside": sum(loop["outside"]) / sum(loop["step"]),
        "step": median(loop["step"]) / median(bare["step"]),
        "clocks": median(on / off for on, off in zip(clocks["on"], clocks["off"], strict=True)),
    }


def show(result: dict[str, Any]) -> str:
    """The result as text."""
    lines = [f"{'':<6}{'steps':>7}{'median step ms':>16}{'median outside ms':>19}"]
    for name, times in ((name, result["times"][name]) for name in ("loop", "bare")):
        step, outside = 1e3 * median(times["step"]), 1e3 * median(times["outside"])
        lines.append(f"{name:<6}{len(times['step']):>7}{step:>16.2f}{outside:>19.3f}")
    met = "met" if result["outside"] <= TARGET else "MISSED"
    lines.append(f"outside the engine: {result['outside']:.2%} of the loop's time (at most {TARGET:.0%}: {met})")
    met = "met" if result["clocks"] <= OF_CLOCKS else "MISSED"
    lines.append(f"a step with clocks takes {result['clocks']:.3f}x one without (at most {OF_CLOCKS:.2f}x: {met})")
    lines.append(f"a step of the loop takes {result['step']:.3f}x a step of the bare loop")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
