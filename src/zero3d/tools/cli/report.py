"""`zero3d report OUTPUT`: what a run was, how far it came and how it ended, by its folder alone."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from zero3d.errors import ConfigError
from zero3d.train.folder import PAGE
from zero3d.watchdog.own_files import write_whole


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("output", metavar="OUTPUT", help="the output folder of a run: finished, dead or under way")
    parser.add_argument(
        "--html", metavar="FILE", nargs="?", const="", help=f"write it as an HTML page with charts (OUTPUT/{PAGE})"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Read the folder and print, or write a page. Raises ConfigError for a folder of no run."""
    from rich.console import Console

    from zero3d.tools.cli.report_text import as_json, show
    from zero3d.tools.cli.run_folder import read_run

    left = read_run(arguments.output)
    if arguments.html is not None:
        from zero3d.tools.cli.report_page import report_page

        file = Path(arguments.html) if arguments.html else left.folder.root / PAGE
        _write(file, report_page(left))
        print(f"written: {file}", file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps(as_json(left)), flush=True)
    elif arguments.html is None:
        show(left, Console(highlight=False))
    return 0


def _write(file: Path, text: str) -> None:
    try:
        write_whole(file, text)
    except OSError as error:
        raise ConfigError(f"--html {file}: cannot be written ({error.strerror}).") from error
