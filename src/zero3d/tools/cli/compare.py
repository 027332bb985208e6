"""`zero3d compare [CONFIG] KEY=A,B,... [KEY=VALUE ...]`: one run per variant, one after another, then one table.

OUTPUT/
  zero.stage=0/       a run's own folder
  zero.stage=0.log    what it said
  compare.json        figures and results of the runs that are done, why others failed; written after each
  compare.png

Everything is checked before the first run. A run that fails is a row that says so, and the exit code is 1 at the end.
Bad input of a run before any is done ends the comparison: the others would hardly fare better.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from rich.console import Console
from rich.text import Text

from zero3d.config import Config, split_words
from zero3d.errors import ConfigError, MeshError, Zero3dError, remedy_of
from zero3d.tools.cli import workers
from zero3d.tools.cli.preflight import check_positions, check_transformers, check_world
from zero3d.tools.cli.progress import time_left
from zero3d.tools.cli.rank_environment import join_environment
from zero3d.tools.cli.train import check_ranks, config_source, quiet_libraries
from zero3d.tools.cli.workers import ranks_here
from zero3d.train.comparison import as_json, rows
from zero3d.train.comparison_plot import draw
from zero3d.train.comparison_table import failure, show
from zero3d.train.folder import Folder, first_free, numbered
from zero3d.train.lock import FolderLock, check_free
from zero3d.train.stop import StopRequest
from zero3d.train.variants import QUIET, Axis, Variant, check_variants, split_axes, variants

POLL = 0.1  # seconds between two looks at a run
SPINNER = 3  # columns before the words of a live line
WIDTH = 100  # of tables in a file or pipe, at least
LAST_LINES, LAST_BYTES = 20, 8192  # looked at in a run's log
BAD_INPUT = 2  # a run's exit code


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG KEY=A,B",
        help="a YAML file (default: the demo), a key with several values for each axis, overrides of all runs",
    )
    parser.add_argument("--ranks", type=int, help="processes of each run (default: one per GPU; CPU: 2)")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Check all variants, then run them."""
    if join_environment():
        raise ConfigError("zero3d compare starts its runs itself, on this machine: call it without torchrun or srun.")
    with FolderLock() as lock:
        return compare(read(arguments, lock), arguments.json)


def read(arguments: argparse.Namespace, lock: FolderLock) -> ComparisonPlan:
    """Check everything before the first run, and lock the output. Raises ConfigError."""
    check_ranks(arguments.ranks)
    file, overrides = split_words(arguments.words)
    axes, common = split_axes(overrides)
    name = config_source(file, common)[0]
    if any(axis.key == "output" for axis in axes):
        raise ConfigError("output takes one folder here: each run gets one in it, named after its values.")
    runs, common = variants(axes), [*QUIET, *common]
    configs = check_variants(runs, common, lambda words: config_source(file, words)[1])
    check_runs(runs, configs, arguments.ranks)
    kept = [word for word in common if word.partition("=")[0].strip() != "output"]
    output = claim(configs[0].output, f"zero3d-compare-{name}", len(kept) < len(common), lock)
    return ComparisonPlan(name, file, axes, runs, kept, arguments.ranks, output)


def check_runs(runs: Sequence[Variant], configs: Sequence[Config], ranks: int | None) -> None:
    """Refuse now what would fail when its turn comes, after hours of others. Raises ConfigError.

    What all runs share needs no look here: the first one looks at once.
    """
    differ = len({(config.model, config.data.length) for config in configs}) > 1
    if differ:
        quiet_libraries()  # the model's config is read
    for variant, config in zip(runs, configs, strict=True):
        try:
            check_world(config, ranks_here(config.mesh) if ranks is None else ranks)
            check_transformers(config.model)
            if differ:
                check_positions(config)
        except (ConfigError, MeshError) as error:
            raise ConfigError(f"{variant.label}: {error}") from error


