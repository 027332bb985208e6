"""`zero3d compare [CONFIG] KEY=A,B,... [KEY=VALUE ...]`: one run per variant, one after another, then one table.

OUTPUT/
  zero.stage=0/       a run's own folder
  zero.stage=0.log    what it said
  compare.json        figures and results of the runs that are done, why others failed; written after each
  compare.png

Everything is checked here, before the first run; `compare_runs.py` runs them.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from zero3d.cli.compare_runs import ComparisonPlan, compare
from zero3d.cli.preflight import check_positions, check_transformers, check_world
from zero3d.cli.rank_environment import join_environment
from zero3d.cli.train import check_ranks, config_source, quiet_libraries
from zero3d.cli.workers import ranks_here
from zero3d.config import Config, split_words
from zero3d.errors import ConfigError, MeshError
from zero3d.train.folder import Folder, first_free, numbered
from zero3d.train.lock import FolderLock, check_free
from zero3d.train.variants import QUIET, Variant, check_variants, split_axes, variants


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG KEY=A,B",
        help="a YAML file (default: the demo), a key with several values for each axis, overrides of all runs",
    )  # fmt: skip
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
        mesh = config.mesh
        try:
            check_world(config, ranks_here(mesh.dp, mesh.tp, mesh.pp, mesh.ep) if ranks is None else ranks)
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
