"""`zero3d train`: the embedded demo, on workers it starts itself or inside those that exist."""

from __future__ import annotations

import argparse
import json
import os
from importlib.util import find_spec

from zero3d.cli.workers import RANKS, as_worker, launch, quiet_environment
from zero3d.errors import ConfigError
from zero3d.zero.stages import stage_row

STEPS = 500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the verb."""
    parser.add_argument("--stage", type=int, default=3, help="ZeRO stage 0, 1, 2 or 3 (default %(default)s)")
    parser.add_argument("--ranks", type=int, help=f"processes to start on this machine (default {RANKS})")
    parser.add_argument("--steps", type=int, default=STEPS, help="training steps (default %(default)s)")
    parser.add_argument("--precision", default="bf16", help="fp32, bf16, fp16 or fp64 (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Validate once, then join the workers of a launcher (RANK is set) or start workers."""
    quiet_environment()
    joins = "RANK" in os.environ
    try:
        check(arguments, int(os.environ["WORLD_SIZE"]) if joins else None)
    except ConfigError:
        if joins and os.environ["RANK"] != "0":
            return 2  # rank 0 says it
        raise
    if joins:
        as_worker(lambda: work(arguments))
    words = ["train", f"--stage={arguments.stage}", f"--steps={arguments.steps}", f"--precision={arguments.precision}"]
    return launch(words + ["--json"] * arguments.json, RANKS if arguments.ranks is None else arguments.ranks)


def check(arguments: argparse.Namespace, world: int | None) -> None:
    """Refuse what cannot run, before anything is started or written. Raises ConfigError."""
    from zero3d.precision import Precision

    stage_row(arguments.stage)
    Precision.of(arguments.precision)
    for option, value in (("--ranks", arguments.ranks), ("--steps", arguments.steps)):
        if value is not None and value < 1:
            raise ConfigError(f"{option} {value}: type a whole number from 1.")
    if world is not None and arguments.ranks not in (None, world):
        raise ConfigError(f"--ranks {arguments.ranks}: the launcher has started {world} already; leave --ranks out.")
    if find_spec("transformers") is None:
        raise ConfigError("zero3d train needs transformers for its model: pip install 'zero3d[hf]'")


def work(arguments: argparse.Namespace) -> None:
    """One rank's part; rank 0 prints."""
    from rich.console import Console
    from transformers.utils import logging

    from zero3d.train.demo import Recipe, run as run_demo
    from zero3d.train.progress import Progress
    from zero3d.train.report import as_json, show

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    first = os.environ["RANK"] == "0"
    console = Console(stderr=arguments.json, quiet=not first)
    result = run_demo(Recipe(arguments.stage, arguments.precision, arguments.steps), Progress(console))
    if first:
        show(result, console)
        if arguments.json:
            print(json.dumps(as_json(result)))