def claim(output: str | None, default: str, typed: bool, lock: FolderLock) -> Path:
    """Claim the output: what was typed, unused; else the first free one beside the file's, or of the default name."""
    if output is None or not typed:
        stem = default if output is None else f"{output}-compare"
        output = str(numbered(stem, first_free(stem)))
    folder = Folder(Path(output))
    check_free(folder.root)
    if folder.used:
        raise ConfigError(f"output {output} is used already: write elsewhere with output=FOLDER, or remove it.")
    folder.claim(lock, None, overwrite=False)
    return folder.root


@dataclass(frozen=True)
class ComparisonPlan:
    """Holds what is compared. common: the overrides of every run."""

    name: str
    file: str | None
    axes: tuple[Axis, ...]
    variants: Sequence[Variant]
    common: Sequence[str]
    ranks: int | None
    output: Path

    def arguments(self, variant: Variant) -> list[str]:
        """Return the arguments of `zero3d` that run a variant."""
        options = ["--json"] if self.ranks is None else ["--json", f"--ranks={self.ranks}"]
        file = [] if self.file is None else [self.file]
        return ["train", *options, *file, *self.common, *variant.words, f"output={self.output / variant.folder}"]


@dataclass
class Outcomes:
    """Holds what came of the runs so far: a result, or why not, in one line."""

    results: dict[Variant, dict[str, Any]] = field(default_factory=dict)
    failed: dict[Variant, str] = field(default_factory=dict)


def compare(plan: ComparisonPlan, as_object: bool) -> int:
    """Run all variants, print what was found; return the exit code."""
    console = Console(stderr=as_object)
    if not console.is_terminal:
        console.width = max(console.width, WIDTH)
    axes = " ".join(f"{axis.key}={','.join(axis.values)}" for axis in plan.axes)
    _say(console, f"zero3d compare: {len(plan.variants)} runs of {plan.name}: {axes}; writing to {plan.output}")
    outcomes, begun, stopped = Outcomes(), time.monotonic(), None
    with StopRequest() as request:
        for number, variant in enumerate(plan.variants):
            left = time_left(number, len(plan.variants), time.monotonic() - begun)
            code, text = run_variant(plan, variant, request, console, left)
            if request.signal is not None or (code == BAD_INPUT and not outcomes.results):
                stopped = unfinished(plan, variant, request.signal)
                break
            if code:
                outcomes.failed[variant] = reason(plan, variant, code)
                line = failure(variant, outcomes.failed[variant])
            else:
                outcomes.results[variant] = json.loads(text)
                line = done(variant, outcomes.results[variant])
            console.print(line, soft_wrap=True)
            write(plan, outcomes)
    conclude(plan, outcomes, console)
    if as_object and (stopped is None or outcomes.results):
        print(json.dumps(report(plan, outcomes)))
    return bool(outcomes.failed) if stopped is None else stopped


# --- a run --------------------------------------------------------------------------------------


def run_variant(
    plan: ComparisonPlan, variant: Variant, request: StopRequest, console: Console, left: str
) -> tuple[int, str]:
    """Run a variant; return exit code and stdout. A request to stop is passed on, and again for a second Ctrl-C.

    left  of all runs' time, as the live line says it
    """
    log = _log(plan, variant)
    label = f"{variant.label} ({plan.variants.index(variant) + 1} of {len(plan.variants)}, {left})"
    stopping = False
    with TemporaryFile("w+") as stdout, log.open("wb") as stderr, console.status(label) as status:
        process = workers.start_process(plan.arguments(variant), stdout=stdout, stderr=stderr)
        while True:
            try:
                if process.poll() is not None:
                    break
                if request.signal is not None and not stopping:
                    stopping = True
                    process.send_signal(request.signal)
                status.update(Text(f"{label}  {_last_step(log)}"[: console.width - SPINNER]))
                time.sleep(POLL)
            except KeyboardInterrupt:
                process.send_signal(signal.SIGINT)
        stdout.seek(0)
        return process.returncode, stdout.read()


