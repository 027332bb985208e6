"""`zero3d config show | explain | schema | import-deepspeed`: what a run would use, and what every key means."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from zero3d.config import explain, schema, split_words, to_dict, to_yaml
from zero3d.config.describe import key_schema
from zero3d.config.keys import KEYS
from zero3d.tools.cli.train import config_source
from zero3d.train.setup.left_out import load_filled


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the actions and their words."""
    actions = parser.add_subparsers(dest="action", metavar="show|explain|schema|import-deepspeed", required=True)
    show = _action(actions, "show", "print the resolved configuration as YAML, and mark what differs from the defaults")
    show.add_argument("words", nargs="*", metavar="CONFIG, KEY=VALUE", help="a YAML file, then overrides")
    meaning = _action(actions, "explain", "explain a key or a section; without one, all keys")
    meaning.add_argument("key", nargs="?", metavar="KEY", help="such as zero.stage or zero")
    _action(actions, "schema", "print a JSON Schema of the file, for editors")
    theirs = _action(
        actions, "import-deepspeed", "convert a DeepSpeed JSON into a file for zero3d train, with comments"
    )
    theirs.add_argument("document", metavar="JSON", help="a configuration of DeepSpeed's")
    theirs.add_argument(
        "words", nargs="*", metavar="CONFIG, KEY=VALUE", help="a YAML file and overrides, whose values replace auto"
    )


def _action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print what the action says."""
    if arguments.action == "schema":
        print(json.dumps(schema(), indent=2))
    elif arguments.action == "import-deepspeed":
        _import(arguments)
    elif arguments.action == "explain":
        text = explain(arguments.key)  # refuses an unknown key
        print(json.dumps(_as_json(arguments.key), indent=2) if arguments.json else text)
    else:
        file, overrides = split_words(arguments.words)
        config = load_filled(config_source(file, overrides)[1], overrides).config
        print(json.dumps(to_dict(config), indent=2) if arguments.json else to_yaml(config, mark=True), end="")
        print(end="\n" if arguments.json else "")
    return 0


def _import(arguments: argparse.Namespace) -> None:
    """Print a file of ours that says what a JSON of DeepSpeed's does."""
    from zero3d.ways.deepspeed.merge import load_merged
    from zero3d.ways.deepspeed.report import as_yaml

    file, overrides = split_words(arguments.words)
    made = load_merged(Path(arguments.document), None if file is None else Path(file), overrides)[1]
    print(json.dumps({row.ours: row.value for row in made.rows}) if arguments.json else "\n".join(as_yaml(made)))


def _as_json(name: str | None) -> dict[str, Any]:
    """Return the schema of one key, of each key of a section, or of all, by dotted name."""
    return {
        dotted: key_schema(key)
        for dotted, key in KEYS.items()
        if name is None or dotted == name or dotted.startswith(f"{name}.")
    }
