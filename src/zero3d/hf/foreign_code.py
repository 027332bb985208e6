"""Folders of models and tokenizers are data: what their JSON files name as code is refused by name and never run.

    auto_map             classes in .py files of the folder, or of a repository ("owner/name--file.Class")
    tokenizer_class      a class that a .py file of the folder defines
    attn_implementation  kernels of a repository ("owner/name")

Every call into transformers says `trust_remote_code=False` as well, which alone would ignore the first kind where
transformers has a class of that name, and train something else than the folder means.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero3d.errors import ConfigError

SHOWN = 3


def refuse_code(*files: Path) -> None:
    """Raise ConfigError where one of the JSON files, as far as they exist, names code to run.

    One that is no JSON names nothing: whoever reads it for its contents refuses it.
    """
    for file in files:
        if file.is_file():
            named = list(dict.fromkeys(_named(_read(file), file.parent)))
            if named:
                raise ConfigError(
                    f"{file} names code of its own ({', '.join(named[:SHOWN])}), and zero3d runs no code from a "
                    "folder: where transformers has that class itself, take the entry out of the file; else install "
                    "code that you have read as a package (a model's by model.path=module:function)."
                )


def _read(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def _named(tree: Any, folder: Path) -> Iterator[str]:
    """What a tree of JSON names as code, at any depth."""
    trees = [tree]
    while trees:
        tree = trees.pop()
        if isinstance(tree, list):
            trees += tree
        if not isinstance(tree, dict):
            continue
        for key, value in tree.items():
            if key == "auto_map" and value:
                yield from (f"auto_map: {each}" for each in _texts(value))
            elif key.endswith("attn_implementation"):
                yield from (f"{key}: {each}" for each in _texts(value) if "/" in each)
            elif key == "tokenizer_class" and isinstance(value, str) and _defined(value, folder):
                yield f"tokenizer_class: {value}"
            else:
                trees.append(value)


def _texts(value: Any) -> list[str]:
    """A text, or those in a list or mapping; a value of another kind as it is written."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    inner = [each for entry in values for each in (entry if isinstance(entry, list) else [entry])]
    return [str(each) for each in inner if each is not None]


def _defined(name: str, folder: Path) -> bool:
    """Whether a .py file of the folder defines the class."""
    line = re.compile(rf"^\s*class\s+{re.escape(name)}\b", re.MULTILINE)
    return any(line.search(file.read_text(errors="replace")) for file in sorted(folder.glob("*.py")) if file.is_file())
