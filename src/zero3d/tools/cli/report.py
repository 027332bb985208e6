"""`zero3d report OUTPUT`: what a run was, how far it came and how it ended, by its folder alone."""

from __future__ import annotations

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("output", metavar="OUTPUT", help="the output folder of a run: finished, dead or under way")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read the folder and print. Raises ConfigError for a folder of no run."""
    from rich.console import Console

    from zero3d.tools.cli.report_text import as_json, show
    from zero3d.tools.cli.run_folder import read_run

    left = read_run(arguments.output)
    if arguments.json:
        print(json.dumps(as_json(left)), flush=True)
    else:
        show(left, Console(highlight=False))
    return 0
