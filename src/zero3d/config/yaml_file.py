"""A YAML file as nested dicts; everything that can be wrong with the file is told with its line."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from zero3d.config.hints import nearest
from zero3d.config.kinds import found
from zero3d.errors import ConfigError


def read_yaml(path: Path) -> Mapping[Any, Any]:
    """The top mapping of a YAML (or JSON) file; an empty file is an empty mapping. Raises ConfigError."""
    try:
        tree = _parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; the configuration is a YAML file.{_hint(path, '*')}") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{path}: {line}{error.problem or error.context}.") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # no text, a date of month 13, a million brackets
        raise ConfigError(f"{path} is no YAML file: {str(error).splitlines()[0]}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds {found(tree)}; it should hold sections, such as zero: {{stage: 2}}.")
    return tree


def _parse(text: str) -> Any:
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        _refuse_twice(node)
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _refuse_twice(node: yaml.Node | None, section: str = "") -> None:
    """No key twice in one mapping, where PyYAML would keep the last one in silence; two levels are all there are."""
    first: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if key.value in first:
                told = f"{section}{key.value} is written twice, first in line {first[key.value]}: delete one"
                raise yaml.MarkedYAMLError(problem=told, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
            if not section:
                _refuse_twice(value, f"{key.value}.")


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path} does not exist, nor does its folder {path.parent}."
    return f"{path} does not exist.{_hint(path.parent, path.name)}"


def _hint(folder: Path, name: str) -> str:
    """The file that was probably meant."""
    names: list[str] = []
    with suppress(OSError):  # a folder that may be entered but not listed
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    near = nearest(name, names) or next((each for each in names if each.endswith((".yaml", ".yml"))), None)
    return f" Did you mean {folder / near}?" if near else ""
