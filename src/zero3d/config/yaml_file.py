"""A YAML file as nested dicts; everything that can be wrong with the file is told with its line.

What is read is what YAML 1.1 and 1.2 agree on: plain values without tags, in a file of bounded size and depth
whose aliases stay small when they are written out. All of it is checked on the way to a value, before one is made.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from zero3d.config.hints import nearest
from zero3d.config.kinds import describe_value, number_meant
from zero3d.errors import ConfigError, short
from zero3d.reading import Unreadable, read_text

BYTES = 1 << 20  # of a file; the largest example has 2 kB
DEPTH = 16  # levels; a configuration has 3, a cluster file 2
CORE = "tag:yaml.org,2002:"  # what !! stands for
NODES, CHARACTERS = 20_000, 4 * BYTES  # with every alias written out


class Loader(yaml.SafeLoader):
    """Refuses bombs, tags and numbers that are read in two ways, when it comes to them; else a SafeLoader."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (the form that PyYAML has)
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":timestamp")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._nodes = self._characters = 0
        self._sizes: dict[yaml.Node, tuple[int, int]] = {}  # nodes and characters below each that is complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose the node that comes next. Raises MarkedYAMLError for one that nobody needs."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        nodes, characters = self._nodes, self._characters
        self._check(event)
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        assert node is not None
        if not isinstance(event, yaml.AliasEvent):
            self._sizes[node] = self._nodes - nodes, self._characters - characters
        elif node in self._sizes:
            self._count(event, *self._sizes[node])
        else:
            raise _at(event, f"the alias *{short(event.anchor)} contains itself")
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping. A truth value before a colon is a name, as in YAML 1.2: `on` of section log."""
        node = super().compose_mapping_node(anchor)
        for name, _ in node.value:
            if name.tag == f"{CORE}bool":
                name.tag = f"{CORE}str"
        return node

    def _check(self, event: Any) -> None:
        if self._depth == DEPTH:
            raise _at(event, f"nested more than {DEPTH} levels deep")
        if isinstance(event, yaml.AliasEvent):
            return
        self._count(event, 1, len(getattr(event, "value", "")))
        if event.tag is not None:
            raise _at(
                event,
                f"the tag {short(event.tag.replace(CORE, '!!'))} is not read here: delete it, and put text in quotes",
            )
        meant = number_meant(event.value) if isinstance(event, yaml.ScalarEvent) and event.style is None else None
        if meant is not None:
            raise _at(event, f'{short(event.value)} is read in two ways: {meant}, or as text "{short(event.value)}"')

    def _count(self, event: Any, nodes: int, characters: int) -> None:
        self._nodes, self._characters = self._nodes + nodes, self._characters + characters
        if self._nodes > NODES or self._characters > CHARACTERS:
            raise _at(event, f"more than {NODES:,} values or {CHARACTERS:,} characters, its aliases written out")


def _at(event: Any, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def read_yaml(path: Path, example: str = "zero: {stage: 2}") -> Mapping[Any, Any]:
    """Return the top mapping of a YAML (or JSON) file; an empty file is an empty one. Raises ConfigError."""
    try:
        tree = parse_yaml(read_text(path, BYTES))
    except FileNotFoundError:
        raise ConfigError(_missing(path)) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; the configuration is a YAML file.{_hint(path, '*')}") from None
    except OSError as error:
        raise ConfigError(f"{short(path)} cannot be read: {error.strerror}.") from None
    except Unreadable as error:
        raise ConfigError(f"{path} {error}.") from None
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        problem = re.sub(r"\S{61,}", lambda long: short(long[0]), f"{error.problem or error.context}")
        raise ConfigError(f"{path}: {line}{problem}.") from None
    except (yaml.YAMLError, ValueError) as error:  # characters that are none, a number of a million digits
        raise ConfigError(f"{path} is not a YAML file: {str(error).splitlines()[0].partition(';')[0]}.") from None
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{path} holds {describe_value(tree)}; expected fields, such as {example}.")
    return tree


def parse_yaml(text: str) -> Any:
    """Return the value of a YAML text. Raises YAMLError and ValueError."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        _refuse_twice(node)
        return None if node is None else loader.construct_document(node)
    except OverflowError as error:  # a character beyond Unicode
        raise ValueError(str(error)) from None
    finally:
        loader.dispose()


def _refuse_twice(node: yaml.Node | None, section: str = "") -> None:
    """Refuse a key twice in a mapping, where PyYAML would keep the last in silence; there are two levels only."""
    first: dict[str, int] = {}
    for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
        if isinstance(key, yaml.ScalarNode):
            if key.value in first:
                problem = f"{section}{short(key.value)} is written twice, first in line {first[key.value]}: delete one"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=key.start_mark)
            first[key.value] = key.start_mark.line + 1
            if not section:
                _refuse_twice(value, f"{short(key.value)}.")


def _missing(path: Path) -> str:
    if not path.parent.is_dir():
        return f"{path} does not exist, nor does its folder {path.parent}."
    return f"{path} does not exist.{_hint(path.parent, path.name)}"


def _hint(folder: Path, name: str) -> str:
    """Name the file that was probably meant."""
    names: list[str] = []
    with suppress(OSError):  # a folder that may be entered but not listed
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    near = nearest(name, names) or next((other for other in names if other.endswith((".yaml", ".yml"))), None)
    return f" Did you mean {folder / near}?" if near else ""
