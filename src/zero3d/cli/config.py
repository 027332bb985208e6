"""`zero3d config show | explain | schema`: what a run would use, and what every key means."""

from __future__ import annotations

import argparse
import json
from typing import Any

from zero3d.cli.train import config_source
from zero3d.config import explain, load, schema, split_words, to_dict, to_yaml
from zero3d.config.describe import key_schema
from zero3d.config.keys import KEYS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the three actions and their words."""
    actions = parser.add_subparsers(dest="action", metavar="show|explain|schema", required=True)
    show = _action(actions, "show", "the resolved configuration as YAML; what differs from the defaults is marked")
    show.add_argument("words", nargs="*", metavar="CONFIG, KEY=VALUE", help="a YAML file, then overrides")
    meaning = _action(actions, "explain", "what a key or a section means; without one, all keys")
    meaning.add_argument("key", nargs="?", metavar="KEY", help="such as zero.stage or zero")
    _action(actions, "schema", "JSON Schema of the file, for editors")


def _action(actions: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Print what the action says."""
    if arguments.action == "schema":
        print(json.dumps(schema(), indent=2))
    elif arguments.action == "explain":
        text = explain(arguments.key)  # refuses an unknown key
        print(json.dumps(_as_json(arguments.key), indent=2) if arguments.json else text)
    else:
        file, overrides = split_words(arguments.words)
        config = load(config_source(file, overrides)[1], overrides)
        print(json.dumps(to_dict(config), indent=2) if arguments.json else to_yaml(config, mark=True), end="")
        print(end="\n" if arguments.json else "")
    return 0


def _as_json(name: str | None) -> dict[str, Any]:
    """Return the schema of one key, of each key of a section, or of all, by dotted name."""
    return {
        dotted: key_schema(key)
        for dotted, key in KEYS.items()
        if name is None or dotted == name or dotted.startswith(f"{name}.")
    }