def unfinished(plan: ComparisonPlan, variant: Variant, stop_signal: int | None) -> int:
    """Print on stderr why no more runs follow; return the exit code: of the signal that stopped it, or 2."""
    kept = plan.output / "compare.json"
    before = f"; the runs before it are in {kept}" if kept.exists() else ""
    if stop_signal is not None:
        print(f"stopped by {signal.Signals(stop_signal).name} in {variant.label}{before}", file=sys.stderr)
        return 128 + stop_signal
    print(reason(plan, variant, BAD_INPUT), file=sys.stderr)
    print(f"{variant.label} failed{before}; all it said: {_log(plan, variant)}", file=sys.stderr)
    return BAD_INPUT


def reason(plan: ComparisonPlan, variant: Variant, code: int) -> str:
    """Return in one line why a run failed: how a rank died, else the last line it printed, else its exit code."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    lines = [line.strip() for line in _tail(_log(plan, variant)) if line.strip()]
    died = [line for line in lines if workers.DIED in line or line.startswith(workers.BLAMED)]
    return (died or lines or [f"exit code {code}"])[-1]


def done(variant: Variant, result: dict[str, Any]) -> Text:
    """Return the result of a run in one line."""
    loss = "not finite" if result["losses"][-1] is None else f"{result['losses'][-1]:.6f}"
    return Text(f"{variant.label}: {result['steps']:,} steps, loss {loss}, {result['step_seconds']:.3f} s a step")


def _log(plan: ComparisonPlan, variant: Variant) -> Path:
    return plan.output / f"{variant.folder}.log"


def _tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - LAST_BYTES))
        return file.read().decode(errors="replace").splitlines()[-LAST_LINES:]


def _last_step(log: Path) -> str:
    """Return the last line about a step."""
    return next((line for line in reversed(_tail(log)) if line.startswith("step ")), "")


# --- the end ------------------------------------------------------------------------------------


def report(plan: ComparisonPlan, outcomes: Outcomes) -> dict[str, Any]:
    """Return what compare.json holds and --json prints."""
    picture = plan.output / "compare.png"
    return {
        "name": plan.name,
        "axes": {axis.key: list(axis.values) for axis in plan.axes},
        "overrides": list(plan.common),
        "runs": as_json(list(outcomes.results), list(outcomes.results.values())),
        "failed": [
            {"variant": run.label, "overrides": run.words, "why": why, "log": str(_log(plan, run).resolve())}
            for run, why in outcomes.failed.items()
        ],
        "paths": {
            "folder": str(plan.output.resolve()),
            "picture": str(picture.resolve()) if picture.exists() else None,
        },
    }


def write(plan: ComparisonPlan, outcomes: Outcomes) -> None:
    """Write compare.json, whole or not at all. Raises Zero3dError when the disk does not take it."""
    file, fresh = plan.output / "compare.json", plan.output / "compare.json.tmp"
    try:
        fresh.write_text(json.dumps(report(plan, outcomes)))
        fresh.replace(file)
    except OSError as error:
        raise Zero3dError(
            f"cannot write {file} ({error.strerror}): {remedy_of(error)}, or choose another output with output=FOLDER; "
            "each run's own folder is kept."
        ) from error


def conclude(plan: ComparisonPlan, outcomes: Outcomes, console: Console) -> None:
    """Print tables and draw the picture, unless all runs failed."""
    if not outcomes.results:
        return
    results = list(outcomes.results.values())
    figures = rows(list(outcomes.results), results)
    show(plan.axes, figures, outcomes.failed, console)
    picture = plan.output / "compare.png"
    try:
        draw(figures, results, f"{plan.name}: {', '.join(axis.key for axis in plan.axes)}", picture)
        line = f"picture: {picture}"
    except ImportError:
        line = "no picture: matplotlib is missing, type pip install 'zero3d[plot]'"
    except OSError as error:
        line = f"no picture: {picture} cannot be written ({error.strerror})"
    write(plan, outcomes)  # now with the picture's path
    _say(console, f"{line}    figures: {plan.output / 'compare.json'}")


def _say(console: Console, line: str) -> None:
    console.print(Text(line), soft_wrap=True)
