"""Folders of models and tokenizers are data: what their JSON files name as code is refused by name and never run.

    auto_map             classes in .py files of the folder, or of a repository ("owner/name--file.Class")
    tokenizer_class      a class that a .py file of the folder defines, or one of transformers that is not a tokenizer:
                         AutoProcessor would go on to whatever else the folder names
    attn_implementation  kernels of a repository ("owner/name")

Every call into transformers says `trust_remote_code=False` as well, which alone would ignore the first kind where
transformers has a class of that name, and train something else than the folder means. Some of its classes drop that
argument on its way to others: the calls are made inside `no_foreign_code`, where nothing is asked or imported.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from zero3d.errors import ConfigError, short
from zero3d.reading import Unreadable, read_object

SHOWN = 3
CONFIGS = ("config*.json", "*_config.json")  # what transformers reads in a folder when it looks for classes


def refuse_code_in(folder: Path) -> None:
    """Raise ConfigError where any of the folder's configs, of whatever part, names code to run or cannot be read."""
    refuse_code(*sorted({file for pattern in CONFIGS for file in folder.glob(pattern)}))


def refuse_code(*files: Path) -> None:
    """Raise ConfigError where one of the JSON files, as far as they exist, names code to run or cannot be read."""
    for file in files:
        if os.path.lexists(file):
            entries = list(dict.fromkeys(_code_entries(_read(file), file.parent)))
            if entries:
                raise ConfigError(
                    f"{file} refers to code in its folder ({', '.join(entries[:SHOWN])}), which zero3d never runs. If "
                    "transformers has that class itself, remove the entry from the file; else review the code, "
                    "install it as a package, and (for a model) type model.path=module:function."
                )


@contextmanager
def no_foreign_code() -> Iterator[None]:
    """Keep calls into transformers from running code of a folder: no stdin answers questions, no file is imported."""
    from transformers import dynamic_module_utils

    stdin, importer = sys.stdin, dynamic_module_utils.get_class_in_module
    sys.stdin, dynamic_module_utils.get_class_in_module = None, _refuse_import
    try:
        yield
    finally:
        sys.stdin, dynamic_module_utils.get_class_in_module = stdin, importer


def _refuse_import(class_name: str, module_path: object, **_: object) -> NoReturn:
    raise ConfigError(
        f"{short(class_name)} of {short(module_path)} is code in a model's folder, which zero3d never runs."
    )


def _read(file: Path) -> Any:
    try:
        return read_object(file)
    except Unreadable as error:
        raise ConfigError(f"{file} {error}: correct it, or remove it.") from error


def _code_entries(tree: Any, folder: Path) -> Iterator[str]:
    """Yield the entries of a tree of JSON that name code, at any depth."""
    trees = [tree]
    while trees:
        tree = trees.pop()
        if isinstance(tree, list):
            trees += tree
        if not isinstance(tree, dict):
            continue
        for key, value in tree.items():
            if key == "auto_map" and value:
                yield from (f"auto_map: {text}" for text in _texts(value))
            elif key.endswith("attn_implementation"):
                yield from (f"{key}: {text}" for text in _texts(value) if "/" in text)
            elif (
                key == "tokenizer_class"
                and isinstance(value, str)
                and (_is_defined(value, folder) or _is_no_tokenizer(value))
            ):
                yield f"tokenizer_class: {value}"
            else:
                trees.append(value)


def _texts(value: Any) -> list[str]:
    """Return a text, or those in a list or mapping; a value of another kind as it is written."""
    values = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else [value]
    inner = [item for entry in values for item in (entry if isinstance(entry, list) else [entry])]
    return [str(item) for item in inner if item is not None]


def _is_defined(name: str, folder: Path) -> bool:
    """Return whether a .py file of the folder defines the class."""
    line = re.compile(rf"^\s*class\s+{re.escape(name)}\b", re.MULTILINE)
    return any(line.search(file.read_text(errors="replace")) for file in sorted(folder.glob("*.py")) if file.is_file())


def _is_no_tokenizer(name: str) -> bool:
    """Return whether transformers has the class, by a name with "Fast" or without, and it is not a tokenizer."""
    import transformers

    plain = re.sub("(Fast)+$", "", name)
    classes = [getattr(transformers, alias, None) for alias in (plain, plain + "Fast")]
    return plain.startswith("Auto") or not all(kind is None or _is_tokenizer(kind) for kind in classes)


def _is_tokenizer(kind: Any) -> bool:
    """Return whether an attribute of transformers is a tokenizer, or stands for one whose package is missing."""
    from transformers import PreTrainedTokenizerBase

    return getattr(kind, "is_dummy", False) or (isinstance(kind, type) and issubclass(kind, PreTrainedTokenizerBase))
