"""`zero3d train [CONFIG] [KEY=VALUE ...]`: on workers it starts itself, or as one of a launcher's."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TextIO

from zero3d.config import Config, fitting_ranks, given_keys, split_words
from zero3d.config.sections import GIVEN
from zero3d.errors import ConfigError, Zero3dError
from zero3d.models.places import check_model_path
from zero3d.spec.bits import SETTINGS
from zero3d.tools.advice.planner import RunPlanner
from zero3d.tools.cli.elastic import Job, devices_here, run_job
from zero3d.tools.cli.preflight import (
    check_attention,
    check_chats,
    check_key,
    check_model_type,
    check_paths,
    check_store,
    check_tp,
    check_transformers,
    check_world,
)
from zero3d.tools.cli.rank_environment import join_environment, narrowed
from zero3d.tools.cli.spare_ranks import release, stand_by
from zero3d.tools.cli.worker import LAUNCHED, as_worker, end_with, quiet_environment, report_output
from zero3d.tools.cli.workers import ranks_here
from zero3d.train.lock import FolderLock
from zero3d.train.setup.left_out import fill_in, load_filled
from zero3d.train.setup.packages import check_packages, urls_of
from zero3d.train.start import Start, check_start

DEMO = "demo"  # the configuration, and the preset in it
NAME = 40  # characters of a name that is made of a model's path
SHORT = {"stage": "zero.stage", "steps": "train.steps", "precision": "precision"}  # options for single keys


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG KEY=VALUE", help="a YAML file (default: the demo), overrides"
    )
    parser.add_argument(
        "--resume", metavar="auto|PATH", help="go on from the output's newest checkpoint, or from this one"
    )
    parser.add_argument(
        "--resume-settings",
        choices=SETTINGS,
        help="whose optimizer.* and schedule.* count in a run that goes on: given, the file's, or saved, the "
        "checkpoint's (default: given)",
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="remove what an earlier run wrote to the output folder"
    )
    parser.add_argument("--ranks", type=int, help="processes to start on this machine (default: one per GPU; CPU: 2)")
    parser.add_argument(
        "--max-restarts", type=int, metavar="K", help="after a fault start all ranks again, K times in all (default: 0)"
    )
    parser.add_argument(
        "--deepspeed", metavar="JSON", help="a DeepSpeed JSON; CONFIG gives the values that are auto in it"
    )
    parser.add_argument("--stage", help="short for zero.stage=")
    parser.add_argument("--steps", help="short for train.steps=")
    parser.add_argument("--precision", help="short for precision=")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, progress on stderr")


def run(arguments: argparse.Namespace) -> int:
    """Check once, then join a launcher's workers or start workers."""
    quiet_environment()
    joins = join_environment()
    try:
        name, config = read(arguments, told=not joins)
        started = int(os.environ["WORLD_SIZE"]) if joins else None
        check(arguments, config, started)
        ranks = None if started is None else fitting_ranks(config, started)
    except Zero3dError as error:
        if joins and os.environ["RANK"] != "0":
            return error.exit_code  # rank 0 says it
        raise
    if started is not None and ranks is not None:
        return join(arguments, name, config, started, ranks)
    start = Start(name, arguments.resume, arguments.overwrite, planner=RunPlanner())
    ranks = check_before(config, start, arguments.ranks)
    say_filled(arguments)
    print(starting(ranks, os.cpu_count() or 1), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    words, restarts = ["train", *as_words(arguments)], arguments.max_restarts or 0
    return run_job(Job(words, config, start, ranks, restarts, devices_here(config, restarts)))


def say_filled(arguments: argparse.Namespace) -> None:
    """Print what the model has decided of the configuration, once nothing is refused."""
    for line in arguments.filled:
        print(line, file=sys.stderr)


def check_before(config: Config, start: Start, ranks: int | None) -> int:
    """Check what can be before ranks are started, and return how many there will be. Raises Zero3dError."""
    check_start(config, start, alone=True)
    check_paths(config)
    check_packages(config)
    check_chats(config)
    check_model_type(config)
    check_tp(config)
    check_attention(config)
    trackers = config.log.trackers
    if "wandb" in trackers and start.resume is None:  # else perhaps no step is left to log
        check_key(trackers["wandb"])
    if "mlflow" in trackers:
        check_store(trackers["mlflow"])
    if ranks is None:  # counting devices imports torch, which takes seconds: after all that needs none
        ranks = ranks_here(config.mesh)
    check_world(config, ranks)
    return ranks


def starting(ranks: int, cores: int) -> str:
    """Return the line printed while ranks start, some seconds before a run's first line."""
    many = f"starting {ranks} rank{'' if ranks == 1 else 's'}: torch is imported, model and data are read"
    return f"{many}; this machine has {cores} CPU cores, which they share" if ranks > cores else many


def join(arguments: argparse.Namespace, name: str, config: Config, started: int, ranks: int) -> int:
    """Be one of `started` ranks, of which the first `ranks` train, and exit; return 0 after a spare one's wait."""
    if int(os.environ["RANK"]) >= ranks:
        stand_by(started, ranks)
        return 0
    os.environ.update(narrowed(os.environ, ranks))

    def action() -> None:
        if os.environ["RANK"] == "0" and LAUNCHED not in os.environ:
            say_filled(arguments)
        work(arguments, name, config)
        if started > ranks and os.environ["RANK"] == "0":
            release()

    as_worker(action, {"timeout": config.health.timeout, "slow_timeout": config.health.slow_timeout})


def read(arguments: argparse.Namespace, told: bool = False) -> tuple[str, Config]:
    """Return the run's name and its configuration: the demo's where no file is given. Raises ConfigError.

    told  print what was made of a JSON of DeepSpeed's
    `arguments.filled` are lines about keys that were left out and that the model decides.
    """
    file, overrides = split_words(arguments.words)
    overrides += [
        f"{key}={value}" for option, key in SHORT.items() if (value := getattr(arguments, option)) is not None
    ]
    name, source = config_source(file, overrides)
    if arguments.deepspeed is None:
        config, filled = load_filled(source, overrides)
        if config.plan.links != GIVEN:
            config, filled = load_filled(source, overrides + _over_links(arguments, config, told))
        arguments.filled = filled
        return name, config
    from zero3d.ways.deepspeed.merge import load_merged
    from zero3d.ways.deepspeed.report import lines

    own, below = (None, source) if file is None else (source, None)
    config, made = load_merged(Path(arguments.deepspeed), own, overrides, below)
    if made.leaves("train.micro_batch") and None in (config.train.batch, config.train.accumulate):
        planned = {"train.micro_batch": _planned(config, arguments.ranks)}
        config, made = load_merged(Path(arguments.deepspeed), own, overrides, below, planned)
        arguments.words += [f"{key}={value}" for key, value in planned.items()]  # for the workers
    config, arguments.filled = fill_in(config, given_keys(made.tree))
    if told:
        print("\n".join(lines(made)), file=sys.stderr)
    return name, config


def _over_links(arguments: argparse.Namespace, config: Config, told: bool) -> list[str]:
    """Return what is chosen for slow links between hosts, as words, which workers are given, too."""
    from zero3d.tools.cli.planned_links import planned_links

    check_model_path(config.model)
    local = os.environ.get("LOCAL_WORLD_SIZE")
    words, why = planned_links(config, _started(config, arguments.ranks), None if local is None else int(local))
    arguments.words += words
    if told or os.environ.get("RANK") == "0":
        print("\n".join(why), file=sys.stderr)
    return words


def _planned(config: Config, ranks: int | None) -> int:
    """Return a micro-batch that fits this machine, of as many ranks as there will be."""
    from zero3d.tools.cli.planned_batch import planned_micro_batch

    check_model_path(config.model)
    return planned_micro_batch(config, _started(config, ranks))


def _started(config: Config, ranks: int | None) -> int:
    """Return how many ranks there will be: those that a launcher has started, or `ranks` that were asked for."""
    started = int(os.environ["WORLD_SIZE"]) if "WORLD_SIZE" in os.environ else ranks
    return started or ranks_here(config.mesh)


def config_source(file: str | None, overrides: Sequence[str]) -> tuple[str, Path | None]:
    """Return a configuration's name and the file below the overrides, None where that is the defaults.

    file given                     that file
    no file, model.path of one's   the defaults: the demo's values are of its model and its data
    no file                        the demo's, whatever else is overridden
    """
    if file is not None:
        return Path(file).stem, Path(file)
    pairs = [word.partition("=") for word in overrides]
    paths = [path.strip() for key, _, path in pairs if key.strip() == "model.path"]
    if paths and paths[-1] != DEMO:
        return re.sub(r"[^\w.-]+", "-", Path(paths[-1]).name)[:NAME].strip(".-") or "run", None
    return DEMO, Path(str(files("zero3d.train") / "demo.yaml"))


def as_words(arguments: argparse.Namespace) -> list[str]:
    """Return the command line of a worker."""
    words = list(arguments.words)
    for option in ("deepspeed", "ranks", *SHORT, "resume", "resume_settings"):
        value = getattr(arguments, option)
        words += [] if value is None else [f"--{option.replace('_', '-')}={value}"]
    return words + ["--overwrite"] * arguments.overwrite + ["--json"] * arguments.json


def check(arguments: argparse.Namespace, config: Config, world: int | None) -> None:
    """Refuse what cannot run, before anything is started or written. Raises ConfigError."""
    check_ranks(arguments.ranks)
    check_restarts(arguments.max_restarts, world)
    if world is not None and arguments.ranks not in (None, world):
        raise ConfigError(f"--ranks {arguments.ranks}: the launcher has started {world} already; leave --ranks out.")
    if arguments.resume_settings is not None and arguments.resume is None:
        raise ConfigError(
            f"--resume-settings {arguments.resume_settings} is about a run that goes on: give --resume auto or a "
            "checkpoint, too."
        )
    if arguments.overwrite and arguments.resume is not None:
        raise ConfigError("--overwrite removes what --resume goes on from: give one of them.")
    check_transformers(config.model)


def check_ranks(ranks: int | None) -> None:
    """Refuse a number of ranks below 1. Raises ConfigError."""
    if ranks is not None and ranks < 1:
        raise ConfigError(f"--ranks {ranks}: type a whole number from 1.")


def check_restarts(restarts: int | None, world: int | None) -> None:
    """Refuse a number of restarts below 0, and one for ranks that another launcher has started. Raises ConfigError."""
    if restarts is not None and restarts < 0:
        raise ConfigError(f"--max-restarts {restarts}: type a whole number from 0.")
    if restarts is not None and world is not None:
        raise ConfigError(
            f"--max-restarts {restarts}: who has started these {world} ranks starts them again: leave it out, and give "
            "it to torchrun (--max-restarts), Slurm (--requeue) or the Job (restartPolicy)."
        )


def work(arguments: argparse.Namespace, name: str, config: Config) -> None:
    """Do one rank's part; rank 0 prints."""
    from rich.console import Console

    from zero3d.train.progress import Progress
    from zero3d.train.report import as_json, show
    from zero3d.train.run import run as run_training

    stdout = own_stdout() if arguments.json else sys.stdout
    quiet_libraries(any(url.startswith("hf://") for _, url in urls_of(config, arguments.resume)))
    first = os.environ["RANK"] == "0"
    console = Console(stderr=arguments.json, quiet=not first)
    settings = arguments.resume_settings or Start.settings
    start = Start(name, arguments.resume, arguments.overwrite, report_output, end_with, settings, RunPlanner())
    with FolderLock() as lock:
        result = run_training(config, start, Progress(console, config.log.every), lock)
        if first:
            show(result, console)
            if arguments.json:
                print(json.dumps(as_json(result)), file=stdout, flush=True)


def own_stdout() -> TextIO:
    """Keep this process's stdout for one result: what models and libraries print goes to stderr from now on."""
    stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return stdout


def quiet_libraries(needs_hub: bool = False) -> None:
    """Keep bars and notes of libraries off the terminal, and have none reach for a hub that is not asked for."""
    if not needs_hub:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    if find_spec("transformers") is not None:
        from transformers.utils import logging

        logging.set_verbosity_error()
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning)
        logging.disable_progress_bar()
