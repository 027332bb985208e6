"""The licence of a base model, as its folder says it.

    README.md, between its first two lines of ---   license, license_name and license_link, as the Hub has them
    LICENSE, LICENSE.txt, LICENSE.md                the first line with words, and the Hub's name of a few licences

Nothing is guessed: a text that is not one of NAMES is told by its first line, and has no name of the Hub's.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from zero3d.config.yaml_file import parse_yaml
from zero3d.errors import short
from zero3d.reading import Unreadable, read_text

FENCE = "---"
KEYS = ("license", "license_name", "license_link")
FILES = ("LICENSE", "LICENSE.txt", "LICENSE.md")
MOST = 1 << 20  # bytes of a page
BEGINNING = 200  # characters of a licence that name it
NAMES = {"Apache License Version 2.0": "apache-2.0", "MIT License": "mit"}  # how texts begin -> the Hub's names


class Licence(NamedTuple):
    """Says the licence of a base model.

    keys   for the front matter of a card, by the Hub's names of them
    words  for people: what says it, and what
    """

    keys: Mapping[str, str]
    words: str


def licence_of(folder: Path | None) -> Licence | None:
    """Return the licence of a base's folder; None where nothing in it says one."""
    if folder is None:
        return None
    return _of_card(folder / "README.md") or next(filter(None, map(_of_text, (folder / name for name in FILES))), None)


def front_matter(text: str) -> Mapping[str, Any]:
    """Return what a page says of itself in YAML before it begins; nothing where it has no such lines."""
    lines = text.splitlines()
    if not lines or lines[0].rstrip() != FENCE:
        return {}
    end = next((i for i, line in enumerate(lines[1:], 1) if line.rstrip() == FENCE), None)
    if end is None:
        return {}
    try:
        found = parse_yaml("\n".join(lines[1:end]))
    except (yaml.YAMLError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_card(file: Path) -> Licence | None:
    """Return the licence of a model card; a link that leads to a file beside it is left out, for that is not copied."""
    found = front_matter(_text(file))
    keys = {key: found[key] for key in KEYS if isinstance(found.get(key), str) and found[key].isprintable()}
    if "license" not in keys:
        return None
    if not keys.get("license_link", "https://").startswith("https://"):
        del keys["license_link"]
    said = " ".join(keys[key] for key in KEYS[:2] if key in keys)
    return Licence(keys, f"{short(said)}, by the base's {file.name}")


def _of_text(file: Path) -> Licence | None:
    words = _text(file).split("\n")
    first = next((line.strip(" #\t\r") for line in words if line.strip(" #\t\r")), None)
    if first is None:
        return None
    beginning = " ".join(" ".join(words).replace("#", " ").split())[:BEGINNING]
    name = next((name for text, name in NAMES.items() if beginning.startswith(text)), None)
    return Licence({} if name is None else {"license": name}, f"{short(first)}, by the base's {file.name}")


def _text(file: Path) -> str:
    """Return a page's text; nothing where it cannot be read."""
    try:
        return read_text(file, MOST)
    except (OSError, Unreadable):
        return ""
