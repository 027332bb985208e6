"""Mutations of configuration files and overrides: a configuration, or one short error of ours; nothing else."""

from __future__ import annotations

import argparse

from mutations import mutated_load

from faulting.cases import Result, judge

COUNT = 100_000


def measure(arguments: argparse.Namespace) -> Result:
    """Load that many mutations."""
    file = arguments.scratch / "configs" / "run.yaml"
    file.parent.mkdir()
    numbers = range(arguments.seed, arguments.seed + (arguments.count or COUNT))
    return judge("configs", numbers, file.parent, lambda number: "refused" if mutated_load(file, number) else "loaded")
